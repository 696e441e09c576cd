"""Training on plans that are in the record already, and on nothing else: the trainer of a fork.

The samples come from the policy of the run that was forked. At the first plan of a fork that policy is its own; from
then on the two part, the truncated importance correction weighs each token by how likely the fork finds it, and
`sampler/effective_sample_size` says how much is left of a plan's tokens after that weighing. It takes one forward pass
more a plan. Nothing is generated, so nothing is published and nothing evaluated.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from cauce.runtime.flow import Tally
from cauce.runtime.learn import Learned
from cauce.runtime.trainer import Trainer, oldest_version
from cauce.types import Group, Plan, ScoredBatch


class NoFlow:
    """The desk of a run without tasks to come."""

    def __init__(self) -> None:
        self.version = 0
        self.num_answers = 0
        self.tally = Tally()

    def admit(self, num: int) -> None:
        """Takes nothing."""

    def restore(self) -> None:
        """Has nothing unfinished."""

    def undecided(self) -> set[int]:
        return set()

    def reset_tally(self) -> None:
        self.tally = Tally()


class ForkTrainer(Trainer):
    """Finishes the plans of the record, in their order."""

    def train(self) -> None:
        self.finish_planned()
        self.checkpoint_if_due()

    def train_on(self, plan: Plan, groups: list[Group]) -> tuple[Learned, str]:
        scored = self._survive(lambda: self.learner.score(groups, proximal=True))
        learned, checksum = super().train_on(plan, groups)
        share = effective_sample_size(scored)
        return replace(learned, metrics={**learned.metrics, "sampler/effective_sample_size": share}), checksum

    @property
    def is_on_policy(self) -> bool:
        return False

    def staleness(self, groups: Sequence[Group]) -> int:
        """Versions since the newest one that the learner and the oldest token of the plan have in common."""
        return max(self.version - min(oldest_version(group), self.journal.forked_at) for group in groups)

    def publish(self) -> None:
        """Nobody reads the weights of a fork while it trains."""

    def evaluate_if_due(self) -> None:
        """An evaluation generates."""


def effective_sample_size(scored: ScoredBatch) -> float:
    """(sum w)^2 / (n sum w^2) over the plan's trained tokens, w = pi / pi_sampler before any truncation.

    1 where policy and sampler agree on every token; 1/n where one token outweighs all others.
    """
    assert scored.proximal_logps is not None
    ratios = [
        (logps - sample.completion.logps)[sample.completion.mask != 0]
        for group, group_logps in zip(scored.groups, scored.proximal_logps, strict=True)
        for sample, logps in zip(group.samples, group_logps, strict=True)
        if sample.outcome.status == "scored"
    ]
    log_w = np.concatenate(ratios).astype(np.float64) if ratios else np.zeros(0)
    if not len(log_w):
        return 1.0
    weights = np.exp(log_w - log_w.max())  # a common factor cancels, and nothing overflows
    return float(weights.sum() ** 2 / (len(weights) * (weights**2).sum()))
