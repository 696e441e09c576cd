"""One line of advice at the end of a run, from measured time: what waited, why, and the setting to change.

Pure functions: `measure` turns the rows of metrics.jsonl into shares, `advise` turns shares and a few facts of the
recipe into a line. A figure counts from its threshold on; of several the largest is told, since one change at a time
can be judged. Where no setting would help on this machine, nothing is said.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

MIN_PLANS = 4  # that sampled; fewer say little, and the first of them warms up
REWARD_SHARE = 0.15
CHECKPOINT_SHARE = 0.15
EVAL_SHARE = 0.35
RECORD_SHARE = 0.15
SYNC_SHARE = 0.15
LEARNER_SHARE = 0.30  # in which the learner waited for answers
ACTORS_SHARE = 0.40  # in which actors of an overlapped run had nothing to do
EMPTY_SLOTS = 0.50  # of those that a plan could fill


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Shares of the wall time of the plans that sampled, with what stood between them; each from 0 to 1."""

    plans: int
    learner_idle: float  # it waited for answers or rewards
    waited_for_rewards: float  # alone: no answer was outstanding
    actors_idle: float  # mean over rollout actors
    empty_slots: float  # of the slots that a plan could fill, while engines generated
    sync: float
    record: float  # journal and checksums
    checkpoint: float
    eval: float

    def as_dict(self) -> dict[str, float]:
        """For summary.json, rounded."""
        return {name: round(value, 4) for name, value in asdict(self).items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a run was set to. `cpus` is None where they are not those of this machine alone: nothing is ruled out."""

    actors: int
    engine_threads: int
    slots: int
    answers_per_plan: int
    max_staleness: int
    reward_workers: int
    max_redo_s: float
    checkpoint_every: int
    eval_every: int
    weights_every: int
    cpus: int | None

    @property
    def has_spare_cpu(self) -> bool:
        """Whether engines leave a core to another engine, or to a learner that works beside them."""
        return self.cpus is None or self.cpus > self.actors * self.engine_threads


def measure(rows: Sequence[Mapping[str, Any]], setup: Setup) -> Usage | None:
    """The shares over all plans that sampled; None where there is none."""
    done = [row for row in rows if row["plan"] > 0 and _number(row, "tokens_per_s") and _number(row, "time/total")]
    if not done:
        return None

    def total(*names: str) -> float:
        return sum(_number(row, name) for row in done for name in names)

    plans_s = total("time/total")
    wall_s = plans_s + total("time/checkpoint", "time/eval")
    # Actors that evaluate are at work; their share of the plans' time is measured, that of evaluations is all of it.
    busy_s = sum(_number(row, "rollout/busy_fraction") * _number(row, "time/total") for row in done)
    busy_s += total("time/eval")
    tokens = [_number(row, "tokens_per_s") * _number(row, "time/total") for row in done]
    steps = [n / live for n, row in zip(tokens, done, strict=True) if (live := _number(row, "rollout/live_slots"))]
    capacity = min(setup.slots, max(1, (setup.max_staleness + 1) * setup.answers_per_plan // setup.actors))
    live = sum(tokens) / sum(steps) if steps else float(capacity)
    return Usage(
        plans=len(done),
        learner_idle=total("time/generate", "time/reward") / wall_s,
        waited_for_rewards=total("time/reward") / wall_s,
        actors_idle=max(0.0, 1 - busy_s / wall_s),
        empty_slots=max(0.0, 1 - live / capacity),
        sync=total("time/sync") / wall_s,
        record=total("time/journal", "time/checksum") / wall_s,
        checkpoint=total("time/checkpoint") / wall_s,
        eval=total("time/eval") / wall_s,
    )


def advise(usage: Usage | None, setup: Setup) -> str:
    """The line, or an empty text: too few plans, nothing that stands out, or nothing that a setting would change."""
    if usage is None or usage.plans < MIN_PLANS:
        return ""
    found = [
        (usage.waited_for_rewards, REWARD_SHARE, _rewards),
        (usage.learner_idle - usage.waited_for_rewards, LEARNER_SHARE, _answers),
        (usage.actors_idle if setup.max_staleness else 0.0, ACTORS_SHARE, _actors),
        (usage.checkpoint, CHECKPOINT_SHARE, _checkpoint),
        (usage.eval, EVAL_SHARE, _eval),
        (usage.sync, SYNC_SHARE, _sync),
        (usage.record, RECORD_SHARE, _record),
    ]
    lines = ((share, say(usage, setup)) for share, threshold, say in found if share >= threshold)
    return max(((share, line) for share, line in lines if line), default=(0.0, ""))[1]


def _rewards(usage: Usage, setup: Setup) -> str:
    return (
        f"waited {_percent(usage.waited_for_rewards)} for rewards alone: set reward.workers={setup.reward_workers + 1}"
    )


def _answers(usage: Usage, setup: Setup) -> str:
    """The learner waits for answers: fill the slots, use free cores, or accept that the machine is full."""
    idle = f"learner idle {_percent(usage.learner_idle - usage.waited_for_rewards)}, waiting for answers"
    if usage.empty_slots >= EMPTY_SLOTS and not setup.max_staleness:
        return (
            f"{idle}, with {_percent(usage.empty_slots)} of the engine's usable slots empty (a few long answers end "
            "each plan): in a new run set buffer.max_staleness=1, or a lower rollout.max_tokens"
        )
    if not setup.has_spare_cpu:
        return ""
    more = f"set rollout.actors={setup.actors + 1}"
    return f"{idle}: {more}" if setup.max_staleness else f"{idle}: {more}, or in a new run buffer.max_staleness=1"


def _actors(usage: Usage, setup: Setup) -> str:
    idle = f"rollout actors idle {_percent(usage.actors_idle)}, waiting for the learner"
    if setup.actors > 1:
        return f"{idle}: set rollout.actors={setup.actors - 1}"
    return f"{idle}: in a new run set learner.threads higher and engine.threads lower" if setup.cpus != 1 else ""


def _checkpoint(usage: Usage, setup: Setup) -> str:
    change = (
        f"checkpoint.every={2 * setup.checkpoint_every}"
        if setup.checkpoint_every
        else f"checkpoint.max_redo_s={2 * setup.max_redo_s:g}"
    )
    return f"checkpoints took {_percent(usage.checkpoint)}: set {change}"


def _eval(usage: Usage, setup: Setup) -> str:
    change = f"eval.every={2 * setup.eval_every}" if setup.eval_every else "eval.at_start=false"
    return f"evaluations took {_percent(usage.eval)}: set {change}"


def _sync(usage: Usage, setup: Setup) -> str:
    every = 2 * setup.weights_every
    return f"new weights took {_percent(usage.sync)} to reach the engines: in a new run set weights.every={every}"


def _record(usage: Usage, setup: Setup) -> str:
    return f"the record took {_percent(usage.record)}: put run.dir on a faster disk"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _number(row: Mapping[str, Any], name: str) -> float:
    return float(row.get(name) or 0.0)
