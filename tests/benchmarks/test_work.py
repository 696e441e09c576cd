"""The work both sides do: its record, its rewards, and the recipe that does it on our side."""

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.bench import Bench
from benchmarks.ours import digest_of_prompts, recipe_of
from benchmarks.rewards import correct, ramp
from benchmarks.workload import Workload, prompt_digest

from cauce.data.addition import addition_rows
from cauce.models.load import load_tokenizer
from tests.tiny import tiny_model


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(model=str(tiny_model(tmp_path / "tiny")), steps=2, cache=tmp_path / "cache", charts=tmp_path)


def test_work_travels_as_json(bench: Bench, tmp_path: Path) -> None:
    work = bench.workload(tmp_path, reward="ramp", num_steps=3)
    assert Workload.from_json(work.to_json()) == work
    rows = work.read_rows()
    assert len(rows) == 24
    first = addition_rows("train")[0]
    assert rows[0] == {"prompt": first.prompt, "answer": first.columns["answer"]}
    assert str(tmp_path) not in json.dumps(work.settings())


def test_our_recipe_does_the_work_and_nothing_else(bench: Bench, tmp_path: Path) -> None:
    work = bench.workload(tmp_path, reward="ramp", num_steps=3)
    recipe = recipe_of(work, run_folder=str(tmp_path / "runs"), dtype="fp32")
    assert (recipe.run.plans, recipe.learner.tasks_per_plan, recipe.rollout.group_size) == (3, 8, 8)
    assert (recipe.rollout.max_tokens, recipe.rollout.temperature, recipe.learner.lr) == (48, 1.0, 1e-5)
    assert (recipe.learner.mini_batches, recipe.learner.epochs, recipe.algorithm.kl_coef) == (1, 1, 0.0)
    assert (recipe.learner.weight_decay, recipe.learner.schedule, recipe.learner.max_grad_norm) == (0, "constant", 1)
    assert (recipe.data.shuffle, recipe.data.test, recipe.eval.at_start) == (False, "", False)
    assert recipe.reward.names[0].endswith("rewards.py:ramp")
    assert (recipe.engine.dtype, recipe.learner.dtype) == ("fp32", "fp32")


def test_digest_sees_every_token_and_the_order(bench: Bench, tmp_path: Path) -> None:
    work = bench.workload(tmp_path, reward="correct", num_steps=1)
    recipe = recipe_of(work, run_folder=str(tmp_path / "runs"), dtype="fp32")
    expected = [f"<|im_start|>user\n{row['prompt']}<|im_end|>\n<|im_start|>assistant\n" for row in work.read_rows()]
    tokenizer = load_tokenizer(work.model)
    assert digest_of_prompts(work, recipe) == prompt_digest(tokenizer(text)["input_ids"] for text in expected)
    assert prompt_digest([[1, 2], [3]]) != prompt_digest([[1], [2, 3]])
    assert prompt_digest([[1], [2]]) != prompt_digest([[2], [1]])


def test_correct_reads_the_last_number() -> None:
    answers: list[Any] = ["23 + 45 = 68.", "68, or 69", "", "1,068", [{"role": "assistant", "content": "it is 68"}]]
    assert correct(answers, answer=["68"] * 5) == [1.0, 0.0, 0.0, 0.0, 1.0]


def test_ramp_differs_within_every_group() -> None:
    rewards = ramp(["same"] * 16)
    assert rewards[:8] == rewards[8:] == [i / 7 for i in range(8)]
