"""Admission numbers to tasks: order over epochs, the same in every instance, tokens as the environment renders them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cauce.data.order import row_index
from cauce.data.source import load_rows
from cauce.environments.single_turn import SingleTurn
from cauce.recipe.models import DataSettings
from cauce.runtime.tasks import TaskSource, content_hash
from cauce.types import Row
from tests.environments.test_single_turn import bos_tokenizer
from tests.tiny import CHAT_TEMPLATE, EOS_ID, byte_tokenizer

ROWS = [{"prompt": f"say {i}", "answer": str(i)} for i in range(7)]


def source(rows: list[dict[str, Any]] = ROWS, *, seed: int = 3, shuffle: bool = True, limit: int = 64) -> TaskSource:
    settings = DataSettings()
    return TaskSource(
        load_rows(rows, settings=settings, split="train"),
        SingleTurn(byte_tokenizer(), settings),
        seed=seed,
        shuffle=shuffle,
        max_prompt_tokens=limit,
        eos_token_ids=(EOS_ID,),
    )


def row_ids(tasks: TaskSource, numbers: range) -> list[str]:
    return [tasks.task(number).row.id for number in numbers]


def test_every_epoch_holds_every_row_once_and_goes_on_at_its_boundary() -> None:
    """G1, G2: the position is the admission number and nothing else, so that a resume asks the same questions."""
    straight = row_ids(source(), range(21))
    assert [sorted(straight[i : i + 7]) for i in (0, 7, 14)] == [[f"train:{i}" for i in range(7)]] * 3
    assert len({tuple(straight[i : i + 7]) for i in (0, 7, 14)}) == 3
    for stop in (0, 6, 7, 8, 14):  # in mid-epoch and exactly at its end
        assert row_ids(source(), range(stop)) + row_ids(source(), range(stop, 21)) == straight
    assert straight == [f"train:{row_index(n, 7, 3, True)}" for n in range(21)]
    assert row_ids(source(seed=4), range(21)) != straight
    assert row_ids(source(shuffle=False), range(9)) == [f"train:{i % 7}" for i in range(9)]


def test_a_task_carries_its_number_its_row_and_the_rendered_prompt() -> None:
    """F13: prompt and columns stay together, after shuffling and on every round."""
    tasks = source()
    for number in (0, 5, 12):
        task = tasks.task(number)
        assert task.id == number
        assert task.row.prompt == f"say {task.row.columns['answer']}"
        assert byte_tokenizer().decode(task.prompt_ids) == (
            f"<|im_start|>user\n{task.row.prompt}<|im_end|>\n<|im_start|>assistant\n"
        )
        assert task.prompt_ids.dtype == np.int32
    evaluated = tasks.of_row(-1, tasks.task(0).row)
    assert (evaluated.id, evaluated.content_hash) == (-1, tasks.task(0).content_hash)


def test_the_prompt_of_training_and_of_evaluation_has_one_bos() -> None:
    """C15: where template and tokenizer both print one, in tasks of both kinds."""
    settings = DataSettings()
    tokenizer = bos_tokenizer("{{ bos_token }}" + CHAT_TEMPLATE)
    rows = load_rows(ROWS, settings=settings, split="train")
    environment = SingleTurn(tokenizer, settings)
    tasks = TaskSource(rows, environment, seed=0, shuffle=False, max_prompt_tokens=64, eos_token_ids=(EOS_ID,))
    found = [tasks.task(0), tasks.of_row(-1, rows[0])]
    for task in found:
        assert task.prompt_ids.tolist() == environment.render(rows[0]).token_ids.tolist()
        assert task.prompt_ids.tolist().count(tokenizer.bos_token_id) == 1


def test_too_long_is_said_and_nothing_is_cut() -> None:
    """C18."""
    tasks = source([{"prompt": "x" * 100, "answer": "1"}, {"prompt": "x", "answer": "2"}], shuffle=False)
    long, short = tasks.task(0), tasks.task(1)
    assert len(long.prompt_ids) > 100
    assert (tasks.is_too_long(long), tasks.is_too_long(short)) == (True, False)


def test_answers_reach_the_reward_without_their_stop_token() -> None:
    letters = byte_tokenizer()("ok").input_ids
    assert source().answer_text(np.asarray([*letters, EOS_ID])) == "ok"
    assert source().answer_text(np.asarray(letters)) == "ok"


@pytest.mark.parametrize(
    "other",
    [
        Row(id="a", prompt="q", columns={"x": 2}),
        Row(id="a", prompt="p", columns={"x": 1}),
        Row(id="a", prompt="q", columns={"x": 1, "y": None}),
        Row(id="a", prompt=[{"role": "user", "content": "q"}], columns={"x": 1}),
    ],
)
def test_the_content_hash_is_of_prompt_and_columns(other: Row) -> None:
    row = Row(id="a", prompt="q", columns={"x": 1})
    assert content_hash(row) == content_hash(Row(id="b", prompt="q", columns={"x": 1}))
    assert content_hash(row) != content_hash(other)
    assert content_hash(Row(id="a", prompt="q", columns={"p": Path("x")}))  # what JSON does not know
