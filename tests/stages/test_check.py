"""`cauce check`: what it finds out and says, on tiny models and small data, without loading weights."""

import json
from pathlib import Path
from typing import Any

import pytest

from cauce.errors import DataError, RewardError
from cauce.recipe.models import DataSettings, LearnerSettings, ModelSettings, Recipe, RewardSettings
from cauce.stages.check import check, render
from cauce.stages.estimate import memory_by_role, read_size
from cauce.stages.lengths import PromptLengths
from tests.tiny import byte_tokenizer, tiny_model

ROWS = [{"question": f"{n} + 1?", "answer": f"count\n#### {n + 1}", "level": n} for n in range(20)]


def recipe(**data: Any) -> Recipe:
    """The smallest recipe, without a model."""
    return Recipe(
        data=DataSettings(**data),
        reward=RewardSettings(fn="gsm8k"),
        learner=LearnerSettings(tasks_per_plan=4),
    )


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), context=64)


def test_the_report_shows_rows_prompt_gold_scores_and_batch() -> None:
    report = check(recipe(), rows=ROWS, tokenizer=byte_tokenizer())
    assert [one.is_told_apart for one in report.scored] == [True] * 8
    assert report.scored[0].answer == "#### 1"  # the bare number scores 0 in this reward
    assert report.reward_columns == {"gsm8k": ["question", "answer", "level", "gold"]}
    longest = len("<user\n19 + 1?<\n<assistant\n")  # each marker is one token
    assert (report.survey.longest, report.num_surveyed, report.estimate) == (longest, 20, None)
    text = render(report)
    for part in (
        "rows        20",
        "gsm8k: columns question and answer",
        "  | <|im_start|>user\n  | 0 + 1?<|im_end|>\n  | <|im_start|>assistant",
        "gold        1\n",
        "gold answer '#### 1': 1",
        "empty answer: 0",
        "gold scores above empty on 8 of 8",
        "prompts per plan                           4",
        "not estimated",
    ):
        assert part in text
    assert "Warnings" not in text


def test_warnings_of_a_reward_that_reads_the_wrong_column_or_fails() -> None:
    def level_only(completions, level):
        return [float(text == "right") for text in completions]

    text = render(check(recipe(), rows=ROWS, reward=level_only, tokenizer=byte_tokenizer()))
    assert "level_only is given level" in text
    assert "on 8 of 8 rows tried the gold answer does not score above an empty one (train:0: '1' 0, empty 0)" in text

    def compute_score(data_source, solution_str, ground_truth):
        return {"known": lambda: float(solution_str == ground_truth)}[data_source]()

    mixed = [{"prompt": "p", "gold": "4", "data_source": "known"}] * 30
    mixed[17] = {**mixed[17], "data_source": "unknown"}
    text = render(check(recipe(), rows=mixed, reward=compute_score, tokenizer=byte_tokenizer()))
    assert "the reward fails on 1 of 9 rows tried; train:17: compute_score: KeyError: 'unknown'" in text
    with pytest.raises(RewardError, match="needs 'solution'"):
        check(recipe(), rows=ROWS, reward=lambda completions, solution: [0.0], tokenizer=byte_tokenizer())


def test_a_reward_that_fails_everywhere_is_more_than_a_warning() -> None:
    def raises(completions, **_):
        raise KeyError("oops")

    def fears_nothing(completions, **_):
        return [float(len(text)) for text in completions if text or text[0]]

    lost = check(recipe(), rows=ROWS, reward=raises, tokenizer=byte_tokenizer())
    assert lost.reward_failure.startswith("the reward fails on every answer to all 8 rows tried")
    assert "train:0: raises: KeyError: 'oops'" in lost.reward_failure
    partly = check(recipe(), rows=ROWS, reward=fears_nothing, tokenizer=byte_tokenizer())
    assert partly.reward_failure == ""
    assert "the reward fails on 8 of 8 rows tried; train:0: fears_nothing: IndexError" in render(partly)
    assert check(recipe(), rows=ROWS, tokenizer=byte_tokenizer()).reward_failure == ""


