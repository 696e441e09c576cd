"""From a record to weights: the newest complete checkpoint, then the plans after it, trained again from the record.

Nothing is generated. Each redone plan's checksum is compared with the one that was recorded. Under the same numeric
fingerprint another checksum is a fault of ours and stops the run; under another fingerprint (other torch, threads,
instruction set, dtypes, packing) the history of weights forks: a new lineage is noted, and training goes on. The
plans keep the checksums of the lineage they were recorded in, so a fork is recorded together with a checkpoint of its
first weights, and `meta["fingerprint_since"]` holds the newest plan whose checksum is of an older fingerprint.
`cauce replay` is the same walk from the initial weights.

Here is also the order in which checkpoints come and go: saved, recorded, and only then are older ones forgotten and
deleted, so that at every moment one of them is both recorded and complete.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from cauce import checkpoint
from cauce.algorithms.table import Algorithm
from cauce.errors import JournalError
from cauce.journal import Journal, JournalReader, PlanRecord
from cauce.runtime.learn import LearnerVerbs, learn


class RestorableLearner(LearnerVerbs, Protocol):
    """What a redo needs of a learner."""

    def load_checkpoint(self, *, path: str) -> None: ...

    def save_checkpoint(self, *, run_dir: str, plan: int) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """A redone plan whose weights are not those that were recorded."""

    plan: int
    recorded: str
    found: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Redo:
    """What a redo ended with."""

    version: int  # the newest plan that is decided
    num_redone: int
    divergence: Divergence | None  # the first
    saved: int = 0  # the plan of the newest checkpoint by now; 0 without one
    redo_s: float = 0.0  # what redoing the plans after that checkpoint would take again


def redo(
    learner: LearnerVerbs,
    *,
    journal: JournalReader,
    algorithm: Algorithm,
    after: int,
    until: int | None = None,
    on_plan: Callable[[int], None] = lambda number: None,
    stops_at_divergence: bool = False,
) -> Redo:
    """Trains on the applied plans after number `after`, in order; skipped ones stay skipped, as recorded."""
    divergence = None
    version, count = after, 0
    for record in _decided(journal, after=after, until=until):
        if record.state == "applied":
            groups = [journal.group(task) for task in record.plan.tasks]
            learn(learner, algorithm=algorithm, plan=record.plan, groups=groups)
            found = learner.checksum()
            if found != record.checksum and divergence is None:
                divergence = Divergence(plan=record.plan.number, recorded=str(record.checksum), found=found)
            count += 1
        version = record.plan.number
        on_plan(version)
        if stops_at_divergence and divergence is not None:
            break
    return Redo(version=version, num_redone=count, divergence=divergence)


def rebuild(
    learner: RestorableLearner,
    *,
    run_dir: Path,
    journal: Journal,
    algorithm: Algorithm,
    fingerprint: str,
    on_note: Callable[[str], None],
    on_plan: Callable[[int], None] = lambda number: None,
) -> Redo:
    """Brings a learner with initial weights to the record's newest version. Its fingerprint is recorded afterwards.

    Raises:
        JournalError: when a redone plan gives other weights under the same fingerprint.
    """
    after = load_newest(learner, run_dir=run_dir, journal=journal)
    result = redo(learner, journal=journal, algorithm=algorithm, after=after, on_plan=on_plan)
    if result.num_redone:
        start = f"checkpoint plan_{after:06d}" if after else "the initial weights"
        on_note(f"{result.num_redone} plans after {start} were trained again from the record, without generating")
    meta = journal.meta
    is_same, since = meta.get("fingerprint") == fingerprint, int(meta.get("fingerprint_since", "0"))
    if result.divergence is None:
        if not is_same:
            _begin_fingerprint(journal, fingerprint, since=result.version)
        times = [float(r.metrics.get("time/learn", 0.0)) for r in _decided(journal, after=after, until=None)]
        return replace(result, saved=after, redo_s=sum(times))
    found = result.divergence
    text = f"plan {found.plan} redone gives weights {found.found}, recorded were {found.recorded}"
    if is_same and found.plan > since:
        raise JournalError(f"{text}, under the same numeric fingerprint: this is a bug; please report it")
    # Of this plan nothing whole is recorded. A kill after the save must not leave the new weights under the old record.
    journal.forget_checkpoint(result.version)
    saved = learner.save_checkpoint(run_dir=str(run_dir.absolute()), plan=result.version)
    with journal.transaction():
        journal.record_checkpoint(result.version, saved)
        journal.set_meta("lineage", str(int(meta["lineage"]) + 1))
        _begin_fingerprint(journal, fingerprint, since=result.version)
        journal.event("lineage", {"plan": found.plan, "recorded": found.recorded, "found": found.found})
    on_note(f"{text}, under another numeric fingerprint: a new lineage begins there, and training goes on")
    return replace(result, saved=result.version)


def load_newest(
    learner: RestorableLearner, *, run_dir: Path, journal: JournalReader, at_most: int | None = None
) -> int:
    """Puts the newest whole checkpoint, of plan `at_most` or before, into a learner with initial weights.

    Returns its plan, 0 where there is none: the initial weights stay.

    Raises:
        JournalError: for a fork without a checkpoint; its weights do not begin with the model's.
    """
    newest = newest_checkpoint(run_dir, journal, at_most=at_most)
    if newest is not None:
        learner.load_checkpoint(path=str(newest[1]))
        return newest[0]
    if journal.forked_at:
        raise JournalError(
            f"{run_dir} was forked from {journal.meta['forked_from']} after plan {journal.forked_at}, and the "
            "checkpoint of that plan is gone; put it back, or fork that run again"
        )
    return 0


def prune_checkpoints(run_dir: Path, journal: Journal, *, keep: int) -> None:
    """Leaves the newest `keep` checkpoints that are recorded and complete; all of them, where none is.

    The one that a fork began with stays too: it is what its replay starts from.
    """
    complete = checkpoint.complete(run_dir)
    recorded = [record.plan for record in journal.checkpoints()]
    whole = [plan for plan in recorded if plan in complete]
    kept = [plan for plan in whole if plan in whole[-keep:] or plan == journal.forked_at]
    if not kept:
        return
    with journal.transaction():
        for plan in recorded:
            if plan not in kept:
                journal.forget_checkpoint(plan)
    checkpoint.prune(run_dir, keep=kept)


def newest_checkpoint(run_dir: Path, journal: JournalReader, *, at_most: int | None = None) -> tuple[int, Path] | None:
    """The newest checkpoint, of plan `at_most` or before, that is both recorded and complete on disk."""
    complete = checkpoint.complete(run_dir)
    for record in reversed(journal.checkpoints()):
        if record.plan in complete and (at_most is None or record.plan <= at_most):
            return record.plan, complete[record.plan]
    return None


def _begin_fingerprint(journal: Journal, fingerprint: str, *, since: int) -> None:
    with journal.transaction():
        journal.set_meta("fingerprint", fingerprint)
        journal.set_meta("fingerprint_since", str(since))


def _decided(journal: JournalReader, *, after: int, until: int | None) -> Iterable[PlanRecord]:
    for record in journal.plans(from_number=after + 1, until=until):
        if record.state in ("applied", "skipped"):
            yield record
