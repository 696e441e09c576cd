"""From scored groups to what the learner trains on: advantages, one effective mask, global counts.

Leaves out the loss (losses.py) and log text: `untrainable_groups` returns the groups that cannot be trained
on, for the trainer to count and name. Statistics are per group, that is per task id, whatever the order of
groups and samples.

Who counts:
  * An answer that could not be scored (abstained, failed, timed out) or was aborted leaves the statistics and
    the loss. It is never a 0.
  * With mask_truncated an answer that ended by length leaves the statistics too (its reward says little), and
    its mask is 0 throughout, so that it is in neither numerator nor denominator. Its reward is reported.
  * A group with fewer than two answers left gives no sequences.
  * A group of equal rewards gives sequences of advantage exactly 0. Their tokens count in every denominator,
    and with KL in the loss they still receive its gradient.
Token ids are passed on as they were sampled: no end-of-sequence token is added where none was sampled.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from cauce.algorithms.kl import kl_value
from cauce.algorithms.table import Algorithm
from cauce.errors import TrainingStopped
from cauce.recipe.traits import Advantage
from cauce.types import Batch, Group, Sample, ScoredBatch, TrainSequence

# Rewards of a group that differ by less than this share of the largest are equal: it is float32's rounding,
# and dividing by it would turn noise into full advantages.
EQUAL_REWARDS = 1e-6
MIN_GROUP_SIZE = 2


def group_advantages(reward_G: np.ndarray | Sequence[float], kind: Advantage) -> np.ndarray:
    """One advantage per answer of a group, float32; exactly 0 for a group of one or of equal rewards.

    Computed in float64 with the variance in two passes; the formulas are those of ADVANTAGES below.
    """
    reward_G = np.asarray(reward_G, dtype=np.float64)
    if reward_G.ndim != 1 or not np.isfinite(reward_G).all():
        raise ValueError(f"group_advantages: rewards {reward_G} must be one finite number per answer")
    if len(reward_G) < MIN_GROUP_SIZE:
        warnings.warn("a group of one answer has no statistics: its advantage is 0", stacklevel=2)
        return np.zeros(len(reward_G), dtype=np.float32)
    if _are_equal(reward_G):
        return np.zeros(len(reward_G), dtype=np.float32)
    return ADVANTAGES[kind](reward_G).astype(np.float32)


def group_std(reward_G: NDArray[np.float64]) -> NDArray[np.float64]:
    """A_i = (r_i - mean(r)) / std(r), std with ddof 1. GRPO, arXiv 2402.03300.

    Never beyond (G - 1) / sqrt(G), so nothing is added to the denominator.
    """
    return group_mean(reward_G) / float(reward_G.std(ddof=1))


def group_mean(reward_G: NDArray[np.float64]) -> NDArray[np.float64]:
    """A_i = r_i - mean(r). Dr. GRPO, arXiv 2503.20783."""
    return reward_G - float(reward_G.mean())


def leave_one_out(reward_G: NDArray[np.float64]) -> NDArray[np.float64]:
    """A_i = r_i - 1/(G - 1) sum_(j != i) r_j. RLOO, arXiv 2402.14740."""
    size = len(reward_G)
    return size / (size - 1) * group_mean(reward_G)


ADVANTAGES: dict[Advantage, Callable[[NDArray[np.float64]], NDArray[np.float64]]] = {
    "group_std": group_std,
    "group_mean": group_mean,
    "leave_one_out": leave_one_out,
}


def train_sequences(algorithm: Algorithm, scored: ScoredBatch) -> tuple[TrainSequence, ...]:
    """The answers that enter the loss, in the order of groups and samples.

    Raises TrainingStopped where a log-probability of a trained token, or a reward, is not finite.
    """
    for name, is_needed, logps in (
        ("proximal_logps", False, scored.proximal_logps),
        ("reference_logps", algorithm.needs_reference, scored.reference_logps),
    ):
        if logps is None and is_needed:
            raise ValueError(f"algorithm {algorithm.name} with kl_coef = {algorithm.kl_coef} needs {name}")
        if logps is not None and [len(g) for g in logps] != [len(g.samples) for g in scored.groups]:
            raise ValueError(f"scored batch: {name} does not run parallel to groups and samples")
    sequences: list[TrainSequence] = []
    for position, group in enumerate(scored.groups):
        proximal = scored.proximal_logps[position] if scored.proximal_logps is not None else None
        reference = scored.reference_logps[position] if scored.reference_logps is not None else None
        sequences += _group_sequences(algorithm, group, proximal, reference)
    return tuple(sequences)


def untrainable_groups(algorithm: Algorithm, groups: Sequence[Group]) -> tuple[int, ...]:
    """Tasks with fewer than two answers that statistics can be made of; they give no sequences."""
    return tuple(g.task for g in groups if len(_counted(algorithm, g)) < MIN_GROUP_SIZE)


def has_reward_spread(algorithm: Algorithm, group: Group) -> bool:
    """Whether the answers that enter the group's statistics differ in their rewards; what dynamic sampling asks."""
    rewards = [group.samples[position].outcome.value for position in _counted(algorithm, group)]
    return len(rewards) >= MIN_GROUP_SIZE and not _are_equal(np.asarray(rewards, dtype=np.float64))


