"""What must hold after any death: by the record before it, by that of the run gone on, and by a run that never died."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from cauce import checkpoint
from cauce.journal import Journal
from cauce.metrics.writer import read_metrics
from tests.local_session import answers, assert_equal_runs

Lease = tuple[int, int]  # task, attempt


@dataclass(frozen=True, kw_only=True)
class Record:
    """What a run's journal has acknowledged at one moment."""

    answers: dict[tuple[int, int], tuple[bytes, bytes]]
    attempts: dict[tuple[int, int], int]
    outcomes: dict[tuple[int, int], float | None]
    leases: dict[Lease, tuple[int, ...]]
    states: dict[int, str]
    plans: list[tuple[int, tuple[int, ...], str, str | None]]
    checkpoints: list[int]


def read_record(run: Path) -> Record:
    with Journal.read_only(run) as journal:
        db = journal._connection
        leases = db.execute("SELECT task, attempt, indices FROM lease").fetchall()
        outcomes = db.execute("SELECT task, idx, value FROM sample WHERE state = 'scored'").fetchall()
        return Record(
            answers=answers(run),
            attempts={(task, i): n for task, i, n in db.execute("SELECT task, idx, attempt FROM sample").fetchall()},
            outcomes={(task, i): value for task, i, value in outcomes},
            leases={(task, attempt): tuple(map(int, text.strip("[]").split(","))) for task, attempt, text in leases},
            states={task: journal.state(task) for task in journal.tasks()},
            plans=[(r.plan.number, r.plan.tasks, r.state, r.checksum) for r in journal.plans()],
            checkpoints=[record.plan for record in journal.checkpoints()],
        )


def assert_nothing_lost(before: Record, run: Path, *, max_reuse: int = 1) -> None:
    """Of a run that has gone on to its end after a death that left `before`."""
    after = read_record(run)
    assert set(after.states.values()) <= {"trained", "dropped"}
    assert sorted(after.states) == list(range(len(after.states)))
    assert before.answers.items() <= after.answers.items()
    assert before.attempts.items() <= after.attempts.items()
    assert before.outcomes.items() <= after.outcomes.items()
    asked_again = {
        (task, index)
        for (task, attempt), indices in after.leases.items()
        if (task, attempt) not in before.leases
        for index in indices
    }
    assert not asked_again & set(before.answers)  # nothing acknowledged was generated again
    numbers = [number for number, *_ in after.plans]
    assert numbers == list(range(1, len(numbers) + 1))
    for old, new in zip(before.plans, after.plans, strict=False):
        assert old[:2] == new[:2]
        assert old[2] == "planned" or old == new  # what was applied keeps its checksum
    uses = Counter(task for _, tasks, *_ in after.plans for task in tasks)
    assert max(uses.values()) <= max_reuse
    assert set(uses) == {task for task, state in after.states.items() if state == "trained"}
    assert [row["plan"] for row in read_metrics(run) if row["plan"]] == numbers


def assert_as_if_it_had_never_stopped(run: Path, straight: Path) -> None:
    """For synchronous runs: the same trained set, the same samples, and bitwise the same weights."""
    assert_equal_runs(run, straight)
    whole, recorded = checkpoint.complete(run), read_record(run).checkpoints
    assert list(whole) == recorded
    for plan, folder in whole.items():
        twin = straight / "checkpoints" / folder.name / "model.safetensors"
        assert (folder / "model.safetensors").read_bytes() == twin.read_bytes(), plan
