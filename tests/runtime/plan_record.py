"""Rewards and learners that whole runs are tested with, and what such a run has recorded."""

from pathlib import Path
from typing import Any

import numpy as np

from cauce.journal import Journal, PlanRecord
from cauce.runtime.roles import LearnerWorker
from cauce.types import Group


def equal(completions: list[Any], **_: Any) -> list[float]:
    return [1.0] * len(completions)


def plans(run: Path) -> list[PlanRecord]:
    with Journal.read_only(run) as journal:
        return journal.plans()


def groups(run: Path, plan: int) -> list[Group]:
    with Journal.read_only(run) as journal:
        return [journal.group(task) for task in journal.plans()[plan - 1].plan.tasks]


def rewards(group: Group) -> list[float | None]:
    return [sample.outcome.value for sample in group.samples]


def poisoned(*calls: int) -> type[LearnerWorker]:
    """A learner whose nth forward_backward leaves an infinite gradient behind."""

    class Poisoned(LearnerWorker):
        calls = 0

        def forward_backward(self, **kwargs: Any) -> dict[str, float]:
            metrics = super().forward_backward(**kwargs)
            Poisoned.calls += 1
            if Poisoned.calls in calls:
                gradients = self._learner._weights.named_gradients()
                gradients[next(iter(gradients))][0] = np.inf
            return metrics

    return Poisoned
