"""Parts of a run with one fault each, of the kind that a simulation is there to find."""

import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cauce.errors import JournalError, WeightsError, WorkerError
from cauce.journal import Buffer
from cauce.runtime.flow import RolloutFlow
from cauce.runtime.pool import News, RolloutPool
from cauce.runtime.trainer import Rebuilt, Trainer
from cauce.runtime.world import WorkerDied
from cauce.simulate.files import SimulatedJournal
from cauce.simulate.roles import ScriptedLearner
from cauce.simulate.run import Cast
from cauce.simulate.session import SimulatedSession
from cauce.simulate.workers import SimulatedWorkers
from cauce.stages.run import Training
from cauce.types import Completion, Group, Plan


class ForgetsALostIndex(RolloutFlow):
    """After a death it asks for all missing answers but the last."""

    def _dispatch_missing(self, task: int) -> None:
        missing = self._journal.missing(task, self._settings.group_size)
        if missing:
            self._dispatch(task, missing[:-1] or missing)


class AsksForAllAgain(RolloutFlow):
    """After a restart it leases every answer, the recorded ones too."""

    def restore(self) -> None:
        for task in self._journal.tasks("leased"):
            self._journal.release(task, counts_as_death=False, reason="the driver stopped")
        for task in self._journal.tasks("pending"):
            self._open.add(task)
            self._dispatch(task, tuple(range(self._settings.group_size)))


class AccusesEveryTask(RolloutFlow):
    """A worker's death counts against all tasks that it held."""

    def on_lost(self, lost: Sequence[Any]) -> None:
        for item in lost:
            item.num_held = 1
        super().on_lost(lost)


class PublishesFirst(Trainer):
    """New weights are out before the plan is recorded as applied."""

    def train_on(self, plan: Plan, groups: list[Group]) -> Any:
        done = super().train_on(plan, groups)
        self.version += 1
        self.publish()
        self.version -= 1
        return done


class TakesTheFirstToArrive(Buffer):
    """Plans follow the order in which groups were accepted."""

    @property
    def tasks(self) -> tuple[int, ...]:
        return tuple(self._entries)


class AdmitsOneMore(Trainer):
    """Capacity is off by one."""

    def _capacity(self) -> int:
        return super()._capacity() + 1


class LeavesThePlanOpen(Trainer):
    """A plan that a crash left open is not finished first."""

    def finish_planned(self) -> None:
        pass


class NeverTooStale(Buffer):
    """It offers whatever it holds."""

    def available(self, *, version: int, max_staleness: int) -> tuple[int, ...]:
        return self.tasks

    def stale(self, *, version: int, max_staleness: int) -> tuple[int, ...]:
        return ()


class AcknowledgesFirst(SimulatedJournal):
    """Answers are called recorded, and written with those that come next."""

    def record_answers(self, completions: Sequence[Completion]) -> list[bool]:
        held = self.__dict__.setdefault("_held_back", [])
        before, held[:] = list(held), list(completions)
        super().record_answers(before)
        return [True] * len(completions)

    def missing(self, task: int, group_size: int) -> tuple[int, ...]:
        held = {c.index for c in self.__dict__.get("_held_back", []) if c.task == task}
        return tuple(index for index in super().missing(task, group_size) if index not in held)


class ForgetsItsMoments(ScriptedLearner):
    """A checkpoint without part of the state: what follows a resume differs a little."""

    def load_checkpoint(self, *, path: str) -> None:
        super().load_checkpoint(path=path)
        self.trained = self.trained[:-1]


class WithThatLearner(SimulatedWorkers):
    roles = {**SimulatedWorkers.roles, "learner": ForgetsItsMoments}  # noqa: RUF012


def _with(**parts: Any) -> Cast:
    return Cast(training=type("Mutated", (Training,), parts))


CASTS: dict[str, Cast] = {
    "forgets a lost index": _with(flow_class=ForgetsALostIndex),
    "asks for all answers again": _with(flow_class=AsksForAllAgain),
    "accuses every task of a death": _with(flow_class=AccusesEveryTask),
    "publishes before it records": _with(trainer_class=PublishesFirst),
    "plans in order of arrival": _with(buffer_class=TakesTheFirstToArrive),
    "admits one task too many": _with(trainer_class=AdmitsOneMore),
    "leaves a plan open": _with(trainer_class=LeavesThePlanOpen),
    "plans stale groups": _with(buffer_class=NeverTooStale),
    "acknowledges before the commit": Cast(journal=AcknowledgesFirst),
    "resumes with part of the state": Cast(workers=WithThatLearner),
}


# Faults that Cauce had, put back


class DiesWithItsLearner(Training):
    """A learner that dies while it takes up the record ends the run."""

    def _rebuild(self) -> Rebuilt:
        try:
            return super()._rebuild()
        except WorkerDied as death:
            raise WorkerError(str(death)) from None


class DiesOfALateActor(RolloutPool):
    """An actor that comes to a call when its version is gone ends the run."""

    def _collect(self, member: Any, call: Any, news: News) -> None:
        if isinstance(call.ref.error, WeightsError):
            raise call.ref.error
        super()._collect(member, call, news)


class WithThatPool(SimulatedSession):
    def __enter__(self) -> SimulatedSession:
        super().__enter__()
        self.pool.__class__ = DiesOfALateActor
        return self


class OpensWithATraceback(SimulatedJournal):
    """A disk that is full when the run is opened gives an error of SQLite's."""

    def __init__(self, run_dir: Path, connection: sqlite3.Connection, **given: Any) -> None:
        try:
            super().__init__(run_dir, connection, **given)
        except JournalError as error:
            raise error.__cause__ or error from None


class CountsLongPromptsOverAnEpochsEnd(RolloutFlow):
    """As many long prompts in a row as there are rows are taken for all of them; two epochs may have them side by
    side."""

    def _refuse_only_long(self, in_a_row: int) -> None:
        super()._refuse_only_long(2 * in_a_row)


MENDED: dict[str, Cast] = {
    "long prompts at an epoch's end": _with(flow_class=CountsLongPromptsOverAnEpochsEnd),
    "a learner's death in a rebuild": Cast(training=DiesWithItsLearner),
    "an actor late for its version": Cast(session=WithThatPool),
    "a full disk at the start": Cast(journal=OpensWithATraceback),
}
