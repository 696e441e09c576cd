"""The journal on a real database: round trips, the order of states, first commit wins, reopening."""

import sqlite3
from pathlib import Path

import numpy as np
import pytest

from cauce.errors import JournalError
from cauce.journal import Journal, Lease
from cauce.types import Completion, Outcome, Row, Task
from tests.journal.records import (
    GROUP_SIZE,
    admit,
    assert_same_answer,
    make_answer,
    make_plan,
    make_ready,
    make_task,
    new_journal,
    scored,
)


def test_a_task_comes_back_as_it_was_admitted(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "zwei \u00d7 drei?"}]
    row = Row(
        id="train:9",
        prompt=messages,
        columns={
            "answer": "6",
            "n": np.int64(6),
            "weights": np.array([0.1, 2.0]),
            "deep": {"a": [1, None, True]},
        },
    )
    prompt_ids = np.array([1, 2, 70_000], np.int32)
    with new_journal(tmp_path / "run") as journal:
        journal.admit([Task(id=0, row=row, content_hash="abc", prompt_ids=prompt_ids)])
    with Journal.read_only(tmp_path / "run") as reader:
        task = reader.task(0)
    assert task.row.id == "train:9"
    assert task.row.prompt == messages
    assert task.row.columns == {"answer": "6", "n": 6, "weights": [0.1, 2.0], "deep": {"a": [1, None, True]}}
    assert (task.id, task.content_hash) == (0, "abc")
    assert task.prompt_ids.dtype == np.int32
    assert task.prompt_ids.tolist() == [1, 2, 70_000]


def test_a_group_comes_back_bit_for_bit_after_reopening(tmp_path: Path) -> None:
    outcomes = [
        Outcome(status="scored", value=0.1 + 0.2, parts={"a": 0.30000000000000004, "b": None}, detail=""),
        Outcome(status="failed", value=None, parts={}, detail="ValueError: no number"),
    ]
    with new_journal(tmp_path) as journal:
        admit(journal, 1)
        journal.lease(0, indices=(0, 1), worker="w", version=3, until=1.0)
        journal.record_answers([make_answer(0, i, version=3) for i in (1, 0)])
        with pytest.raises(JournalError, match=r"answers \[0, 1\] have no outcome"):
            journal.group(0)
        assert journal.unscored(0) == (0, 1)
        assert [answer.index for answer in journal.answers(0)] == [0, 1]
        journal.record_outcomes([(0, i, outcome) for i, outcome in enumerate(outcomes)])
    with Journal.open(tmp_path) as journal:
        group = journal.group(0)
        journal.mark_ready(0)
        assert [(a.task, a.version, a.uses) for a in journal.accepted()] == [(0, 3, 0)]
    assert [sample.outcome for sample in group.samples] == outcomes
    for index, sample in enumerate(group.samples):
        assert_same_answer(sample.completion, make_answer(0, index, version=3))
    assert group.prompt_ids.tolist() == make_task(0).prompt_ids.tolist()


def test_the_first_answer_and_the_first_outcome_win(tmp_path: Path) -> None:
    with new_journal(tmp_path) as journal:
        admit(journal, 1)
        assert journal.lease(0, indices=(0, 1), worker="a", version=0, until=1.0) == 1
        assert journal.release(0, counts_as_death=True, reason="died") == 1
        assert journal.lease(0, indices=(0, 1), worker="b", version=0, until=1.0) == 2
        second = make_answer(0, 0, attempt=2, salt=1)
        late = make_answer(0, 0, attempt=1, salt=2)
        other = make_answer(0, 1, attempt=1)  # of the attempt that has ended, and still the first of its index
        assert journal.record_answers([second, late, other]) == [True, False, True]
        assert journal.record_answers([late]) == [False]
        assert_same_answer(journal.answers(0)[0], second)
        assert journal.record_outcomes([(0, 0, scored(1.0)), (0, 0, scored(0.0))]) == [True, False]
        assert journal.record_outcomes([(0, 0, scored(0.5)), (0, 1, scored(0.0))]) == [False, True]
        assert [sample.outcome.value for sample in journal.group(0).samples] == [1.0, 0.0]


