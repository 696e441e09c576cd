"""Reading the journal: what a report, a replay or another process may ask, also while the run goes on.

`JournalReader` holds the connection and every question; `store.Journal` adds the writes. Nothing is cached:
the database is the only state, so that an answer is the same before and after a crash.
"""

import json
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, cast, get_args

import numpy as np

from cauce.errors import JournalError
from cauce.journal import schema
from cauce.journal.commits import CallTimer, timed
from cauce.journal.encoding import row_from_json
from cauce.journal.payloads import FOLDER_NAME, PayloadRef, read_answer, read_prompt
from cauce.types import Completion, Group, Outcome, Plan, Sample, Task, TaskState

PlanState = Literal["planned", "applied", "skipped"]
_SAMPLE_COLUMNS = "idx, attempt, finish_reason, file, offset, status, value, parts, detail"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A living lease: `worker` makes the answers `indices` of the task."""

    task: int
    attempt: int
    worker: str
    version: int
    indices: tuple[int, ...]
    until: float  # unix time


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRecord:
    plan: Plan
    state: PlanState
    checksum: str | None  # of the weights after the plan; None unless applied
    metrics: Mapping[str, float]
    reason: str  # why it was skipped


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRecord:
    plan: int
    path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class EventRecord:
    time: float  # unix time
    kind: str
    detail: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """A complete, scored group with uses left, as the buffer wants to know it."""

    task: int
    version: int  # the oldest among its tokens
    uses: int


class JournalReader:
    """A run's record, read only."""

    counts_query = "SELECT state, COUNT(*) FROM task GROUP BY state"
    drops_query = "SELECT reason, COUNT(*) FROM task WHERE state = 'dropped' GROUP BY reason"

    def __init__(self, run_dir: Path, connection: sqlite3.Connection) -> None:
        self.run_dir = run_dir
        self._connection = connection
        self._payload_folder = run_dir / FOLDER_NAME
        self._timer = CallTimer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()

    @property
    def seconds_spent(self) -> float:
        """Time inside journal calls since it was opened."""
        return self._timer.seconds

    @property
    def meta(self) -> dict[str, str]:
        return dict(self._rows("SELECT key, value FROM meta"))

    @property
    def forked_at(self) -> int:
        """The last plan that a fork shares with its source; 0 for a run that is no fork."""
        return int(self.meta.get("forked_at", "0"))

    @property
    def is_fork(self) -> bool:
        """Whether its plans are those of another run, which it trains on without generating."""
        return "forked_from" in self.meta

    # -- tasks --

    @property
    def next_task_id(self) -> int:
        return int(self._value("SELECT COALESCE(MAX(id), -1) + 1 FROM task"))

    def tasks(self, state: TaskState | None = None) -> list[int]:
        """Ids in admission order; all of them, or those in one state."""
        if state is None:
            return [row[0] for row in self._rows("SELECT id FROM task ORDER BY id")]
        return [row[0] for row in self._rows("SELECT id FROM task WHERE state = ? ORDER BY id", state)]

    def state(self, task: int) -> TaskState:
        return cast(TaskState, self._task_row(task, "state")[0])

    @timed
    def task(self, task: int) -> Task:
        """The task as it was admitted."""
        content_hash, row = self._task_row(task, "content_hash, row")
        return Task(id=task, row=row_from_json(row), content_hash=content_hash, prompt_ids=self._prompt_ids(task))

    def counts(self) -> dict[TaskState, int]:
        """Number of tasks per state; every state is a key."""
        found = dict(self._rows(self.counts_query))
        return {state: found.get(state, 0) for state in get_args(TaskState)}

    def occupancy(self) -> dict[str, int]:
        """The four counts that `buffer.capacity` subtracts.

        Tasks of skipped plans count as trained: their plan took the place of a version.
        """
        counts = self.counts()
        return {
            "trained": counts["trained"] + self.drops().get("non_finite", 0),
            "planned": counts["planned"],
            "ready": counts["ready"],
            "running": counts["pending"] + counts["leased"],
        }

    def drops(self) -> dict[str, int]:
        """Number of dropped tasks per reason."""
        return dict(self._rows(self.drops_query))

    def undecided_below(self, task: int) -> tuple[int, ...]:
        """Tasks with a lower admission number that are neither accepted nor dropped yet."""
        query = "SELECT id FROM task WHERE state IN ('pending', 'leased') AND id < ? ORDER BY id"
        return tuple(row[0] for row in self._rows(query, task))

    def deaths(self, task: int) -> int:
        """How many workers died at this task."""
        return int(self._task_row(task, "deaths")[0])

    # -- leases --

    def leases(self) -> list[Lease]:
        """The living ones, in task order."""
        return self._leases("", ())

    def lease_ends(self, task: int) -> list[str]:
        """Why each lease of a task that is over has ended, oldest first."""
        query = "SELECT end_reason FROM lease WHERE task = ? AND end_reason IS NOT NULL ORDER BY attempt"
        return [str(row[0]) for row in self._rows(query, task)]

    def expired(self, now: float) -> list[Lease]:
        """Living leases that were not renewed in time."""
        return self._leases("AND until < ?", (float(now),))

    # -- samples --

    def missing(self, task: int, group_size: int) -> tuple[int, ...]:
        """The indices below `group_size` that have no recorded answer."""
        self._task_row(task, "id")
        found = {row[0] for row in self._rows("SELECT idx FROM sample WHERE task = ?", task)}
        return tuple(index for index in range(group_size) if index not in found)

    def unscored(self, task: int) -> tuple[int, ...]:
        """The indices whose answer is recorded and whose outcome is not."""
        query = "SELECT idx FROM sample WHERE task = ? AND state = 'generated' ORDER BY idx"
        return tuple(row[0] for row in self._rows(query, task))

    @timed
    def answers(self, task: int) -> tuple[Completion, ...]:
        """The recorded answers in index order, scored or not."""
        rows = self._rows(f"SELECT {_SAMPLE_COLUMNS} FROM sample WHERE task = ? ORDER BY idx", task)
        return tuple(self._completion(task, row) for row in rows)

    @timed
    def group(self, task: int) -> Group:
        """The scored samples in index order; refused while an outcome is missing."""
        rows = self._rows(f"SELECT {_SAMPLE_COLUMNS} FROM sample WHERE task = ? ORDER BY idx", task)
        unscored = [row[0] for row in rows if row[5] is None]
        if unscored or not rows:
            what = f"answers {unscored} have no outcome yet" if rows else "no answer is recorded"
            raise JournalError(f"task {task} is no complete group: {what}")
        samples = tuple(Sample(completion=self._completion(task, row), outcome=_outcome(row)) for row in rows)
        return Group(task=task, prompt_ids=self._prompt_ids(task), samples=samples)

    def accepted(self) -> list[Accepted]:
        """Groups with uses left, in admission order: what a buffer holds after a resume."""
        query = """
            SELECT task.id, (SELECT MIN(min_version) FROM sample WHERE sample.task = task.id) AS version,
                   (SELECT COUNT(*) FROM plan_use WHERE plan_use.task = task.id) AS uses
            FROM task WHERE state IN ('ready', 'planned') AND uses < ? ORDER BY task.id"""
        return [
            Accepted(task=task, version=version, uses=uses) for task, version, uses in self._rows(query, self.max_reuse)
        ]

    # -- plans --

    @property
    def max_reuse(self) -> int:
        return int(self._meta_value("max_reuse") or "1")

    @property
    def last_plan(self) -> int:
        """Number of the newest plan, in whatever state; 0 before the first."""
        return int(self._value("SELECT COALESCE(MAX(number), 0) FROM plan"))

    @property
    def last_decided(self) -> int:
        """Number of the newest plan that is applied or skipped: the policy version of the learner."""
        # From the end: plans are decided in order, so that only open ones come before it.
        found = self._rows("SELECT number FROM plan WHERE state != 'planned' ORDER BY number DESC LIMIT 1")
        return int(found[0][0]) if found else 0

    @timed
    def plans(self, from_number: int = 1, until: int | None = None) -> list[PlanRecord]:
        """Plans in order, from one number to another, both included."""
        query = """SELECT number, state, mini_batches, checksum, metrics, reason FROM plan
                   WHERE number >= ? AND (? IS NULL OR number <= ?) ORDER BY number"""
        records = []
        for number, state, mini_batches, checksum, metrics, reason in self._rows(query, from_number, until, until):
            uses = self._rows("SELECT task FROM plan_use WHERE plan = ? ORDER BY position", number)
            plan = Plan(
                number=number,
                tasks=tuple(row[0] for row in uses),
                mini_batches=tuple(tuple(ids) for ids in json.loads(mini_batches)),
            )
            records.append(
                PlanRecord(plan=plan, state=state, checksum=checksum, metrics=json.loads(metrics), reason=reason)
            )
        return records

    def uses(self, task: int) -> int:
        """In how many plans the task is, skipped ones included."""
        return int(self._value("SELECT COUNT(*) FROM plan_use WHERE task = ?", task))

    # -- the rest --

    def checkpoints(self) -> list[CheckpointRecord]:
        """Recorded checkpoints, oldest plan first."""
        rows = self._rows("SELECT plan, path FROM checkpoint ORDER BY plan")
        return [CheckpointRecord(plan=plan, path=self.run_dir / path) for plan, path in rows]

    def events(self, kind: str | None = None) -> list[EventRecord]:
        query = "SELECT time, kind, detail FROM event WHERE ? IS NULL OR kind = ? ORDER BY id"
        return [
            EventRecord(time=time, kind=kind, detail=json.loads(detail))
            for time, kind, detail in self._rows(query, kind, kind)
        ]

    def select(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        """The rows of any other question, in SQL; the tables are in schema.py."""
        return self._rows(query, *values)

    # -- private --

    @timed
    def _rows(self, query: str, *values: Any) -> list[Any]:
        return self._connection.execute(query, tuple(map(schema.plain, values))).fetchall()

    def _value(self, query: str, *values: Any) -> Any:
        return self._rows(query, *values)[0][0]

    def _meta_value(self, key: str) -> str | None:
        found = self._rows("SELECT value FROM meta WHERE key = ?", key)
        return str(found[0][0]) if found else None

    def _task_row(self, task: int, columns: str) -> tuple[Any, ...]:
        rows = self._rows(f"SELECT {columns} FROM task WHERE id = ?", task)
        if not rows:
            raise JournalError(f"task {task} was never admitted; the next admission number is {self.next_task_id}")
        return cast(tuple[Any, ...], rows[0])

    def _prompt_ids(self, task: int) -> np.ndarray:
        file, offset = self._task_row(task, "file, offset")
        return read_prompt(self._payload_folder, PayloadRef(file, offset), task=task)

    def _completion(self, task: int, row: tuple[Any, ...]) -> Completion:
        index, attempt, finish_reason, file, offset = row[:5]
        arrays = read_answer(self._payload_folder, PayloadRef(file, offset), task=task, index=index)
        return Completion(
            task=task,
            index=index,
            attempt=attempt,
            token_ids=arrays.token_ids,
            logps=arrays.logps,
            versions=arrays.versions,
            mask=arrays.mask,
            finish_reason=finish_reason,
        )

    def _leases(self, condition: str, values: tuple[float, ...]) -> list[Lease]:
        query = f"""SELECT task, attempt, worker, version, indices, until FROM lease
                    WHERE end_reason IS NULL {condition} ORDER BY task"""
        return [
            Lease(
                task=task,
                attempt=attempt,
                worker=worker,
                version=version,
                indices=tuple(json.loads(indices)),
                until=until,
            )
            for task, attempt, worker, version, indices, until in self._rows(query, *values)
        ]


def _outcome(row: tuple[Any, ...]) -> Outcome:
    status, value, parts, detail = row[5:9]
    return Outcome(status=status, value=value, parts=json.loads(parts), detail=detail)
