"""Plans: contiguous, in order, and no task is used more often than max_reuse, across reopening too."""

from collections import Counter
from pathlib import Path

import pytest

from cauce.errors import JournalError
from cauce.journal import Buffer, Journal
from cauce.types import Plan
from tests.journal.records import admit, make_plan, make_ready, new_journal


def ready_run(run_dir: Path, num: int, *, max_reuse: int = 1) -> Journal:
    journal = new_journal(run_dir, max_reuse=max_reuse)
    for task in admit(journal, num):
        make_ready(journal, task)
    return journal


def test_a_plan_comes_back_in_its_own_order(tmp_path: Path) -> None:
    plan = Plan(number=1, tasks=(3, 0, 2), mini_batches=((3, 0), (2,), (0, 2), (3,)))
    with ready_run(tmp_path, 4) as journal:
        journal.write_plan(plan)
        assert journal.last_plan == 1
        assert journal.last_decided == 0
        assert journal.tasks("planned") == [0, 2, 3]
    with Journal.open(tmp_path) as journal:
        (record,) = journal.plans()
        assert record.plan == plan
        assert (record.state, record.checksum) == ("planned", None)
        journal.mark_applied(1, checksum="abc", metrics={"reward/mean": 0.1 + 0.2})
        (record,) = journal.plans()
        assert (record.state, record.checksum, record.metrics) == (
            "applied",
            "abc",
            {"reward/mean": 0.1 + 0.2},
        )
        assert journal.last_decided == 1
        assert journal.tasks("trained") == [0, 2, 3]


def test_plans_are_contiguous_and_decided_in_order(tmp_path: Path) -> None:
    with ready_run(tmp_path, 4) as journal:
        for wrong in (0, 2):
            with pytest.raises(JournalError, match=f"plan {wrong} cannot follow plan 0"):
                journal.write_plan(make_plan(wrong, [0]))
        for number in (1, 2, 3):
            journal.write_plan(make_plan(number, [number - 1]))
        with pytest.raises(JournalError, match="plan 3 cannot follow plan 3"):
            journal.write_plan(make_plan(3, [3]))
        with pytest.raises(
            JournalError, match="plan 2 cannot be decided: it is planned, and the plan to decide now is 1"
        ):
            journal.mark_applied(2, checksum="c", metrics={})
        journal.mark_applied(1, checksum="c", metrics={})
        with pytest.raises(JournalError, match="it is applied"):
            journal.mark_applied(1, checksum="d", metrics={})
        journal.mark_skipped(2, reason="loss is nan")
        journal.mark_applied(3, checksum="e", metrics={})
        with pytest.raises(JournalError, match="there is no such plan, and no plan is open"):
            journal.mark_skipped(4, reason="x")
        assert [(r.plan.number, r.state) for r in journal.plans()] == [
            (1, "applied"),
            (2, "skipped"),
            (3, "applied"),
        ]
        assert [r.plan.number for r in journal.plans(2, until=2)] == [2]
        assert [r.reason for r in journal.plans(2)] == ["loss is nan", ""]


def test_only_whole_plans_of_ready_tasks_are_written(tmp_path: Path) -> None:
    with ready_run(tmp_path, 3) as journal:
        admit(journal, 1)
        journal.drop(2, "stale")
        for tasks, words in (
            ([0, 3], "task 3 is pending"),
            ([0, 2], "task 2 is dropped"),
            ([0, 9], "task 9 is not admitted"),
            ([0, 0], r"distinct tasks, at least one; repeated: \[0\]"),
            ([], "at least one"),
        ):
            with pytest.raises(JournalError, match=words):
                journal.write_plan(make_plan(1, tasks))
        with pytest.raises(JournalError, match=r"mini_batches hold the tasks \[0\] and its tasks are \[0, 1\]"):
            journal.write_plan(Plan(number=1, tasks=(0, 1), mini_batches=((0,),)))
        assert journal.last_plan == 0
        assert journal.counts()["planned"] == 0


