"""The learning rate by hand, and that only optimizer steps move it."""

import numpy as np
import pytest

from cauce.algorithms.advantages import make_batch
from cauce.learner.learner import Learner
from cauce.learner.schedule import learning_rate
from tests.learner.cases import algorithm, loaded, random_sequences, settings


def rates(schedule, warmup_steps, total_steps):
    names = {"lr": 1.0, "schedule": schedule, "warmup_steps": warmup_steps, "total_steps": total_steps}
    return [learning_rate(step, **names) for step in range(total_steps)]


@pytest.mark.parametrize(
    ("schedule", "warmup_steps", "expected"),
    [
        ("constant", 0, [1, 1, 1, 1]),
        ("constant", 2, [0.5, 1, 1, 1]),
        ("linear", 0, [1, 0.75, 0.5, 0.25]),
        ("linear", 2, [0.5, 1, 1, 0.5]),
        ("linear", 4, [0.25, 0.5, 0.75, 1]),  # warmup over all steps ends at lr
        ("cosine", 0, [1, (1 + np.cos(np.pi / 4)) / 2, 0.5, (1 + np.cos(3 * np.pi / 4)) / 2]),
        ("linear", 8, [0.125, 0.25, 0.375, 0.5]),
    ],
)
def test_by_hand(schedule, warmup_steps, expected):
    """A19."""
    assert rates(schedule, warmup_steps, 4) == pytest.approx(expected)


def test_after_the_last_step_it_stays_at_the_end():
    for schedule, end in (("linear", 0.0), ("cosine", 0.0), ("constant", 0.1)):
        found = learning_rate(25, lr=0.1, schedule=schedule, warmup_steps=0, total_steps=20)
        assert found == pytest.approx(end)


def test_four_plans_of_three_mini_batches_are_twelve_steps(tmp_path):
    """A19."""
    learner = Learner(
        loaded(tmp_path / "model"),
        algorithm=algorithm(),
        settings=settings(lr=0.1, schedule="linear", token_budget=8),
        temperature=1.0,
        total_steps=12,
    )
    batch = make_batch(random_sequences(0, groups=1, answers=2, longest=4))
    found = []
    for _ in range(12):
        learner.forward_backward(batch)  # several micro-batches
        found.append(learner.optim_step()["optim/lr"])
    assert found == pytest.approx([0.1 * (1 - k / 12) for k in range(12)])
