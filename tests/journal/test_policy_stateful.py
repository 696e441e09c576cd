"""Journal, buffer and capacity driven as a trainer drives them, with crashes anywhere: the invariants of the design.

The order in which answers arrive, what is dropped and when the driver dies are random. "Weights" are a chain of hashes
over what each plan trained on, so that they are a pure function of the record and nothing else.
"""

import hashlib
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cauce.journal import Buffer, Journal, JournalReader, capacity
from cauce.types import Group
from tests.journal.records import admit, make_plan, make_ready, new_journal

PICK = st.integers(0, 10_000)
GROUPS = 2  # per plan


def step(weights: str, groups: Iterable[Group]) -> str:
    """The weights after a plan."""
    digest = hashlib.sha256(weights.encode())
    for group in groups:
        for sample in group.samples:
            digest.update(repr((group.task, sample.outcome.value)).encode())
            digest.update(sample.completion.token_ids.tobytes() + sample.completion.logps.tobytes())
    return digest.hexdigest()


def redo(journal: JournalReader) -> tuple[str, list[str]]:
    """The weights by the record alone, and those after each applied plan."""
    weights, each = "initial", []
    for record in journal.plans():
        if record.state == "applied":
            weights = step(weights, [journal.group(task) for task in record.plan.tasks])
            each.append(weights)
    return weights, each


class TrainerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="policy-"))

    @initialize(max_staleness=st.integers(0, 2), max_reuse=st.integers(1, 2), filters=st.booleans(), data=st.data())
    def begin(self, max_staleness: int, max_reuse: int, filters: bool, data: st.DataObject) -> None:
        self.max_staleness, self.max_reuse, self.filters = max_staleness, max_reuse, filters
        self.order = data.draw(st.sampled_from(["in_order", "random"]))
        self.journal = new_journal(self.folder / "run", max_reuse=max_reuse)
        self.weights, self.version, self.has_finished = "initial", 0, False
        self.oldest: dict[int, int] = {}  # task -> version of its answers
        self.fill_buffer()

    def teardown(self) -> None:
        if hasattr(self, "journal"):
            self.journal.close()
        shutil.rmtree(self.folder)

    def fill_buffer(self) -> None:
        """As at the start of a driver: everything it knows comes from the record."""
        self.buffer = Buffer(
            (self.max_staleness + 1) * GROUPS,
            max_reuse=self.max_reuse,
            sampling=self.order,
            num_draws=self.journal.last_plan,
        )
        self.buffer.restore(self.journal.accepted())

    @property
    def undecided(self) -> list[int]:
        return [*self.journal.tasks("pending"), *self.journal.tasks("leased")]

    @property
    def is_planned(self) -> bool:
        return self.journal.last_plan > self.version

    # -- what a trainer does, in any order that its rules allow --

    @rule()
    def admit_to_capacity(self) -> None:
        occupancy = self.journal.occupancy()
        allowed = capacity(max_staleness=self.max_staleness, version=self.version, groups_per_plan=GROUPS, **occupancy)
        num = min(allowed, self.buffer.capacity - self.buffer.size - occupancy["running"])
        if num > 0:
            admit(self.journal, num)

    @precondition(lambda self: self.undecided)
    @rule(number=PICK)
    def answer(self, number: int) -> None:
        """A whole group, from an engine that serves the newest version."""
        task = self.undecided[number % len(self.undecided)]
        make_ready(self.journal, task, version=self.version)
        self.oldest[task] = self.version
        self.buffer.put(task, self.version)

    @precondition(lambda self: self.filters and self.undecided)
    @rule(number=PICK)
    def filter_out(self, number: int) -> None:
        self.journal.drop(self.undecided[number % len(self.undecided)], "no_signal")

    def may_plan(self) -> tuple[int, ...]:
        ready = self.buffer.available(version=self.version, max_staleness=self.max_staleness)
        if self.is_planned or len(ready) < GROUPS:
            return ()
        if self.max_staleness == 0 and any(task < max(ready[:GROUPS]) for task in self.undecided):
            return ()
        return ready

    @rule(dies=st.booleans())
    def plan(self, dies: bool) -> None:
        for task in self.buffer.stale(version=self.version, max_staleness=self.max_staleness):
            self.buffer.remove(task)
            self.journal.drop(task, "stale")
        if self.may_plan():
            tasks = self.buffer.sample(GROUPS, version=self.version, max_staleness=self.max_staleness)
            if dies:  # drawn, and never recorded
                self.crash()
                assert self.buffer.sample(GROUPS, version=self.version, max_staleness=self.max_staleness) == tasks
            self.journal.write_plan(make_plan(self.version + 1, tasks))

    @precondition(lambda self: self.is_planned)
    @rule(is_finite=st.sampled_from([True, True, True, False]))
    def learn(self, is_finite: bool) -> None:
        """From the record, as after a crash; what is in memory is not asked."""
        (record,) = self.journal.plans(from_number=self.version + 1)
        number = record.plan.number
        if is_finite:
            self.weights = step(self.weights, [self.journal.group(task) for task in record.plan.tasks])
            self.journal.mark_applied(number, checksum=self.weights, metrics={})
        else:
            self.journal.mark_skipped(number, reason="loss is nan")
            for task in record.plan.tasks:
                if task in self.buffer:
                    self.buffer.remove(task)
        self.version = number

    @rule(numbers=st.lists(PICK, min_size=1, max_size=4))
    def go_on(self, numbers: list[int]) -> None:
        """The usual course of things, so that random runs get far."""
        self.admit_to_capacity()
        for number in numbers:
            if self.undecided:
                self.answer(number)
        self.plan(False)
        if self.is_planned:
            self.learn(True)

    @rule()
    def crash(self) -> None:
        """Inside a transaction, which is lost; a new driver redoes the weights from the record."""
        self.journal._commits.begin()
        self.journal.admit([])
        self.journal.close()
        self.journal = Journal.open(self.folder / "run")
        self.fill_buffer()
        decided = [record for record in self.journal.plans() if record.state != "planned"]
        assert self.version == len(decided)
        assert redo(self.journal)[0] == self.weights

    # -- the invariants --

    @invariant()
    def staleness_and_uses_are_bounded(self) -> None:
        uses: Counter[int] = Counter()
        for record in self.journal.plans():
            uses.update(record.plan.tasks)
            assert len(set(record.plan.tasks)) == GROUPS
            for task in record.plan.tasks:
                assert record.plan.number - 1 - self.oldest[task] <= self.max_staleness
        assert max(uses.values(), default=0) <= self.max_reuse

    @invariant()
    def plans_are_contiguous_and_one_is_open_at_most(self) -> None:
        records = self.journal.plans()
        assert [record.plan.number for record in records] == list(range(1, len(records) + 1))
        assert [record.state == "planned" for record in records] == [False] * self.version + [True] * self.is_planned

    @invariant()
    def the_record_gives_the_weights(self) -> None:
        applied = [record.checksum for record in self.journal.plans() if record.state == "applied"]
        assert redo(self.journal) == (self.weights, applied)

    @invariant()
    def the_buffer_is_a_view_of_the_journal(self) -> None:
        accepted = {group.task: (group.version, group.uses) for group in self.journal.accepted()}
        assert {task: (entry.version, entry.uses) for task, entry in self.buffer._entries.items()} == accepted

    @invariant()
    def synchronous_plans_are_those_of_a_run_that_never_stopped(self) -> None:
        """Whatever arrived first and whoever died: without filters and reuse, plan k has the kth tasks."""
        if self.max_staleness or self.filters or self.max_reuse > 1 or self.has_finished:
            return
        for record in self.journal.plans():
            first = (record.plan.number - 1) * GROUPS
            assert sorted(record.plan.tasks) == list(range(first, first + GROUPS))

    @precondition(lambda self: self.version > 4 and not self.is_planned)
    @rule()
    def finish(self) -> None:
        self.has_finished = True  # what may be resumed with more plans, which take new tasks
        self.journal.finish()
        for task in self.buffer.tasks:
            self.buffer.remove(task)
        counts = self.journal.counts()
        assert counts["trained"] + counts["dropped"] == self.journal.next_task_id
        used = {task for record in self.journal.plans() if record.state == "applied" for task in record.plan.tasks}
        assert set(self.journal.tasks("trained")) == used


TrainerMachine.TestCase.settings = settings(
    max_examples=15,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestTrainer = TrainerMachine.TestCase