def make_batch(sequences: Sequence[TrainSequence]) -> Batch:
    """One optimizer step's sequences with the counts that its loss is divided by."""
    tokens = [int(np.count_nonzero(s.mask)) for s in sequences]
    return Batch(
        sequences=tuple(sequences),
        num_tokens=sum(tokens),
        num_sequences=sum(1 for count in tokens if count > 0),
    )


def carries_signal(algorithm: Algorithm, groups: Sequence[Group]) -> bool:
    """Whether the rewards of any group say something. A KL term moves the weights without them as well, but then
    only back to the reference, or by differences in KL alone."""
    return any(has_reward_spread(algorithm, group) for group in groups)


def _are_equal(reward_G: NDArray[np.float64]) -> bool:
    return bool(np.ptp(reward_G) <= EQUAL_REWARDS * np.abs(reward_G).max())


def _group_sequences(
    algorithm: Algorithm,
    group: Group,
    proximal: Sequence[np.ndarray] | None,
    reference: Sequence[np.ndarray] | None,
) -> list[TrainSequence]:
    counted = _counted(algorithm, group)
    if len(counted) < MIN_GROUP_SIZE:
        return []
    sequences = {
        position: _sequence(algorithm, group, position, proximal, reference)
        for position, sample in enumerate(group.samples)
        if _is_scored(sample)
    }
    reward_G = [_reward(algorithm, group.samples[position], sequences[position]) for position in counted]
    advantage_G = group_advantages(reward_G, algorithm.advantage)
    for position, advantage in zip(counted, advantage_G, strict=True):
        sequence = sequences[position]
        advantages = np.full_like(sequence.advantages, advantage)
        sequences[position] = replace(sequence, advantages=advantages)
    return list(sequences.values())


def _sequence(
    algorithm: Algorithm,
    group: Group,
    position: int,
    proximal: Sequence[np.ndarray] | None,
    reference: Sequence[np.ndarray] | None,
) -> TrainSequence:
    """The answer with its effective mask and an advantage of 0."""
    sample = group.samples[position]
    completion = sample.completion
    sequence = TrainSequence(
        group=group.task,
        prompt_ids=group.prompt_ids,
        token_ids=completion.token_ids,
        mask=np.zeros_like(completion.mask) if _is_masked(algorithm, sample) else completion.mask,
        advantages=np.zeros(len(completion.token_ids), dtype=np.float32),
        behaviour_logps=completion.logps,
        proximal_logps=None if proximal is None else proximal[position],
        reference_logps=None if reference is None else reference[position],
    )
    _check_finite(sequence, sample)
    return sequence


def _check_finite(sequence: TrainSequence, sample: Sample) -> None:
    completion = sample.completion
    answer = f"task {completion.task}, answer {completion.index}"
    if not math.isfinite(sample.outcome.value or 0.0):
        raise TrainingStopped(
            f"{answer}: reward {sample.outcome.value} is scored but not finite; let it abstain (None)"
        )
    for name, logps in (
        ("behaviour", sequence.behaviour_logps),
        ("proximal", sequence.proximal_logps),
        ("reference", sequence.reference_logps),
    ):
        if logps is None:
            continue
        bad = np.flatnonzero((sequence.mask != 0) & ~np.isfinite(logps))
        if len(bad) > 0:
            raise TrainingStopped(
                f"{answer}: {name} log-probability of trained token {bad[0]} is {logps[bad[0]]} "
                f"({len(bad)} of {len(logps)} not finite); the model or the engine made a non-finite number"
            )


def _reward(algorithm: Algorithm, sample: Sample, sequence: TrainSequence) -> float:
    """The outcome, with kl_in = "reward" less the answer's KL.

    R = r - kl_coef * sum_t KL_t over trained tokens; RLOO, arXiv 2402.14740. The KL is that of the policy
    at the start of the plan where it was scored, else of the sampler as recorded. With group_std a group
    of equal outcomes would be scaled by its differences in KL alone, so the recipe refuses the two together;
    rloo and dr_grpo keep their size.
    """
    assert sample.outcome.value is not None
    if algorithm.kl_coef == 0 or algorithm.kl_in != "reward":
        return sample.outcome.value
    assert sequence.reference_logps is not None
    logps = sequence.behaviour_logps if sequence.proximal_logps is None else sequence.proximal_logps
    is_trained_T = sequence.mask != 0
    logp_N = torch.from_numpy(logps[is_trained_T].astype(np.float64))
    reference_N = torch.from_numpy(sequence.reference_logps[is_trained_T].astype(np.float64))
    kl = float(kl_value(logp_N, reference_N, algorithm.kl_estimator).sum())
    return sample.outcome.value - algorithm.kl_coef * kl


def _counted(algorithm: Algorithm, group: Group) -> list[int]:
    """Positions of the samples that enter the statistics of their group."""
    return [
        position
        for position, sample in enumerate(group.samples)
        if _is_scored(sample) and not _is_masked(algorithm, sample)
    ]


def _is_scored(sample: Sample) -> bool:
    return sample.outcome.status == "scored" and sample.completion.finish_reason != "aborted"


def _is_masked(algorithm: Algorithm, sample: Sample) -> bool:
    return algorithm.mask_truncated and sample.completion.finish_reason == "length"