def test_a_task_of_one_use_is_not_planned_twice(tmp_path: Path) -> None:
    with ready_run(tmp_path, 2) as journal:
        journal.write_plan(make_plan(1, [0]))
        with pytest.raises(JournalError, match="task 0 was used 1 times and max_reuse is 1"):
            journal.write_plan(make_plan(2, [0]))
        journal.mark_applied(1, checksum="c", metrics={})
        with pytest.raises(JournalError, match="task 0 is trained"):
            journal.write_plan(make_plan(2, [0]))


@pytest.mark.parametrize("sampling", ["in_order", "random"])
def test_reuse_stays_within_max_reuse_across_resumes(tmp_path: Path, sampling: str) -> None:
    """Buffer and journal together; after every second plan all state is rebuilt from the record."""
    ready_run(tmp_path, 6, max_reuse=2).close()
    number = 0
    while True:
        with Journal.open(tmp_path) as journal:
            buffer = Buffer(
                6, max_reuse=journal.max_reuse, sampling=sampling, seed=1, num_draws=journal.last_plan  # type: ignore[arg-type]
            )  # fmt: skip
            buffer.restore(journal.accepted())
            for _ in range(2):
                if buffer.size < 2:
                    break
                number += 1
                journal.write_plan(make_plan(number, buffer.sample(2, version=number - 1, max_staleness=99)))
                journal.mark_applied(number, checksum="c", metrics={})
            if buffer.size < 2:
                break
    with Journal.read_only(tmp_path) as reader:
        uses = Counter(task for record in reader.plans() for task in record.plan.tasks)
        assert max(uses.values()) == 2
        assert all(len(set(record.plan.tasks)) == 2 for record in reader.plans())
        assert reader.tasks("trained") == sorted(task for task, count in uses.items() if count == 2)
        if sampling == "in_order":
            assert sorted(uses) == list(range(6))


def test_a_used_task_with_uses_left_stays_planned_until_it_is_finished(tmp_path: Path) -> None:
    with ready_run(tmp_path, 4, max_reuse=3) as journal:
        journal.write_plan(make_plan(1, [0, 1, 2]))
        with pytest.raises(JournalError, match=r"finished_tasks \[3\]"):
            journal.mark_applied(1, checksum="c", metrics={}, finished_tasks=[3])
        journal.mark_applied(1, checksum="c", metrics={}, finished_tasks=[1])
        assert journal.tasks("trained") == [1]
        assert journal.tasks("planned") == [0, 2]
        assert [(a.task, a.uses) for a in journal.accepted()] == [(0, 1), (2, 1), (3, 0)]
        assert journal.drop(0, "stale") == "trained"  # its samples are in the weights
        assert journal.drop(3, "stale") == "dropped"
        journal.write_plan(make_plan(2, [2]))
        with pytest.raises(JournalError, match="an open plan uses it"):
            journal.drop(2, "stale")


def test_tasks_of_a_skipped_plan_end_non_finite_unless_they_were_trained_on(tmp_path: Path) -> None:
    with ready_run(tmp_path, 4, max_reuse=3) as journal:
        journal.write_plan(make_plan(1, [0]))
        journal.mark_applied(1, checksum="c", metrics={})
        journal.write_plan(make_plan(2, [0, 1, 2]))
        journal.write_plan(make_plan(3, [2]))  # planned ahead, while plan 2 is open
        journal.mark_skipped(2, reason="gradient norm is inf")
        assert journal.state(0) == "trained"
        assert journal.state(1) == "dropped"
        assert journal.state(2) == "planned"
        assert journal.drops() == {"non_finite": 1}
        journal.mark_applied(3, checksum="d", metrics={})
        assert journal.state(2) == "planned"  # two of three uses
        assert journal.occupancy() == {"trained": 2, "planned": 1, "ready": 1, "running": 0}
