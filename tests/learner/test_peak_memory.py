"""The peak of a step: it is there, it grows with the budget, and not with what a step has to train."""

import numpy as np
import pytest
import torch

from cauce.algorithms.advantages import make_batch
from cauce.learner import peak_memory
from cauce.learner.learner import Learner
from cauce.learner.peak_memory import PeakMemory
from cauce.runtime.process import give_back_memory
from tests.learner.cases import algorithm, loaded, sequence, settings

CPU = torch.device("cpu")
needs_reset = pytest.mark.skipif(not peak_memory._reset_high_water(), reason="the high-water mark cannot be set back")


@needs_reset
def test_the_peak_is_of_the_step_and_not_of_what_was_before():
    memory = PeakMemory(CPU)
    memory.begin()
    before = memory.end()
    held = np.ones(50 * 2**20, np.uint8)
    del held  # 50 MiB are let go before the next step
    memory.begin()
    quiet = memory.end()
    memory.begin()
    held = np.ones(50 * 2**20, np.uint8)
    del held
    memory.begin()  # of the same step: forgets nothing
    loud = memory.end()
    assert abs(quiet - before) < 10
    assert 45 < loud - quiet < 60


def test_where_it_cannot_be_set_back_the_highest_so_far_is_told(monkeypatch, tmp_path):
    monkeypatch.setattr(peak_memory, "PROC", tmp_path / "closed")
    memory = PeakMemory(CPU)
    memory.begin()
    assert memory.end() > 50  # of a process that has torch


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "model"
    shape = {"layers": 8, "hidden": 96, "context": 4096}

    def learner(budget, *, compiled):
        made = loaded(folder, **shape)
        changes = settings(token_budget=budget, compiled=compiled)
        return Learner(made, algorithm=algorithm(), settings=changes, temperature=1.0, total_steps=10)

    return learner


def peak(learner, groups, *, prompt=30, answer=60, answers=4):
    """MiB beyond what the process holds when a second step begins."""
    batch = make_batch(
        [
            sequence(g, [n % 250 for n in range(prompt)], [n % 250 for n in range(answer)])
            for g in range(groups)
            for _ in range(answers)
        ]
    )
    for _ in range(2):  # the first makes the optimizer's moments
        give_back_memory()
        memory = PeakMemory(CPU)
        memory.begin()
        before = memory.end()
        learner.forward_backward(batch)
        found = learner.optim_step()["learner/peak_memory_mb"]
    return found - before


@needs_reset
@pytest.mark.parametrize("compiled", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_memory_is_bounded_by_the_budget_not_by_the_step(model, compiled):
    few, many = (peak(model(600, compiled=compiled), groups) for groups in (2, 8))
    wide = peak(model(2400, compiled=compiled), 8)
    assert wide > 2.5 * few
    assert many < few + 0.25 * (wide - few)


@needs_reset
@pytest.mark.parametrize("compiled", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_group_of_many_budgets_takes_about_one(model, compiled):
    usual = peak(model(600, compiled=compiled), 4)
    # 2,800 tokens in one micro-batch, almost five budgets, against the same with all activations kept.
    long = {"prompt": 1000, "answer": 225, "answers": 8}
    remade, kept = (peak(model(budget, compiled=compiled), 1, **long) for budget in (600, 6000))
    assert remade < 0.6 * kept
    assert remade < 3 * usual
