"""What must hold of a run, read from its SQLite file by plain queries, apart from the code that wrote it.

`Witness` looks on while the run goes: at each call that leaves the driver it reads, through a connection of its own,
whether the record already holds what has to be there first. `check_record` is for every moment at which a driver
starts; what must hold at the end is in ending.py.
"""

import json
import sqlite3
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

from cauce.runtime.roles import WorkResult
from cauce.simulate.script import Violation
from cauce.types import Batch, Completion, GenerationRequest


class Witness:
    """Sees every call, answer and death; believes only what is committed."""

    def __init__(self, database: Path) -> None:
        self._database = database
        self._connection: sqlite3.Connection | None = None
        self._handed: list[Completion] = []
        self.answers: dict[tuple[int, int], set[bytes]] = {}  # what engines have said of each
        self.deaths: Counter[int] = Counter()  # of workers that were at this task alone

    def begin(self) -> None:
        """A driver has opened the record."""
        self._handed = []
        if self._connection is None:
            self._connection = sqlite3.connect(f"file:{self._database}?mode=ro", uri=True, isolation_level=None)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def rows(self, query: str, *values: object) -> list[Any]:
        assert self._connection is not None
        return self._connection.execute(query, values).fetchall()

    def sees_call(self, method: str, kwargs: dict[str, Any]) -> None:
        if method == "work":
            for request in kwargs["requests"]:
                self._is_leased(request)
        elif method == "forward_backward":
            self._is_planned(kwargs["batch"])
        elif method in ("publish", "save_checkpoint"):
            version = kwargs["version"] if method == "publish" else kwargs["plan"]
            ((newest,),) = self.rows("SELECT COALESCE(MAX(number), 0) FROM plan WHERE state != 'planned'")
            if version != newest:
                raise Violation(f"{method} of version {version}, and the newest plan on record is {newest}")

    def sees_result(self, value: Any) -> None:
        if isinstance(value, WorkResult):
            self._handed += [c for c in value.completions if c.task >= 0 and c.finish_reason != "aborted"]
            for answer in self._handed:
                self.answers.setdefault((answer.task, answer.index), set()).add(content(answer))

    def sees_turn(self) -> None:
        """The driver has dealt with what it was handed: every answer is durable, or its task is closed."""
        handed, self._handed = self._handed, []
        for answer in handed:
            key = (answer.task, answer.index)
            if not self.rows("SELECT 1 FROM sample WHERE task = ? AND idx = ?", *key):
                ((state,),) = self.rows("SELECT state FROM task WHERE id = ?", answer.task)
                if state != "dropped":
                    raise Violation(f"answer {key} was taken and is not on record; its task is {state}")

    def sees_death(self, held: Collection[int]) -> None:
        if len(held) == 1:
            self.deaths.update(held)

    def _is_leased(self, request: GenerationRequest) -> None:
        if request.task < 0:
            return  # evaluation has no leases
        query = "SELECT indices FROM lease WHERE task = ? AND attempt = ? AND end_reason IS NULL"
        found = self.rows(query, request.task, request.attempt)
        if not found or tuple(json.loads(found[0][0])) != request.indices:
            raise Violation(
                f"task {request.task}{list(request.indices)} is sent out, and its lease on record is {found}"
            )
        recorded = {row[0] for row in self.rows("SELECT idx FROM sample WHERE task = ?", request.task)}
        if again := recorded & set(request.indices):
            raise Violation(f"answers {sorted(again)} of task {request.task} are on record and generated again")

    def _is_planned(self, batch: Batch) -> None:
        tasks = {int(sequence.group) for sequence in batch.sequences}
        plans = [json.loads(text) for (text,) in self.rows("SELECT mini_batches FROM plan")]
        if not any(tasks <= set(mini_batch) for plan in plans for mini_batch in plan):
            raise Violation(f"tasks {sorted(tasks)} are trained on, and no plan on record has them in one step")


def content(answer: Completion) -> bytes:
    return answer.token_ids.tobytes() + answer.logps.tobytes() + answer.versions.tobytes()


# (what it means when a row is found, the query for such rows); {..} are settings of the run
FORBIDDEN = (
    ("admission numbers have a gap", "SELECT MAX(id), COUNT(*) FROM task HAVING MAX(id) + 1 != COUNT(*)"),
    ("plan numbers have a gap", "SELECT MAX(number), COUNT(*) FROM plan HAVING MAX(number) != COUNT(*)"),
    (
        "an open plan is followed by another",
        "SELECT number FROM plan WHERE state = 'planned' AND number < (SELECT MAX(number) FROM plan)",
    ),
    ("a task is used too often", "SELECT task FROM plan_use GROUP BY task HAVING COUNT(*) > {max_reuse}"),
    (
        "a plan uses a group that is too stale",
        "SELECT plan, plan_use.task FROM plan_use JOIN sample ON sample.task = plan_use.task "
        "WHERE plan - 1 - min_version > {max_staleness}",
    ),
    (
        "a sample is newer than the plan that uses it",
        "SELECT plan, plan_use.task FROM plan_use JOIN sample ON sample.task = plan_use.task WHERE max_version >= plan",
    ),
    (
        "a used group is incomplete",
        "SELECT task FROM plan_use WHERE (SELECT COUNT(*) FROM sample WHERE sample.task = plan_use.task "
        "AND state = 'scored' AND idx < {group_size}) != {group_size}",
    ),
    (
        "leases and states disagree",
        "SELECT id FROM task WHERE (state = 'leased') != "
        "(SELECT COUNT(*) FROM lease WHERE task = id AND end_reason IS NULL)",
    ),
    (
        "an answer was asked for again after it was recorded",
        "SELECT lease.task, lease.attempt, idx FROM lease, json_each(lease.indices) JOIN sample "
        "ON sample.task = lease.task AND sample.idx = json_each.value WHERE lease.attempt > sample.attempt",
    ),
    (
        "a trained task was in no applied plan, or one that was ended otherwise",
        "SELECT id FROM task WHERE (state = 'trained' AND NOT {applied}) OR (state = 'dropped' AND {applied})",
    ),
)
APPLIED = (
    "EXISTS (SELECT 1 FROM plan_use JOIN plan ON plan.number = plan_use.plan "
    "WHERE plan_use.task = task.id AND plan.state = 'applied')"
)


def check_record(witness: Witness, settings: dict[str, Any]) -> None:
    """At every start of a driver, and at the end."""
    values = {key: settings[f"buffer.{key}"] for key in ("max_reuse", "max_staleness")}
    values |= {"group_size": settings["rollout.group_size"], "applied": APPLIED}
    for meaning, query in FORBIDDEN:
        if found := witness.rows(query.format(**values)):
            raise Violation(f"{meaning}: {found[:3]}")
    for number, batches in witness.rows("SELECT number, mini_batches FROM plan"):
        used = {row[0] for row in witness.rows("SELECT task FROM plan_use WHERE plan = ?", number)}
        if used != {task for batch in json.loads(batches) for task in batch}:
            raise Violation(f"plan {number} uses tasks {sorted(used)}, and its mini-batches are {batches}")
