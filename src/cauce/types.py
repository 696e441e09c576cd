"""The records that travel through a run, in the order in which they are made.

    Row -> Task -> [GenerationRequest] -> Completion -> Sample -> Group -> ScoredBatch -> Batch -> new version

Each is frozen, slotted and keyword-only. Nothing is filled in later: a stage that knows more makes a new record.
Tokens stay one flat sequence per sample with aligned arrays; padding exists only inside a packed batch. This file
imports neither torch nor ray, so that recipes, the journal and the tests of both stay light.

Letters of dimension suffixes used in the code base: G group, B batch row, T token of an answer, P token of a prompt,
N packed token, V vocabulary, H attention head, D width of a head.
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

Message = dict[str, Any]  # {"role": "user", "content": "..."}
Prompt = str | list[Message]

FinishReason = Literal["stop", "length", "aborted"]
OutcomeStatus = Literal["scored", "abstained", "failed", "timed_out"]
TaskState = Literal["pending", "leased", "ready", "planned", "trained", "dropped"]
DropReason = Literal["filtered", "no_signal", "unscorable", "poison", "stale", "non_finite", "run_complete", "too_long"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of data in Cauce's own shape.

    Example: Row(id="train:17", prompt="What is 2 + 3?", columns={"answer": "5"})
    """

    id: str  # "<source>:<index>"
    prompt: Prompt
    columns: dict[str, Any]  # everything else; reaches the reward


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One prompt admitted to this run. `id` is its admission number."""

    id: int
    row: Row
    content_hash: str
    prompt_ids: np.ndarray  # int32 [P]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are drawn. Training rollouts refuse temperature 0; evaluation uses it (greedy)."""

    max_tokens: int
    temperature: float
    stop_token_ids: tuple[int, ...]
    seed: int  # of the run; each sample derives its own from (seed, task, index)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """What an engine is asked for: some answers to one task. The prompt is prefilled once for all of them."""

    task: int
    attempt: int
    indices: tuple[int, ...]
    prompt_ids: np.ndarray  # int32 [P]
    sampling: Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One answer as the engine made it; the durable unit.

    `logps` are the log-probabilities under the distribution that was sampled from (temperature applied), float32.
    `mask` is 1 where the policy sampled the token and 0 where an environment wrote it.
    """

    task: int
    index: int
    attempt: int
    token_ids: np.ndarray  # int32 [T], with the stop token where one was sampled
    logps: np.ndarray  # float32 [T]
    versions: np.ndarray  # int32 [T], policy version of each token
    mask: np.ndarray  # uint8 [T]
    finish_reason: FinishReason

    def __post_init__(self) -> None:
        lengths = {len(self.token_ids), len(self.logps), len(self.versions), len(self.mask)}
        if len(lengths) != 1:
            raise ValueError(f"completion of task {self.task}[{self.index}]: arrays of unequal lengths {lengths}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the reward said of one answer. Only `scored` carries a number; a failure is never a 0."""

    status: OutcomeStatus
    value: float | None
    parts: dict[str, float | None]  # per reward function
    detail: str  # first line of a traceback, or empty

    def __post_init__(self) -> None:
        if (self.status == "scored") != (self.value is not None):
            raise ValueError(f"outcome {self.status!r} with value {self.value!r}: only 'scored' carries a number")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """An answer with its outcome."""

    completion: Completion
    outcome: Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The samples of one task in index order; the unit of advantages and of training."""

    task: int
    prompt_ids: np.ndarray  # int32 [P]
    samples: tuple[Sample, ...]  # G


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The recorded decision for one training step of the run.

    `mini_batches` holds, for each optimizer step in order, the ordered task ids it trains on; epochs over the same
    tasks are spelled out, so a plan of 4 tasks, 2 epochs and 2 mini-batches has 4 entries of 2 ids.
    """

    number: int  # from 1; version k is the weights after plan k
    tasks: tuple[int, ...]
    mini_batches: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredBatch:
    """Groups with the log-probabilities that advantages and losses need, from the current weights.

    `reference_logps` and `proximal_logps` run parallel to groups and samples: one float32 [T] per sample, or None
    where the algorithm asks for none (no KL; a plan of one optimizer step).
    """

    groups: tuple[Group, ...]
    proximal_logps: tuple[tuple[np.ndarray, ...], ...] | None
    reference_logps: tuple[tuple[np.ndarray, ...], ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSequence:
    """One answer as the learner sees it: flat, aligned, with its advantage per token.

    Sequences with the same `group` share `prompt_ids`; the learner packs that prompt once.
    """

    group: int
    prompt_ids: np.ndarray  # int32 [P]
    token_ids: np.ndarray  # int32 [T]
    mask: np.ndarray  # uint8 [T]; only tokens with 1 enter the loss
    advantages: np.ndarray  # float32 [T]
    behaviour_logps: np.ndarray  # float32 [T], as recorded while sampling
    proximal_logps: np.ndarray | None  # float32 [T]; None: this forward's own detached values serve
    reference_logps: np.ndarray | None  # float32 [T]; None: no KL term

    def __post_init__(self) -> None:
        arrays = [self.token_ids, self.mask, self.advantages, self.behaviour_logps]
        arrays += [a for a in (self.proximal_logps, self.reference_logps) if a is not None]
        lengths = {len(a) for a in arrays}
        if len(lengths) != 1:
            raise ValueError(f"train sequence of group {self.group}: arrays of unequal lengths {sorted(lengths)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one optimizer step trains on, with the global counts that the loss is divided by."""

    sequences: tuple[TrainSequence, ...]
    num_tokens: int  # trained tokens (mask 1) over the whole step, on all ranks
    num_sequences: int  # sequences with at least one trained token, over the whole step, on all ranks
