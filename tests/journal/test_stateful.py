"""Random operations, crashes, takeovers and rollbacks against a small model of what must be true.

The model knows only what was acknowledged. After every step the journal's own answers must agree with it.
"""

import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cauce.errors import FencedError, JournalError
from cauce.journal import Journal
from cauce.types import Completion
from tests.journal.records import (
    GROUP_SIZE,
    admit,
    assert_same_answer,
    make_answer,
    make_plan,
    new_journal,
    scored,
)

PICK = st.integers(0, 10_000)
TERMINAL = ("trained", "dropped")


class Stop(Exception):
    """Thrown into a transaction to roll it back."""


def has(*states: str) -> Callable[["JournalMachine"], bool]:
    """For preconditions: some task is in one of the states."""
    return lambda machine: any(state in states for state in machine.states.values())


class JournalMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="journal-"))
        self.abandoned: list[Journal] = []  # owners that crashed, or were taken over
        self.states: dict[int, str] = {}
        self.attempts: Counter[int] = Counter()
        self.answers: dict[tuple[int, int], Completion] = {}
        self.outcomes: dict[tuple[int, int], float] = {}
        self.plans: list[tuple[tuple[int, ...], str]] = []

    @initialize(max_reuse=st.integers(1, 3))
    def create(self, max_reuse: int) -> None:
        self.max_reuse = max_reuse
        self.journal = new_journal(self.folder / "run", max_reuse=max_reuse)
        self.admit_tasks(4)
        self.complete([0, 0, 1])

    def teardown(self) -> None:
        for journal in [*self.abandoned, self.journal]:
            journal.close()
        shutil.rmtree(self.folder)

    def pick(self, number: int, *states: str) -> int | None:
        tasks = [task for task, state in self.states.items() if state in states]
        return tasks[number % len(tasks)] if tasks else None

    def uses(self, task: int, *states: str) -> int:
        return sum(task in tasks for tasks, state in self.plans if not states or state in states)

    # -- the life of a task --

    @precondition(lambda self: len(self.states) < 20)
    @rule(num=st.integers(1, 4))
    def admit_tasks(self, num: int) -> None:
        for task in admit(self.journal, num):
            self.states[task] = "pending"

    @precondition(has("pending"))
    @rule(number=PICK, num=st.integers(1, GROUP_SIZE))
    def lease(self, number: int, num: int) -> None:
        task = self.pick(number, "pending")
        assert task is not None
        missing = self.journal.missing(task, GROUP_SIZE)
        assert missing == tuple(i for i in range(GROUP_SIZE) if (task, i) not in self.answers)
        if not missing:
            with pytest.raises(JournalError, match="recorded already"):
                self.journal.lease(task, indices=(0,), worker="w", version=0, until=1.0)
            return
        self.attempts[task] += 1
        attempt = self.journal.lease(task, indices=missing[:num], worker="w", version=0, until=1.0)
        assert attempt == self.attempts[task]
        self.states[task] = "leased"

    @precondition(has("leased"))
    @rule(number=PICK, is_death=st.booleans())
    def release(self, number: int, is_death: bool) -> None:
        task = self.pick(number, "leased", "ready", "dropped")
        if task is not None:
            self.journal.release(task, counts_as_death=is_death, reason="test")
            if self.states[task] == "leased":
                self.states[task] = "pending"

    @precondition(lambda self: self.attempts)
    @rule(number=PICK, indices=st.lists(st.integers(0, GROUP_SIZE - 1), min_size=1, max_size=3), salt=PICK)
    def answer(self, number: int, indices: list[int], salt: int) -> None:
        """Also late, repeated and of an ended attempt."""
        task = list(self.attempts)[number % len(self.attempts)]
        attempt = 1 + salt % self.attempts[task]
        answers = [make_answer(task, index, attempt=attempt, salt=salt) for index in indices]
        expected = []
        for answer in answers:
            key = (task, answer.index)
            is_first = key not in self.answers and self.states[task] in ("pending", "leased")
            expected.append(is_first)
            if is_first:
                self.answers[key] = answer
        assert self.journal.record_answers(answers) == expected

    @precondition(lambda self: self.answers)
    @rule(number=PICK, value=st.floats(-10, 10))
    def score(self, number: int, value: float) -> None:
        key = list(self.answers)[number % len(self.answers)]
        assert self.journal.record_outcomes([(*key, scored(value))]) == [key not in self.outcomes]
        self.outcomes.setdefault(key, value)

    @precondition(has("pending", "leased"))
    @rule(numbers=st.lists(PICK, min_size=1, max_size=4))
    def complete(self, numbers: list[int]) -> None:
        """What some groups still lack, in one commit, as from an engine that finishes everything at once."""
        with self.journal.transaction():
            for number in numbers:
                task = self.pick(number, "pending", "leased")
                if task is not None:
                    self.complete_task(task)

    def complete_task(self, task: int) -> None:
        missing = self.journal.missing(task, GROUP_SIZE)
        if self.states[task] == "pending" and missing:
            self.attempts[task] += 1
            self.journal.lease(task, indices=missing, worker="w", version=0, until=1.0)
        with self.journal.transaction():
            for index in self.journal.missing(task, GROUP_SIZE):
                answer = make_answer(task, index, attempt=self.attempts[task])
                assert self.journal.record_answers([answer]) == [True]
                self.answers[task, index] = answer
            for index in self.journal.unscored(task):
                assert self.journal.record_outcomes([(task, index, scored(1.0))]) == [True]
                self.outcomes[task, index] = 1.0
            self.journal.mark_ready(task)
        self.states[task] = "ready"

    @precondition(lambda self: self.states)
    @rule(number=PICK)
    def mark_ready(self, number: int) -> None:
        task = self.pick(number, *self.states.values())
        assert task is not None
        is_whole = all((task, index) in self.outcomes for index in range(GROUP_SIZE))
        if is_whole and self.states[task] in ("pending", "leased"):
            self.journal.mark_ready(task)
            self.states[task] = "ready"
        else:
            with pytest.raises(JournalError, match=f"task {task} cannot be ready"):
                self.journal.mark_ready(task)

    @precondition(has("pending", "leased", "ready", "planned"))
    @rule(number=PICK)
    def drop(self, number: int) -> None:
        task = self.pick(number, *self.states.values())
        assert task is not None
        if self.states[task] in TERMINAL or self.uses(task, "planned"):
            with pytest.raises(JournalError, match=f"task {task} cannot be dropped"):
                self.journal.drop(task, "filtered")
            return
        self.states[task] = "trained" if self.uses(task, "applied") else "dropped"
        assert self.journal.drop(task, "filtered") == self.states[task]

    # -- plans --

    @precondition(has("ready", "planned"))
    @rule(numbers=st.lists(PICK, min_size=1, max_size=3))
    def plan(self, numbers: list[int]) -> None:
        candidates = [t for t, state in self.states.items() if state in ("ready", "planned")]
        if not candidates:
            return
        tasks = tuple(dict.fromkeys(candidates[number % len(candidates)] for number in numbers))
        plan = make_plan(len(self.plans) + 1, tasks)
        if any(self.uses(task) >= self.max_reuse for task in tasks):
            with pytest.raises(JournalError, match=f"max_reuse is {self.max_reuse}"):
                self.journal.write_plan(plan)
            return
        self.journal.write_plan(plan)
        self.plans.append((tasks, "planned"))
        for task in tasks:
            self.states[task] = "planned"

    def decide(self, state: str, write: Callable[[int], None]) -> None:
        number = next((n for n, (_, s) in enumerate(self.plans, start=1) if s == "planned"), None)
        if number is None:
            with pytest.raises(JournalError, match="no plan is open"):
                write(len(self.plans))
            return
        write(number)
        tasks = self.plans[number - 1][0]
        self.plans[number - 1] = (tasks, state)
        for task in tasks:
            is_over = state == "skipped" or self.uses(task) >= self.max_reuse
            if is_over and not self.uses(task, "planned"):
                self.states[task] = "trained" if self.uses(task, "applied") else "dropped"

    @precondition(lambda self: self.plans)
    @rule(is_finite=st.booleans())
    def decide_next(self, is_finite: bool) -> None:
        if is_finite:
            self.decide("applied", lambda n: self.journal.mark_applied(n, checksum="c", metrics={"n": n}))
        else:
            self.decide("skipped", lambda n: self.journal.mark_skipped(n, reason="loss is nan"))

    @precondition(has("pending", "leased", "ready"))
    @rule(numbers=st.lists(PICK, min_size=2, max_size=5))
    def train(self, numbers: list[int]) -> None:
        """The usual course of things, from whatever state the tasks are in to weights."""
        self.complete(numbers)
        self.plan(numbers)
        self.decide_next(True)

    # -- ends and accidents --

    @precondition(lambda self: self.states)
    @rule(kind=st.sampled_from(["reopen", "takeover", "crash", "crash"]))
    def accident(self, kind: str) -> None:
        if kind == "crash":
            self.crash_inside_a_transaction()
        elif kind == "takeover" and len(self.abandoned) < 3:
            self.be_taken_over()
        else:
            self.reopen()

    def reopen(self) -> None:
        self.journal.close()
        self.journal = Journal.open(self.folder / "run")

    def be_taken_over(self) -> None:
        """The owner is still there, with a descriptor on its payload file, and must not write again."""
        older, self.journal = self.journal, Journal.open(self.folder / "run", takeover=True)
        self.abandoned.append(older)
        with pytest.raises(FencedError):
            admit(older, 1)

    def crash_inside_a_transaction(self) -> None:
        """Answers whose payload is written and whose commit never comes, torn off in the middle."""
        try:
            with self.journal.transaction():
                for task in admit(self.journal, 2):
                    self.journal.lease(task, indices=(0,), worker="w", version=0, until=1.0)
                    self.journal.record_answers([make_answer(task, 0)])
                self.journal._payloads.append(b"CAUC\x02half a header")
                raise Stop
        except Stop:
            self.reopen()

    @rule(number=PICK)
    def roll_back(self, number: int) -> None:
        """An exception in the driver; the same journal goes on."""
        task = self.pick(number, "pending", "leased", "ready")
        try:
            with self.journal.transaction():
                admit(self.journal, 1)
                if task is not None:
                    self.journal.drop(task, "filtered")
                raise Stop
        except Stop:
            pass

    @precondition(lambda self: len(self.plans) > 3 and all(state != "planned" for _, state in self.plans))
    @rule()
    def finish(self) -> None:
        self.journal.finish()
        for task, state in self.states.items():
            if state not in TERMINAL:
                self.states[task] = "trained" if self.uses(task, "applied") else "dropped"

    # -- what must hold --

    @invariant()
    def every_task_is_in_exactly_its_state(self) -> None:
        counts = self.journal.counts()
        assert {state: num for state, num in counts.items() if num} == dict(Counter(self.states.values()))
        assert sum(counts.values()) == self.journal.next_task_id == len(self.states)
        for state in counts:
            assert self.journal.tasks(state) == sorted(t for t, s in self.states.items() if s == state)
        assert sum(self.journal.drops().values()) == counts["dropped"]
        assert {lease.task for lease in self.journal.leases()} == {
            task for task, state in self.states.items() if state == "leased"
        }

    @invariant()
    def plans_are_contiguous_and_uses_bounded(self) -> None:
        records = self.journal.plans()
        assert [r.plan.number for r in records] == list(range(1, len(self.plans) + 1))
        assert [(r.plan.tasks, r.state) for r in records] == self.plans
        uses = Counter(task for record in records for task in record.plan.tasks)
        assert max(uses.values(), default=0) <= self.max_reuse
        left = {a.task: a.uses for a in self.journal.accepted()}
        assert left == {
            task: uses[task]
            for task, state in self.states.items()
            if state in ("ready", "planned") and uses[task] < self.max_reuse
        }

    @invariant()
    def no_acknowledged_answer_is_lost_or_replaced(self) -> None:
        for task in self.states:
            expected = [self.answers[task, i] for i in range(GROUP_SIZE) if (task, i) in self.answers]
            for found, answer in zip(self.journal.answers(task), expected, strict=True):
                assert_same_answer(found, answer)
            assert self.journal.unscored(task) == tuple(
                a.index for a in expected if (task, a.index) not in self.outcomes
            )
            if self.states[task] in ("ready", "planned", "trained"):
                values = [sample.outcome.value for sample in self.journal.group(task).samples]
                assert values == [self.outcomes[task, i] for i in range(GROUP_SIZE)]


JournalMachine.TestCase.settings = settings(
    max_examples=10,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestJournal = JournalMachine.TestCase
