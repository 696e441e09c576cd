"""Scoring by the three conventions: what functions get, and what becomes of what they return."""

import asyncio
import math
from typing import Any

import numpy as np
import pytest
import torch

from cauce.errors import RewardError
from cauce.recipe.models import RewardSettings
from cauce.rewards.load import load_reward
from cauce.rewards.reward import RewardResult
from cauce.types import Row

TURNS = [{"role": "user", "content": "2 + 2?"}]


def score(functions: Any, texts: list[str], rows: list[Row] | None = None, **settings: Any) -> RewardResult:
    """Score texts as answers to rows, by default all to one row of text."""
    rows = rows or [Row(id="train:0", prompt="2 + 2?", columns={"answer": "4"})] * len(texts)
    reward = load_reward(functions, settings=RewardSettings(**settings))
    ids = [[i, i + 1] for i in range(len(texts))]
    return reward.score(rows=rows, texts=texts, token_ids=ids, step=3, max_steps=40, epoch=0.5)


def numbers(result: RewardResult) -> list[float | None]:
    return [outcome.value for outcome in result.outcomes]


def statuses(result: RewardResult) -> list[str]:
    return [outcome.status for outcome in result.outcomes]


def test_native_call_gets_everything_by_keyword() -> None:
    seen: dict[str, Any] = {}

    def spy(prompts, completions, completion_ids, trainer_state, log_extra, log_metric, **columns):
        seen.update(prompts=prompts, completions=completions, ids=completion_ids, columns=columns)
        seen["state"] = (trainer_state.global_step, trainer_state.max_steps, trainer_state.epoch)
        log_extra("note", ["a", "b"])
        log_metric("length", 4)
        log_metric("length", 6)
        return [1, np.float32(0.5)]

    rows = [
        Row(id="train:0", prompt="2 + 2?", columns={"answer": "4", "level": 1, "completion": "x"}),
        Row(id="train:1", prompt=TURNS, columns={"answer": "5", "level": None, "completion": "y"}),
    ]
    result = score(spy, ["four", "five"], rows)
    assert seen["prompts"] == ["2 + 2?", TURNS]
    assert seen["completions"] == ["four", [{"role": "assistant", "content": "five"}]]
    assert seen["ids"] == [[0, 1], [1, 2]]
    assert seen["columns"] == {"answer": ["4", "5"], "level": [1, None]}
    assert seen["state"] == (3, 40, 0.5)
    assert numbers(result) == [1.0, 0.5]
    assert result.metrics == {"reward/spy/length": 5.0}
    assert result.extras == {"note": ["a", "b"]}


def test_none_from_one_function_abstains_and_from_all_excludes() -> None:
    """E8."""

    def first(completions):
        return [1.0, None, 0.0, 1.0]

    def second(completions):
        return [None, None, 2.0, 0.0]

    result = score([first, second], ["a"] * 4, weights=[1.0, 0.5])
    assert numbers(result) == [1.0, None, 1.0, 1.0]
    assert statuses(result) == ["scored", "abstained", "scored", "scored"]
    assert result.outcomes[2].parts == {"first": 0.0, "second": 2.0}


def test_one_raising_sample_leaves_the_others_alone() -> None:
    """E5, E6."""

    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        if solution_str == "bad":
            raise KeyError("no such unit")
        return float(solution_str == ground_truth)

    rows = [Row(id="train:0", prompt=TURNS, columns={"gold": "4"})] * 4
    result = score(compute_score, ["4", "bad", "5", "4"], rows)
    assert numbers(result) == [1.0, None, 0.0, 1.0]
    assert statuses(result) == ["scored", "failed", "scored", "scored"]
    detail = result.outcomes[1].detail
    assert detail.startswith("compute_score: KeyError: 'no such unit' (")
    assert "test_reward.py" in detail