def test_a_new_lease_asks_for_missing_answers_only(tmp_path: Path) -> None:
    with new_journal(tmp_path) as journal:
        admit(journal, 1)
        assert journal.missing(0, 4) == (0, 1, 2, 3)
        journal.lease(0, indices=range(4), worker="a", version=0, until=1.0)
        journal.record_answers([make_answer(0, 2)])
        journal.release(0, counts_as_death=False, reason="expired")
        assert journal.missing(0, 4) == (0, 1, 3)
        with pytest.raises(JournalError, match=r"none of \[2\], which are recorded"):
            journal.lease(0, indices=(1, 2), worker="b", version=0, until=1.0)
        with pytest.raises(JournalError, match="at least one"):
            journal.lease(0, indices=(), worker="b", version=0, until=1.0)
        assert journal.lease(0, indices=(0, 1, 3), worker="b", version=0, until=1.0) == 2


def test_leases_expire_are_renewed_and_count_deaths(tmp_path: Path) -> None:
    with new_journal(tmp_path) as journal:
        admit(journal, 3)
        for task, until in ((0, 10.0), (1, 20.0)):
            journal.lease(task, indices=(0, 1), worker="a", version=5, until=until)
        with pytest.raises(JournalError, match="it is leased, and must be pending"):
            journal.lease(0, indices=(0,), worker="b", version=5, until=1.0)
        assert journal.expired(10.0) == []
        expected = Lease(task=0, attempt=1, worker="a", version=5, indices=(0, 1), until=10.0)
        assert journal.expired(10.5) == [expected]
        assert journal.renew([0, 2], until=30.0) == [True, False]
        assert [lease.task for lease in journal.expired(25.0)] == [1]
        for deaths in (1, 2):
            assert journal.release(1, counts_as_death=True, reason="killed") == deaths
            journal.lease(1, indices=(0, 1), worker="a", version=5, until=20.0)
        assert journal.release(1, counts_as_death=False, reason="expired") == 2
        assert journal.release(1, counts_as_death=True, reason="no lease lives") == 2
        assert journal.state(1) == "pending"
        assert [lease.task for lease in journal.leases()] == [0]


def test_admission_numbers_have_no_gaps(tmp_path: Path) -> None:
    with new_journal(tmp_path) as journal:
        assert admit(journal, 2) == [0, 1]
        for wrong in (1, 3):
            with pytest.raises(JournalError, match=f"task {wrong} cannot .* next admission number is 2"):
                journal.admit([make_task(wrong)])
        with pytest.raises(JournalError, match="task 4 cannot"):
            journal.admit([make_task(2), make_task(4)])
        assert journal.next_task_id == 2  # all or nothing
        with pytest.raises(JournalError, match="task 2 was never admitted"):
            journal.task(2)


def test_what_json_cannot_hold_is_refused_at_admission_by_column(tmp_path: Path) -> None:
    with new_journal(tmp_path) as journal:
        row = Row(id="train:0", prompt="x", columns={"answer": "1", "image": b"\x00"})
        task = Task(id=0, row=row, content_hash="", prompt_ids=np.array([1], np.int32))
        with pytest.raises(JournalError, match=r"row 'train:0': column 'image' .* type bytes"):
            journal.admit([task])
        assert journal.next_task_id == 0


def test_answers_without_a_lease_and_aborted_ones_are_refused(tmp_path: Path) -> None:
    """E7."""
    with new_journal(tmp_path) as journal:
        admit(journal, 1)
        with pytest.raises(JournalError, match="names attempt 1, and 0 were leased"):
            journal.record_answers([make_answer(0, 0)])
        journal.lease(0, indices=(0,), worker="a", version=0, until=1.0)
        aborted = make_answer(0, 0)
        object.__setattr__(aborted, "finish_reason", "aborted")
        with pytest.raises(JournalError, match="was aborted"):
            journal.record_answers([aborted])
        with pytest.raises(JournalError, match="task 7 was never admitted"):
            journal.record_answers([make_answer(7, 0)])
        with pytest.raises(JournalError, match=r"outcome of 0\[0\]: no such answer"):
            journal.record_outcomes([(0, 0, scored(1.0))])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_score_that_is_no_number_is_refused(tmp_path: Path, value: float) -> None:
    with new_journal(tmp_path) as journal:
        admit(journal, 1)
        journal.lease(0, indices=(0,), worker="a", version=0, until=1.0)
        journal.record_answers([make_answer(0, 0)])
        with pytest.raises(JournalError, match="a score is finite"):
            journal.record_outcomes([(0, 0, scored(value))])
        assert journal.unscored(0) == (0,)


