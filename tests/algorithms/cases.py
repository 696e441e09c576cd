"""Builders for the tests of the algorithms: records with given numbers, and a step's way through cauce."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from cauce.algorithms.losses import policy_terms
from cauce.algorithms.reducers import aggregate
from cauce.algorithms.table import Algorithm, resolve
from cauce.recipe.models import AlgorithmSettings
from cauce.types import Batch, Completion, Group, Outcome, Sample, ScoredBatch, TrainSequence

MAX_TOKENS = 16


def algorithm(name: str = "grpo", *, correction_needed: bool = False, **settings: object) -> Algorithm:
    """A row of the table with settings as a recipe would give them."""
    section = AlgorithmSettings.model_validate({"name": name, **settings})
    return resolve(section, max_tokens=MAX_TOKENS, correction_needed=correction_needed)


def sample(
    reward: float | None,
    *,
    task: int = 0,
    index: int = 0,
    logps: Sequence[float] = (-1.0, -1.0),
    mask: Sequence[int] | None = None,
    finish_reason: str = "stop",
    status: str | None = None,
) -> Sample:
    """An answer; a reward of None abstains unless `status` says otherwise."""
    size = len(logps)
    completion = Completion(
        task=task,
        index=index,
        attempt=1,
        token_ids=np.arange(size, dtype=np.int32) + 100 * index,
        logps=np.asarray(logps, dtype=np.float32),
        versions=np.zeros(size, dtype=np.int32),
        mask=np.asarray([1] * size if mask is None else mask, dtype=np.uint8),
        finish_reason=finish_reason,
    )
    status = status or ("abstained" if reward is None else "scored")
    return Sample(completion=completion, outcome=Outcome(status=status, value=reward, parts={}, detail=""))


def group(task: int, samples: Sequence[Sample]) -> Group:
    return Group(task=task, prompt_ids=np.asarray([7, task], dtype=np.int32), samples=tuple(samples))


def rewards_group(task: int, rewards: Sequence[float | None]) -> Group:
    return group(task, [sample(reward, task=task, index=i) for i, reward in enumerate(rewards)])


def scored_batch(*groups: Group) -> ScoredBatch:
    return ScoredBatch(groups=groups, proximal_logps=None, reference_logps=None)


def first_advantages(sequences: Sequence[TrainSequence]) -> list[float]:
    """The advantage of each sequence, which is the same at all of its tokens."""
    for sequence in sequences:
        assert len(set(sequence.advantages.tolist())) == 1
    return [float(sequence.advantages[0]) for sequence in sequences]


def flat(arrays: Sequence[np.ndarray], dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.from_numpy(np.concatenate(arrays)).to(dtype)


def step_loss(
    rules: Algorithm, batch: Batch, logps: Sequence[Tensor], parts: Sequence[Sequence[int]] | None = None
) -> tuple[Tensor, dict[str, float]]:
    """The loss of one optimizer step, cut into micro-batches of the given sequences; metrics as sums."""
    total = torch.zeros((), dtype=torch.float64)
    sums: dict[str, float] = {}
    for part in [range(len(batch.sequences))] if parts is None else parts:
        if len(part) == 0:
            continue
        sequences = [batch.sequences[i] for i in part]
        has_proximal = sequences[0].proximal_logps is not None
        has_reference = sequences[0].reference_logps is not None
        mask_N = flat([s.mask for s in sequences], torch.uint8)
        loss_N, metrics = policy_terms(
            rules,
            logp_N=torch.cat([logps[i] for i in part]),
            behaviour_N=flat([s.behaviour_logps for s in sequences]),
            proximal_N=flat([s.proximal_logps for s in sequences]) if has_proximal else None,
            reference_N=flat([s.reference_logps for s in sequences]) if has_reference else None,
            advantage_N=flat([s.advantages for s in sequences]),
            mask_N=mask_N,
        )
        sequence_N = torch.repeat_interleave(
            torch.tensor(list(part)), torch.tensor([len(s.token_ids) for s in sequences])
        )
        total = total + aggregate(
            loss_N,
            mask_N,
            sequence_N,
            algorithm=rules,
            num_tokens=batch.num_tokens,
            num_sequences=batch.num_sequences,
        )
        for name, value in metrics.items():
            sums[name] = sums.get(name, 0.0) + float(value)
    return total, sums


def plain_parts(
    losses: Sequence[Sequence[float]],
    aggregation: str,
    parts: Sequence[Sequence[int]],
    masks: Sequence[Sequence[int]] | None = None,
) -> tuple[float, list[list[float]]]:
    """Given losses per token through `aggregate`, cut into parts: the value and its derivative per token."""
    rules = algorithm(aggregation=aggregation)
    masks = [[1] * len(row) for row in losses] if masks is None else masks
    num_tokens = sum(map(sum, masks))
    num_sequences = sum(1 for mask in masks if sum(mask) > 0)
    rows = [torch.tensor(row, dtype=torch.float64, requires_grad=True) for row in losses]
    total = torch.zeros((), dtype=torch.float64)
    for part in parts:
        total = total + aggregate(
            torch.cat([rows[i] for i in part]),
            torch.cat([torch.tensor(masks[i]) for i in part]),
            torch.cat([torch.full((len(losses[i]),), i) for i in part]),
            algorithm=rules,
            num_tokens=num_tokens,
            num_sequences=num_sequences,
        )
    total.backward()
    return float(total.detach()), [[] if row.grad is None else row.grad.tolist() for row in rows]
