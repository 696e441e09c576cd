"""One plan, from groups to new weights: a pure function of (weights, plan, samples) behind the learner's verbs.

The trainer, the redo after a crash, `cauce replay` and `cauce fork` all train through `learn`, so that what
they do cannot drift apart.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from cauce.algorithms.advantages import carries_signal, make_batch, train_sequences
from cauce.algorithms.table import Algorithm
from cauce.faults import fault_point
from cauce.types import Batch, Group, Plan, ScoredBatch, TrainSequence


class LearnerVerbs(Protocol):
    """What a learner of any number of ranks can be asked for."""

    def score(self, groups: Sequence[Group], *, proximal: bool) -> ScoredBatch: ...

    def forward_backward(self, batch: Batch) -> dict[str, float]: ...

    def optim_step(self) -> dict[str, float]: ...

    def checksum(self) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """What a plan did to the weights."""

    num_steps: int  # optimizer steps taken
    num_skipped: int  # optimizer steps refused for non-finite numbers
    had_signal: bool  # some group's rewards differed
    first_log_ratio: float  # mean |log ratio| of the first forward pass: sampler against learner
    metrics: dict[str, float]


def learn(learner: LearnerVerbs, *, algorithm: Algorithm, plan: Plan, groups: Sequence[Group]) -> Learned:
    """Trains on one plan: score, advantages, then forward_backward and optim_step for each mini-batch."""
    # With KL in the reward, policy and reference must come from the same kind of forward: the sampler's own log-probs
    # carry rounding of another one, which would be a KL where there is none.
    has_kl_reward = algorithm.needs_reference and algorithm.kl_in == "reward"
    scored = learner.score(groups, proximal=len(plan.mini_batches) > 1 or has_kl_reward)
    sequences = train_sequences(algorithm, scored)
    by_task: dict[int, list[TrainSequence]] = {}
    for sequence in sequences:
        by_task.setdefault(sequence.group, []).append(sequence)
    steps: list[dict[str, float]] = []
    for tasks in plan.mini_batches:
        batch = make_batch(tuple(s for task in tasks for s in by_task.get(task, ())))
        if batch.num_tokens == 0:
            continue
        metrics = learner.forward_backward(batch)
        steps.append({**metrics, **learner.optim_step()})
        fault_point("between_optim_steps")
    skipped = sum(int(step["optim/skipped"]) for step in steps)
    return Learned(
        num_steps=len(steps) - skipped,
        num_skipped=skipped,
        had_signal=carries_signal(algorithm, groups),
        first_log_ratio=steps[0].get("sampler/log_ratio_abs_mean", 0.0) if steps else 0.0,
        metrics=_over_steps(steps),
    )


LAST_VALUE = ("optim/lr", "optim/step")
HIGHEST = ("learner/peak_memory_mb",)
SUMMED = ("optim/skipped", "learner/tokens", "learner/packed_tokens", "learner/skipped_groups")


def _over_steps(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """One number per name for the plan: the last, the highest, the sum or the mean over the steps that have it."""
    merged = {}
    for name in dict.fromkeys(name for step in steps for name in step):
        values = [step[name] for step in steps if name in step]
        if name in LAST_VALUE:
            merged[name] = values[-1]
        elif name in HIGHEST:
            merged[name] = max(values)
        elif name in SUMMED:
            merged[name] = sum(values)
        else:
            merged[name] = sum(values) / len(values)
    return merged


def make_plan(number: int, tasks: Sequence[int], *, epochs: int, num_mini_batches: int) -> Plan:
    """Spells out which tasks each optimizer step trains on; every epoch goes over the tasks in plan order."""
    size = len(tasks) // num_mini_batches
    slices = [tuple(tasks[i * size : (i + 1) * size]) for i in range(num_mini_batches)]
    return Plan(number=number, tasks=tuple(tasks), mini_batches=tuple(slices * epochs))