def test_an_answer_of_no_tokens_is_as_old_as_its_lease(tmp_path: Path) -> None:
    empty = {name: np.empty(0, dtype) for name, dtype in (("token_ids", np.int32), ("logps", np.float32))}
    empty |= {"versions": np.empty(0, np.int32), "mask": np.empty(0, np.uint8)}
    with Journal.create(tmp_path, meta={}) as journal:
        admit(journal, 1)
        journal.lease(0, indices=(0,), worker="a", version=6, until=1.0)
        answer = Completion(task=0, index=0, attempt=1, finish_reason="length", **empty)
        assert journal.record_answers([answer]) == [True]
        journal.record_outcomes([(0, 0, scored(0.0))])
        journal.mark_ready(0)
        assert journal.accepted()[0].version == 6
        assert_same_answer(journal.group(0).samples[0].completion, answer)


def test_ready_needs_the_whole_group_scored(tmp_path: Path) -> None:
    with new_journal(tmp_path) as journal:
        admit(journal, 2)
        journal.lease(0, indices=(0, 1), worker="a", version=0, until=1.0)
        journal.record_answers([make_answer(0, 0)])
        journal.record_outcomes([(0, 0, scored(1.0))])
        with pytest.raises(JournalError, match=r"has the answers \[0\] of a group of 2"):
            journal.mark_ready(0)
        journal.record_answers([make_answer(0, 1)])
        with pytest.raises(JournalError, match=r"no outcome for \[1\]"):
            journal.mark_ready(0)
        journal.record_outcomes([(0, 1, scored(1.0))])
        assert journal.undecided_below(2) == (0, 1)
        journal.mark_ready(0)
        assert journal.undecided_below(2) == (1,)
        assert journal.leases() == []
        assert journal.release(0, counts_as_death=True, reason="too late") == 0
        assert journal.state(0) == "ready"
        assert journal.record_answers([make_answer(0, 0, salt=1), make_answer(0, 5)]) == [False, False]
        assert len(journal.group(0).samples) == GROUP_SIZE


def test_drops_are_final_and_counted_by_reason(tmp_path: Path) -> None:
    with new_journal(tmp_path) as journal:
        admit(journal, 4)
        make_ready(journal, 1)
        journal.lease(2, indices=(0,), worker="a", version=0, until=1.0)
        assert journal.drop(0, "too_long") == "dropped"
        assert journal.drop(1, "stale", detail="version 0 at 3") == "dropped"
        assert journal.drop(2, "poison") == "dropped"
        assert journal.leases() == []
        assert journal.record_answers([make_answer(2, 0)]) == [False]
        with pytest.raises(JournalError, match="task 0 cannot be dropped as stale: it is dropped already"):
            journal.drop(0, "stale")
        with pytest.raises(JournalError, match="drop reason 'bored' is unknown"):
            journal.drop(3, "bored")  # type: ignore[arg-type]
        assert journal.drops() == {"too_long": 1, "stale": 1, "poison": 1}
        assert journal.counts() == {
            "pending": 1, "leased": 0, "ready": 0, "planned": 0, "trained": 0, "dropped": 3
        }  # fmt: skip
        assert journal.tasks("dropped") == [0, 1, 2]
        assert journal.tasks() == [0, 1, 2, 3]


def test_finish_brings_every_task_to_one_terminal_state(tmp_path: Path) -> None:
    with new_journal(tmp_path, max_reuse=2) as journal:
        admit(journal, 5)
        for task in (1, 2, 3):
            make_ready(journal, task)
        journal.lease(4, indices=(0,), worker="a", version=0, until=1.0)
        journal.write_plan(make_plan(1, [1, 2]))
        with pytest.raises(JournalError, match="plan 1 is open"):
            journal.finish()
        journal.mark_applied(1, checksum="c", metrics={})
        journal.finish()
        assert journal.tasks("trained") == [1, 2]
        assert journal.drops() == {"run_complete": 3}
        assert sum(journal.counts().values()) == 5
        assert journal.leases() == []


def test_a_transaction_is_one_commit_and_all_or_nothing(tmp_path: Path) -> None:
    with new_journal(tmp_path) as journal, Journal.read_only(tmp_path) as reader:
        before = journal.num_commits
        with journal.transaction():
            admit(journal, 3)
            with journal.transaction():
                journal.event("note", {"n": np.int32(1)})
            assert reader.next_task_id == 0
            journal.flush()
            assert reader.next_task_id == 3
            admit(journal, 1)
        assert journal.num_commits == before + 2

        def stop_halfway() -> None:
            with journal.transaction():
                admit(journal, 2)
                journal.drop(0, "filtered")
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            stop_halfway()
        assert journal.next_task_id == 4
        assert reader.state(0) == "pending"
        with journal.transaction():
            with pytest.raises(JournalError, match="cannot be admitted"):
                journal.admit([make_task(4), make_task(6)])  # undone alone
            admit(journal, 1)
        assert reader.next_task_id == 5
        assert [(event.kind, event.detail) for event in reader.events()] == [("note", {"n": 1})]
        # Records that a rollback left in the payload file disturb none that came after them.
        assert [reader.task(i).row.id for i in reader.tasks()] == [f"train:{i}" for i in range(5)]