def test_the_function_that_was_chosen_is_said(tmp_path: Path) -> None:
    path = tmp_path / "score.py"
    path.write_text("def mine(completions, **_):\n    return [0.0] * len(completions)\n")
    settings = recipe().model_copy(update={"reward": RewardSettings(fn=str(path))})
    assert f"reward.fn = {str(path)!r} names no function: mine is taken" in render(
        check(settings, rows=ROWS, tokenizer=byte_tokenizer())
    )


def test_a_gold_answer_that_is_not_recognised_is_asked_for_with_the_columns_seen() -> None:
    rows = [{"prompt": "1 + 1?", "result": "2", "level": 1}] * 8
    settings = recipe().model_copy(update={"reward": RewardSettings(fn="last_number")})
    with pytest.raises(RewardError, match=r"needs 'answer'.*level, result.*data\.columns\.answer"):
        check(settings, rows=rows, tokenizer=byte_tokenizer())
    with pytest.raises(RewardError, match=r"needs 'gold'.*Name the column with data\.gold_key"):
        check(recipe(), rows=rows, reward=lambda completions, gold: [0.0], tokenizer=byte_tokenizer())
    text = render(check(recipe(), rows=rows, reward=lambda completions: [0.0], tokenizer=byte_tokenizer()))
    assert "no gold answer recognised: if one of the columns result, level is it, say data.gold_key=COLUMN" in text
    assert (
        "gold        not known; a column that holds it is named by data.gold_key=COLUMN (columns: result, level)"
        in text
    )


def test_warnings_of_the_data(tmp_path: Path) -> None:
    """C18, F1."""
    test = tmp_path / "test.jsonl"
    test.write_text("".join(json.dumps({"question": q, "answer": "1"}) + "\n" for q in ("0 + 1?", "new?")))
    rows = [*ROWS[:3], {"question": "long " * 50, "answer": "#### 1", "level": None}]
    text = render(check(recipe(test=str(test), max_prompt_tokens=60), rows=rows, tokenizer=byte_tokenizer()))
    assert "held out 2" in text
    assert "1 of 4 prompts rendered are too long" in text
    assert "a plan holds 4 prompts and the data about 3" in text
    assert "1 of 2 held-out prompts are in the training data as well" in text
    with pytest.raises(DataError, match="all 4 prompts are longer than 5 tokens"):
        check(recipe(max_prompt_tokens=5), rows=rows, tokenizer=byte_tokenizer())


def test_memory_time_and_context_come_from_the_config_alone(model_folder: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / name).write_bytes((model_folder / name).read_bytes())  # a model without its weights
    settings = recipe().model_copy(update={"model": ModelSettings(path=str(tmp_path))})
    long = [{"question": "x" * 100, "answer": "#### 1", "level": 0}]
    report = check(settings, rows=[*ROWS, *long])
    assert report.survey.too_long == (20,)  # the context is 64 tokens
    text = render(report)
    assert "learner" in text
    assert "rollout actor 1" in text
    assert "GiB" in text


def test_sizes_agree_with_the_weights_and_grow_as_they_should(model_folder: Path) -> None:
    from safetensors import safe_open

    size = read_size(model_folder)
    assert size is not None
    with safe_open(model_folder / "model.safetensors", framework="np") as file:
        elements = sum(file.get_tensor(name).size for name in file.keys())  # noqa: SIM118
    assert size.num_parameters == elements
    assert size.num_multiplied == elements - size.vocabulary * size.hidden
    assert (size.layers, size.kv_width, size.context) == (2, 16, 64)
    base, lengths = Recipe(), PromptLengths(mean=10, longest=20, source="by hand")
    more = base.model_copy(update={"algorithm": base.algorithm.model_copy(update={"kl_coef": 0.1})})
    plain, with_reference = (dict(memory_by_role(r, size, lengths)) for r in (base, more))
    assert with_reference["learner"] - plain["learner"] in (2 * elements, 4 * elements)
    two = base.model_copy(update={"rollout": base.rollout.model_copy(update={"actors": 2})})
    assert "rollout actor 2" in dict(memory_by_role(two, size, lengths))
    assert read_size(model_folder / "nothing") is None
