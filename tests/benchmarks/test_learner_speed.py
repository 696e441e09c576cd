"""The comparison of learners: the samples of a step, and both sides on them."""

from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks.bench import Bench
from benchmarks.learner_long import long_over
from benchmarks.learner_ours import batch_of, learner_of
from benchmarks.learner_padded import forward_backward, micro_batches
from benchmarks.learner_speed import surface_over
from benchmarks.learner_work import Cell, LearnerWork, step_of, trained_tokens, useful_tokens
from transformers import AutoModelForCausalLM

from tests.tiny import tiny_model

CELL = Cell(prompt=5, answer=4, group_size=3, num_groups=2)


def test_a_step_has_the_shape_of_its_cell() -> None:
    answers = step_of(CELL, seed=1)
    assert [answer.group for answer in answers] == [0, 0, 0, 1, 1, 1]
    assert all(len(answer.prompt_ids) == 5 and 2 <= len(answer.token_ids) <= 6 for answer in answers)
    assert np.array_equal(answers[0].prompt_ids, answers[2].prompt_ids)
    assert not np.array_equal(answers[0].prompt_ids, answers[3].prompt_ids)
    assert useful_tokens(answers) == 6 * 5 + trained_tokens(answers)
    assert all(answer.advantage for answer in answers)
    assert [len(a.token_ids) for a in step_of(CELL, seed=1)] == [len(a.token_ids) for a in answers]


def test_a_cell_of_the_surface_has_about_two_thousand_tokens() -> None:
    assert Cell.of(44, 24, 8).num_groups == 4  # 2000 / (8 * 68) = 3.7
    assert Cell.of(1024, 512, 16).num_groups == 1
    assert Cell.of(16, 24, 1).label == "16/24/1"


def test_work_travels_as_json() -> None:
    work = LearnerWork(model="m", dtype="fp32", rounds=(CELL, Cell.of(16, 24, 1)))
    assert LearnerWork.from_json(work.to_json()) == work


def test_micro_batches_fill_memory_and_not_more() -> None:
    few = step_of(Cell(prompt=4, answer=2, group_size=4, num_groups=1), seed=0)
    assert micro_batches(few) == [4]
    long = step_of(Cell(prompt=4000, answer=3000, group_size=2, num_groups=1), seed=0)
    assert micro_batches(long) == [1]
    usual = step_of(Cell(prompt=80, answer=32, group_size=8, num_groups=8), seed=0)
    assert micro_batches(usual) == [4, 8, 16, 32]  # rows of 128 tokens: 512 at least, 6,144 at most


def test_both_sides_have_the_same_loss_and_gradient(tmp_path: Path) -> None:
    folder = str(tiny_model(tmp_path / "tiny"))
    answers = step_of(CELL, seed=3)
    work = LearnerWork(model=folder, dtype="fp32", rounds=(CELL,))
    learner = learner_of(work)
    metrics = learner.forward_backward(batch_of(answers))
    ours = learner._weights.named_gradients()
    padded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    found = forward_backward(padded, answers, size=4)
    assert found["loss"] == pytest.approx(metrics["loss/total"], abs=1e-6)
    assert found["log_ratio"] == pytest.approx(metrics["sampler/log_ratio_abs_mean"], rel=1e-5)
    for name, parameter in padded.named_parameters():
        torch.testing.assert_close(parameter.grad, ours[name], atol=1e-6, rtol=1e-4)


@pytest.mark.slow
def test_long_prompts_are_played_by_both_and_then_by_ours_alone(tmp_path: Path) -> None:
    bench = Bench(model=str(tiny_model(tmp_path / "tiny")), cache=tmp_path / "cache", charts=tmp_path)
    result = long_over(bench, prompts=(8, 16, 32), peer_prompts=(8, 16))["learner_long"]
    assert list(result.detail["ours"]["rate"]) == ["8/4/8", "16/8/8", "32/16/8"]
    assert list(result.detail["ratio"]) == ["8/4/8", "16/8/8"]
    assert result.ratio == pytest.approx(result.detail["ratio"]["16/8/8"])
    for side in ("ours", "peer"):
        assert all(peak > 50 for peak in result.detail[side]["peak_mb"].values())


@pytest.mark.slow
def test_the_surface_names_its_worst_cell(tmp_path: Path) -> None:
    bench = Bench(model=str(tiny_model(tmp_path / "tiny")), cache=tmp_path / "cache", charts=tmp_path)
    cells = [Cell(prompt=prompt, answer=4, group_size=4, num_groups=1) for prompt in (4, 32)]
    result = surface_over(bench, cells)["learner_surface"]
    ratios = result.detail["ratio"]
    assert ratios.keys() == {"4/4/4", "32/4/4"}
    assert result.ratio == pytest.approx(min(ratios.values()))
    worst = min(ratios, key=lambda label: ratios[label])
    assert result.settings["cell"].startswith(worst)
