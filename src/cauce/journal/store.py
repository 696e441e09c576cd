"""The journal of a run: every task, answer, outcome and plan, durable before anyone acts on it.

    admit -> lease -> record_answers -> record_outcomes -> mark_ready -> write_plan -> mark_applied

Only the driver holds a `Journal`; others read with `Journal.read_only`. A call outside `transaction()` is
durable when it returns; inside, all calls become durable together at its end, in one commit (about 4 ms).
What is allowed in which state is decided here and in the modules it calls (answers.py, plans.py); which tasks
to plan (buffer.py) and when to commit (the trainer) is not.
"""

import json
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Self, get_args

from cauce.durable import make_folder, sync
from cauce.errors import JournalError
from cauce.faults import fault_point
from cauce.journal import leases, plans, schema, tally
from cauce.journal.answers import check_complete, record_answer, record_outcome
from cauce.journal.commits import Commits, timed
from cauce.journal.encoding import metrics_to_json, row_to_json, to_json
from cauce.journal.locking import TAKEOVER_WAIT_S, LockingChoice, choose_locking, wait_for_exit
from cauce.journal.owner import Locking, OwnerLock, acquire, this_process
from cauce.journal.payloads import FOLDER_NAME, MAX_FILE_BYTES, PayloadWriter, cut_tails, encode_prompt
from cauce.journal.queries import JournalReader
from cauce.types import Completion, DropReason, Outcome, Plan, Task, TaskState

DECIDED_STATES = ("trained", "dropped")