def test_a_call_for_several_groups_loses_only_the_bad_group() -> None:
    """E6."""

    def picky(completions, answer):
        if "?" in answer:
            raise ValueError("unreadable gold")
        return [1.0] * len(completions)

    rows = [Row(id=f"train:{i // 2}", prompt="p", columns={"answer": "?" if i // 2 == 1 else "4"}) for i in range(6)]
    result = score(picky, ["a"] * 6, rows)
    assert statuses(result) == ["scored"] * 2 + ["failed"] * 2 + ["scored"] * 2


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, "1.0", object()])
def test_what_is_no_finite_number_fails_and_is_never_zero(value: object) -> None:
    """E5, E8."""
    result = score(lambda completions: [1.0, value], ["a", "b"])
    assert statuses(result) == ["scored", "failed"]
    assert result.outcomes[1].value is None
    assert result.outcomes[1].detail.startswith("lambda: lambda returned")


def test_a_list_of_another_length_names_both_numbers() -> None:
    with pytest.raises(RewardError, match="returned 1 values for 3 completions"):
        score(lambda completions: [1.0], ["a"] * 3)
    with pytest.raises(RewardError, match="returned float where a list of 3 numbers"):
        score(lambda completions: 1.0, ["a"] * 3)


def test_arrays_and_tensors_are_lists_too() -> None:
    assert numbers(score(lambda completions: np.array([1, 0]), ["a", "b"])) == [1.0, 0.0]
    assert numbers(score(lambda completions: torch.tensor([1.0, 0.25]), ["a", "b"])) == [1.0, 0.25]


def test_missing_column_is_an_error_that_names_it() -> None:
    def accuracy(completions, solution):
        return [1.0] * len(completions)

    with pytest.raises(RewardError, match=r"accuracy needs 'solution'.*answer.*data\.columns\.solution"):
        score(accuracy, ["a"])


def test_verl_without_gold_says_so() -> None:
    def compute_score(data_source, solution_str, ground_truth):
        return 1.0

    with pytest.raises(RewardError, match=r"'ground_truth'.*data\.gold_key"):
        score(compute_score, ["a"])


def test_verl_call_and_dict_result() -> None:
    seen: list[dict[str, Any]] = []

    def compute_score(data_source, solution_str, ground_truth, extra_info=None, strict=False):
        seen.append({"source": data_source, "truth": ground_truth, "extra": extra_info, "strict": strict})
        return {"score": solution_str == ground_truth, "format": 0.5, "pred": "text is no metric"}

    columns = {
        "data_source": "mine",
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "extra_info": {"index": 7, "split": "train"},
    }
    rows = [Row(id="train:0", prompt=TURNS, columns=columns)] * 2
    result = score(compute_score, ["4", "5"], rows, kwargs={"strict": True})
    assert numbers(result) == [1.0, 0.0]
    assert result.metrics == {"reward/compute_score/format": 0.5}
    assert seen[0]["source"] == "mine"
    assert seen[0]["truth"] == "4"
    assert seen[0]["strict"] is True
    assert seen[0]["extra"]["index"] == 7
    assert "num_turns" in seen[0]["extra"]
    assert columns["extra_info"] == {"index": 7, "split": "train"}  # the row is not written to


def test_verl_dict_without_score_fails() -> None:
    def compute_score(solution_str, ground_truth):
        return {"reward": 1.0}

    rows = [Row(id="train:0", prompt="p", columns={"gold": "4"})]
    assert "without 'score' (keys: reward)" in score(compute_score, ["4"], rows).outcomes[0].detail


def test_openrlhf_call_and_result() -> None:
    seen: list[tuple[list[str], list[str], list[str]]] = []

    def reward_func(queries, prompts, labels, **kwargs):
        seen.append((queries, prompts, labels))
        right = float(queries[0].endswith(labels[0]))
        return {
            "rewards": torch.tensor([right]),
            "scores": torch.tensor([right]),
            "extra_logs": {"hits": right},
        }

    rows = [Row(id="train:0", prompt="2 + 2? ", columns={"label": "4"})] * 2
    result = score(reward_func, ["4", "5"], rows)
    assert seen[0] == (["2 + 2? 4"], ["2 + 2? "], ["4"])
    assert numbers(result) == [1.0, 0.0]
    assert result.metrics == {"reward/reward_func/hits": 0.5}


def test_async_functions_run_side_by_side_and_inside_a_running_loop() -> None:
    async def compute_score(solution_str, ground_truth):
        entered.append(solution_str)
        while len(entered) < 2:  # both calls must be under way before either ends
            await asyncio.sleep(0)
        return float(solution_str == ground_truth)

    async def whole(completions, **_):
        raise OSError("judge is down")

    async def from_a_notebook() -> RewardResult:
        return score(compute_score, ["4", "5"], rows)

    rows = [Row(id="train:0", prompt="p", columns={"gold": "4"})] * 2
    entered: list[str] = []
    assert numbers(score(compute_score, ["4", "5"], rows)) == [1.0, 0.0]
    entered.clear()
    assert numbers(asyncio.run(from_a_notebook())) == [1.0, 0.0]
    failed = score(whole, ["4", "5"], rows)
    assert statuses(failed) == ["failed", "failed"]
    assert failed.outcomes[0].detail.startswith("whole: OSError: judge is down")


def test_a_plain_function_may_run_a_loop_of_its_own() -> None:
    async def judge() -> float:
        return 0.5

    assert numbers(score(lambda completions: [asyncio.run(judge())], ["a"])) == [0.5]


def test_a_function_that_exits_does_not_end_the_process() -> None:
    def leaver(completions):
        raise SystemExit(3)

    assert score(leaver, ["a"]).outcomes[0].detail.startswith("leaver: SystemExit: 3")


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda completions, solution_str: 0, "two conventions, native and verl"),
        (lambda text, gold: 0, "no known convention"),
        (lambda completion, answer: 0, "single `completion`"),
    ],
)
def test_an_unclear_signature_is_refused(function, words: str) -> None:
    with pytest.raises(RewardError, match=words):
        load_reward(function)