def test_time_in_calls_is_added_up(tmp_path: Path) -> None:
    with new_journal(tmp_path) as journal:
        assert journal.seconds_spent == 0.0
        admit(journal, 1)
        spent = journal.seconds_spent
        assert 0.0 < spent < 5.0
        journal.counts()
        assert journal.seconds_spent > spent


def test_meta_is_kept_and_the_journals_own_keys_are_refused(tmp_path: Path) -> None:
    with new_journal(tmp_path) as journal:
        journal.set_meta("lineage", "b")
        with pytest.raises(JournalError, match="'owner_epoch' belongs to the journal"):
            journal.set_meta("owner_epoch", "9")
    with Journal.open(tmp_path) as journal:
        assert journal.meta["lineage"] == "b"
        assert journal.meta["run_id"] == "test"
        assert journal.meta["owner_epoch"] == "2"
    with pytest.raises(JournalError, match=r"meta \['owner'\] belong"):
        Journal.create(tmp_path / "other", meta={"owner": "me"})


def test_checkpoints_come_in_the_order_of_plans_and_move_with_the_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with new_journal(run) as journal:
        admit(journal, 10)
        for number in range(1, 11):
            make_ready(journal, number - 1)
            journal.write_plan(make_plan(number, [number - 1]))
            journal.mark_applied(number, checksum="c", metrics={})
        for number in (10, 9, 0):
            journal.record_checkpoint(number, run / "checkpoints" / f"plan_{number}")
        journal.record_checkpoint(2, tmp_path / "elsewhere")
        with pytest.raises(JournalError, match="newest decided plan is 10"):
            journal.record_checkpoint(11, run / "x")
        journal.forget_checkpoint(0)
    moved = run.rename(tmp_path / "moved")
    with Journal.read_only(moved) as reader:
        assert [c.plan for c in reader.checkpoints()] == [2, 9, 10]
        assert reader.checkpoints()[0].path == tmp_path / "elsewhere"
        assert reader.checkpoints()[-1].path == moved / "checkpoints" / "plan_10"


def test_creating_over_a_run_and_opening_none_are_refused(tmp_path: Path) -> None:
    new_journal(tmp_path / "run").close()
    with pytest.raises(JournalError, match="holds a run already"):
        new_journal(tmp_path / "run")
    for opener in (Journal.open, Journal.read_only):
        with pytest.raises(JournalError, match=r"there is no journal\.db here"):
            opener(tmp_path / "empty")
    (tmp_path / "junk").mkdir()
    (tmp_path / "junk" / "journal.db").write_bytes(b"not a database at all" * 100)
    for opener in (Journal.open, Journal.read_only):
        with pytest.raises(JournalError, match="is not a journal, or is damaged"):
            opener(tmp_path / "junk")


def test_a_newer_format_is_refused_naming_both(tmp_path: Path) -> None:
    new_journal(tmp_path).close()
    connection = sqlite3.connect(tmp_path / "journal.db")
    connection.execute("UPDATE meta SET value = '99' WHERE key = 'format_version'")
    connection.commit()
    connection.close()
    for opener in (Journal.open, Journal.read_only):
        with pytest.raises(JournalError, match="has format 99, and this release reads up to format 1"):
            opener(tmp_path)


def test_a_reader_sees_the_run_beside_its_owner_and_after_it(tmp_path: Path) -> None:
    with new_journal(tmp_path) as journal:
        admit(journal, 1)
        with Journal.read_only(tmp_path) as reader:
            make_ready(journal, 0)
            assert reader.state(0) == "ready"
            assert len(reader.group(0).samples) == GROUP_SIZE
            assert not hasattr(reader, "admit")
    tmp_path.chmod(0o555)
    try:
        with Journal.read_only(tmp_path) as reader:
            assert reader.state(0) == "ready"
    finally:
        tmp_path.chmod(0o755)