class Journal(JournalReader):
    """A run's record, for its owner.

    Keys of `meta` that it obeys: `max_reuse` (how many plans may use a task; 1 without the key) and
    `group_size` (how many answers a task needs before it is ready; any number without the key).
    """

    writer = PayloadWriter
    counts_query, drops_query = tally.COUNTS, tally.DROPS

    def __init__(
        self,
        run_dir: Path,
        connection: sqlite3.Connection,
        *,
        lock: OwnerLock,
        locking: Locking,
        clock: Callable[[], float],
        max_file_bytes: int,
    ) -> None:
        super().__init__(run_dir, connection)
        self._lock = lock
        self._clock = clock
        owner = this_process(epoch=schema.raise_epoch(connection), locking=locking)
        lock.describe(owner)
        tally.install(connection)
        self.owner = owner
        self._payloads = self.writer(self._payload_folder, epoch=owner.epoch, max_file_bytes=max_file_bytes)
        self._commits = Commits(connection, self._payloads, owner=owner, where=f"journal of {run_dir}")

    @classmethod
    def create(
        cls,
        run_dir: Path | str,
        *,
        meta: Mapping[str, str],
        locking: LockingChoice = "auto",
        clock: Callable[[], float] = time.time,
        max_file_bytes: int = MAX_FILE_BYTES,
    ) -> Self:
        """A new journal in a run folder that has none; the folder is made."""
        run_dir = Path(run_dir)
        make_folder(run_dir)
        lock = acquire(run_dir, takeover=False)
        mode = choose_locking(locking, run_dir)
        connection = None
        try:
            connection = schema.connect_writer(run_dir, locking=mode)
            if connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0]:
                raise JournalError(f"{run_dir} holds a run already; `cauce resume` it, or name another folder")
            (run_dir / FOLDER_NAME).mkdir(exist_ok=True)
            sync(run_dir)
            fault_point("journal_made")
            schema.create_tables(connection, meta)
            return cls(run_dir, connection, lock=lock, locking=mode, clock=clock, max_file_bytes=max_file_bytes)
        except BaseException:
            _give_up(connection, lock)
            raise

    @classmethod
    def open(
        cls,
        run_dir: Path | str,
        *,
        takeover: bool = False,
        locking: LockingChoice = "auto",
        clock: Callable[[], float] = time.time,
        max_file_bytes: int = MAX_FILE_BYTES,
    ) -> Self:
        """Own an existing journal; refused beside a live owner, unless `takeover` fences that one off."""
        run_dir = Path(run_dir)
        schema.require_database(run_dir)
        mode = choose_locking(locking, run_dir)
        lock = None if takeover else acquire(run_dir, takeover=False)
        connection = None
        try:
            connection = schema.connect_writer(run_dir, locking=mode)
            schema.check_format(connection, run_dir)  # a refused takeover must leave the owner's lock alone
            lock = lock or acquire(run_dir, takeover=True)
            journal = cls(run_dir, connection, lock=lock, locking=mode, clock=clock, max_file_bytes=max_file_bytes)
            # Only now: the raised epoch keeps an older owner from committing more behind the cut.
            journal._repair_payloads()
            return journal
        except BaseException:
            _give_up(connection, lock)
            raise

    @staticmethod
    def is_begun(run_dir: Path | str) -> bool:
        """Whether there is a journal with anything in it; a kill during `create` leaves one without."""
        run_dir = Path(run_dir)
        if not (run_dir / schema.DATABASE_NAME).is_file():
            return False
        with closing(schema.connect_reader(run_dir)) as connection:
            return bool(connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0])

    @staticmethod
    def read_only(run_dir: Path | str) -> JournalReader:
        """For reports, replays and other processes; never disturbs the owner."""
        run_dir = Path(run_dir)
        schema.require_database(run_dir)
        connection = schema.connect_reader(run_dir)
        try:
            schema.check_format(connection, run_dir)
        except BaseException:
            connection.close()
            raise
        return JournalReader(run_dir, connection)

    @staticmethod
    def wait_for_exclusive_owner(
        run_dir: Path | str, *, say: Callable[[str], None], limit_s: float = TAKEOVER_WAIT_S
    ) -> None:
        """Before a takeover: an owner that keeps the journal locked cannot be fenced, so its exit is awaited."""
        wait_for_exit(lambda: Journal.read_only(run_dir).close(), say=say, limit_s=limit_s)

    def close(self) -> None:
        """Give the run up; a transaction that is open is lost, as in a crash."""
        self._payloads.close()
        super().close()
        self._lock.release()

    # -- commits --

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Group several calls into one commit: all of them or, after an exception, none."""
        with self._timer.lock:
            if self._commits.is_open:
                yield
                return
            with self._timer:
                self._commits.begin()
            try:
                yield
            except BaseException:
                with self._timer:
                    self._commits.rollback()
                raise
            with self._timer:
                self._commits.commit()

    @timed
    def flush(self) -> None:
        """Inside a transaction: make durable what was written so far, so that it can be acknowledged."""
        if self._commits.is_open:
            self._commits.commit()
            self._commits.begin()

    @timed
    def check_owner(self) -> None:
        """Raises FencedError where the run was taken over; before a write into the run folder beside the journal."""
        with self._commits.write():
            pass

    @property
    def num_commits(self) -> int:
        return self._commits.num_commits

    # -- tasks and leases --

    @timed
    def set_meta(self, key: str, value: str) -> None:
        if key in schema.OWN_META_KEYS:
            raise JournalError(f"meta {key!r} belongs to the journal; choose another key")
        with self._commits.write() as db:
            db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))

    @timed
    def admit(self, tasks: Sequence[Task]) -> None:
        """Take tasks into the run; their ids continue the sequence of admission numbers from 0."""
        with self._commits.write() as db:
            for expected, task in enumerate(tasks, start=self.next_task_id):
                if task.id != expected:
                    raise JournalError(f"task {task.id} cannot be admitted: the next admission number is {expected}")
                ref = self._payloads.append(encode_prompt(int(task.id), task.prompt_ids))
                db.execute(
                    "INSERT INTO task (id, source, content_hash, row, file, offset, state) "
                    "VALUES (?, ?, ?, ?, ?, ?, 'pending')",
                    (
                        int(task.id),
                        task.row.id,
                        task.content_hash,
                        row_to_json(task.row),
                        ref.file,
                        ref.offset,
                    ),
                )

    @timed
    def lease(self, task: int, *, indices: Sequence[int], worker: str, version: int, until: float) -> int:
        """Give a pending task to a worker, for the answers it lacks; returns the number of the attempt."""
        with self._commits.write() as db:
            return leases.begin(db, task, indices=indices, worker=worker, version=version, until=until)

    @timed
    def renew(self, tasks: Sequence[int], *, until: float) -> list[bool]:
        """Prolong living leases; False for a task whose lease has ended."""
        with self._commits.write() as db:
            return [leases.renew(db, task, until=until) for task in tasks]

    @timed
    def release(self, task: int, *, counts_as_death: bool, reason: str) -> int:
        """End the living lease, if there is one; an unfinished task is pending again.

        Returns how many workers have died at this task, this one included.
        """
        with self._commits.write() as db:
            leases.release(db, task, counts_as_death=counts_as_death, reason=reason)
        return self.deaths(task)

    # -- answers --

    @timed
    def record_answers(self, completions: Sequence[Completion]) -> list[bool]:
        """Make answers durable. False where that answer was recorded before, or its task is decided.

        The first one wins, whichever attempt it came from. Acknowledge answers only after the commit.
        """
        with self._commits.write() as db:
            return [record_answer(db, self._payloads, completion) for completion in completions]

    @timed
    def record_outcomes(self, outcomes: Sequence[tuple[int, int, Outcome]]) -> list[bool]:
        """Write (task, index, outcome) to recorded answers; False where one was written before it."""
        with self._commits.write() as db:
            return [record_outcome(db, task, index, outcome) for task, index, outcome in outcomes]

    @timed
    def mark_ready(self, task: int) -> None:
        """The group is complete and scored: its lease ends and it may be planned."""
        with self._commits.write() as db:
            check_complete(db, task, group_size=self._meta_value("group_size"))
            leases.end(db, task, "ready")
            db.execute("UPDATE task SET state = 'ready' WHERE id = ?", (int(task),))

    @timed
    def drop(self, task: int, reason: DropReason, *, detail: str = "") -> TaskState:
        """Take a task out of the run. Returns its state: one that an applied plan has used ends trained."""
        if reason not in get_args(DropReason):
            raise JournalError(f"drop reason {reason!r} is unknown; use one of {', '.join(get_args(DropReason))}")
        state = self.state(task)
        if state in DECIDED_STATES:
            raise JournalError(f"task {task} cannot be dropped as {reason}: it is {state} already")
        with self._commits.write() as db:
            uses = plans.uses_by_state(db, task)
            if uses["planned"]:
                raise JournalError(
                    f"task {task} cannot be dropped as {reason}: an open plan uses it, decide that first"
                )
            leases.end(db, task, f"dropped: {reason}")
            if uses["applied"]:
                db.execute("UPDATE task SET state = 'trained' WHERE id = ?", (int(task),))
            else:
                plans.end_dropped(db, task, reason=reason, detail=detail)
        return self.state(task)

    # -- plans --

    @timed
    def write_plan(self, plan: Plan) -> None:
        """Record the decision for a training step, before the learner sees it."""
        with self._commits.write() as db:
            plans.check_plan(db, plan, max_reuse=self.max_reuse)
            number = int(plan.number)
            batches = json.dumps([[int(task) for task in batch] for batch in plan.mini_batches])
            db.execute("INSERT INTO plan (number, state, mini_batches) VALUES (?, 'planned', ?)", (number, batches))
            for position, task in enumerate(plan.tasks):
                db.execute("INSERT INTO plan_use VALUES (?, ?, ?)", (number, position, int(task)))
                db.execute("UPDATE task SET state = 'planned' WHERE id = ?", (int(task),))

    @timed
    def mark_applied(
        self, number: int, *, checksum: str, metrics: Mapping[str, float], finished_tasks: Sequence[int] = ()
    ) -> None:
        """The learner has taken the step; to be written before the new weights are published.

        Tasks whose uses are exhausted end trained, and so do `finished_tasks`, which have uses left.
        """
        with self._commits.write() as db:
            tasks = plans.check_decides_next(db, int(number))
            if not set(finished_tasks) <= set(tasks):
                raise JournalError(f"plan {number}: finished_tasks {sorted(finished_tasks)} are not all in the plan")
            db.execute(
                "UPDATE plan SET state = 'applied', checksum = ?, metrics = ? WHERE number = ?",
                (checksum, metrics_to_json(metrics, plan=number), int(number)),
            )
            max_reuse, finished = self.max_reuse, set(finished_tasks)
            for task in tasks:
                plans.settle(db, task, max_reuse=max_reuse, is_finished=task in finished, reason="")

    @timed
    def mark_skipped(self, number: int, *, reason: str) -> None:
        """The plan met non-finite numbers and left the weights alone; a redo repeats that.

        Its tasks are not planned again: they end dropped as non_finite, or trained where an earlier plan used
        them.
        """
        with self._commits.write() as db:
            tasks = plans.check_decides_next(db, int(number))
            db.execute("UPDATE plan SET state = 'skipped', reason = ? WHERE number = ?", (reason, int(number)))
            max_reuse = self.max_reuse
            for task in tasks:
                plans.settle(db, task, max_reuse=max_reuse, is_finished=True, reason=reason)

    # -- the rest --

    @timed
    def record_checkpoint(self, number: int, path: Path | str) -> None:
        """A checkpoint of the weights after plan `number` (0: the first ones) is complete on disk."""
        if not 0 <= number <= self.last_decided:
            raise JournalError(f"no checkpoint of plan {number}: the newest decided plan is {self.last_decided}")
        path = Path(path).absolute()
        inside = self.run_dir.absolute()  # kept relative, so that a run folder can be moved
        text = str(path.relative_to(inside) if path.is_relative_to(inside) else path)
        with self._commits.write() as db:
            db.execute("INSERT OR REPLACE INTO checkpoint VALUES (?, ?)", (int(number), text))

    @timed
    def forget_checkpoint(self, number: int) -> None:
        """To be called before its folder is removed."""
        with self._commits.write() as db:
            db.execute("DELETE FROM checkpoint WHERE plan = ?", (int(number),))

    @timed
    def event(self, kind: str, detail: Mapping[str, Any]) -> None:
        """Note something that happened: a death, a restart, a sync, a live change."""
        text = to_json(dict(detail), what=f"event {kind!r}")
        with self._commits.write() as db:
            db.execute("INSERT INTO event (time, kind, detail) VALUES (?, ?, ?)", (self._clock(), kind, text))

    @timed
    def finish(self) -> None:
        """End the run: every task that is not decided yet is, as run_complete (or trained, if it was
        used)."""
        with self.transaction():
            open_plan = plans.first_open_plan(self._connection)
            if open_plan is not None:
                raise JournalError(f"the run cannot end: plan {open_plan} is open; apply or skip it first")
            states: tuple[TaskState, ...] = ("pending", "leased", "ready", "planned")
            for task in [task for state in states for task in self.tasks(state)]:
                self.drop(task, "run_complete")

    # -- private --

    def _repair_payloads(self) -> None:
        committed: dict[str, int] = dict(
            self._rows(
                "SELECT file, MAX(offset) FROM "
                "(SELECT file, offset FROM task UNION ALL SELECT file, offset FROM sample) GROUP BY file"
            )
        )
        cut = cut_tails(self._payload_folder, committed)
        if cut:
            self.event("payload_tail_cut", {"bytes": cut})


def _give_up(connection: sqlite3.Connection | None, lock: OwnerLock | None) -> None:
    if connection is not None:
        connection.close()
    if lock is not None:
        lock.release()
