"""The crash matrix: kill -9, and a loss of power, at every named point; the run resumes as if it had never stopped."""

import ast
import json
from pathlib import Path

import pytest

from cauce import checkpoint, faults
from cauce.errors import JournalError
from cauce.recipe.load import load_resolved
from tests.crash import power
from tests.crash.lives import Nursery, resume, train
from tests.crash.promises import Record, assert_as_if_it_had_never_stopped, assert_nothing_lost, read_record

# At which visit to each point the process dies: early, in mid-run, or late.
HITS = {
    "run_folder_made": [1],
    "journal_made": [1],
    "lease_open": [3],
    "after_lease": [1],
    "mid_decode": [6],
    "answers_arrived": [2],
    "answers_recorded": [1, 5],
    "outcomes_arrived": [3],
    "outcomes_recorded": [2],
    "payload_file_made": [1],
    "payload_torn": [9],
    "payload_written": [6],
    "payload_synced": [5],
    "committed": [8],
    "after_planned": [1, 3],
    "between_micro_batches": [6],
    "between_optim_steps": [3],
    "before_applied": [2],
    "after_applied": [1],
    "after_publish": [2],
    "checkpoint_begun": [1],
    "checkpoint_written": [2],
    "checkpoint_synced": [1],
    "checkpoint_renamed": [1],
    "checkpoint_saved": [1],
    "checkpoint_recorded": [2],
    "checkpoint_pruned": [1],
    "before_finish": [1],
}
# Where files are in flight, the run is also resumed from what a loss of power leaves.
RESUMED_AFTER_POWER_LOSS = (
    "payload_file_made",
    "payload_synced",
    "answers_recorded",
    "after_planned",
    "checkpoint_renamed",
    "checkpoint_saved",
    "checkpoint_pruned",
)
BEFORE_ANY_RECORD = ("run_folder_made", "journal_made")
CASES = [
    pytest.param(point, hit, id=f"{point}-{hit}")
    for point, hits in HITS.items()
    for hit in hits
    if point not in BEFORE_ANY_RECORD
]


def test_every_point_has_a_place_in_the_code_and_a_kill_here() -> None:
    placed: list[str] = []
    for path in Path(faults.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "fault_point":
                placed.append(ast.literal_eval(node.args[0]))
    assert sorted(placed) == sorted(faults.POINTS)  # each once
    assert list(HITS) == list(faults.POINTS)


def test_an_unknown_point_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(faults.VARIABLE, f"after_leese:1:{tmp_path}/marker")
    with pytest.raises(ValueError, match="after_leese"):
        faults.fault_point("after_lease")


def kill_at(nursery: Nursery, model: Path, folder: Path, point: str, hit: int, *options: str) -> Path:
    """A run that died at the point, in `folder`/disk, whose syncs are kept in `folder`/store."""
    run, marker = folder / "disk" / "run", folder / "marker"
    (folder / "disk").mkdir()
    (folder / "store").mkdir()
    given = {faults.VARIABLE: f"{point}:{hit}:{marker}", **power.environment(folder / "disk", folder / "store")}
    code = nursery.live(train, str(model), str(run), *options, environment=given)
    assert marker.exists(), f"{point} was not reached {hit} times"
    assert marker.read_text().startswith(f"{point} in process")
    assert code == -9
    return run


def assert_goes_on(nursery: Nursery, run: Path, before: Record, straight: Path) -> None:
    nursery.live(resume, str(run))
    assert_nothing_lost(before, run)
    assert_as_if_it_had_never_stopped(run, straight)


@pytest.mark.parametrize(("point", "hit"), CASES)
def test_killed_at(nursery: Nursery, model: Path, straight: Path, tmp_path: Path, point: str, hit: int) -> None:
    """D12, G3, G4, G5: as the process left it, and as disks would show it after a loss of power."""
    run = kill_at(nursery, model, tmp_path, point, hit)
    before = read_record(run)
    if nursery.preload is not None:
        assert_survives_power_loss(tmp_path, before)
        if point in RESUMED_AFTER_POWER_LOSS and hit == HITS[point][0]:
            assert_goes_on(nursery, tmp_path / "strict" / "run", before, straight)
    assert_goes_on(nursery, run, before, straight)


@pytest.mark.parametrize("point", BEFORE_ANY_RECORD)
def test_killed_before_anything_was_recorded_the_run_is_started_again(
    nursery: Nursery, model: Path, straight: Path, tmp_path: Path, point: str
) -> None:
    """By the same command: a folder in which nothing was done is not in its way."""
    run = kill_at(nursery, model, tmp_path, point, 1)
    (run / "notes.txt").touch()
    assert nursery.start(train, str(model), str(run)).end() == 1  # somebody's file: not ours to take
    (run / "notes.txt").unlink()
    assert nursery.live(train, str(model), str(run)) == 0
    assert_as_if_it_had_never_stopped(run, straight)


def assert_survives_power_loss(folder: Path, before: Record) -> None:
    """Every write that was acknowledged is on both disks, and no other."""
    for name, disk in (("strict", power.strict_disk), ("names", power.disk_with_names)):
        disk(folder / "disk", folder / "store", folder / name)
        survivor = folder / name / "run"
        assert read_record(survivor) == before
        assert set(before.checkpoints) <= set(checkpoint.complete(survivor))
        load_resolved(survivor)


@pytest.mark.parametrize(
    ("point", "hit", "max_reuse"), [("outcomes_recorded", 6, 1), ("before_applied", 2, 1), ("after_planned", 3, 2)]
)
def test_killed_with_groups_in_the_buffer(
    nursery: Nursery, model: Path, tmp_path: Path, point: str, hit: int, max_reuse: int
) -> None:
    """D11, D12, G10: overlapped, nothing that waits in the buffer is lost, passed over or used too often."""
    shape = {"buffer__max_staleness": 2, "buffer__max_reuse": max_reuse, "run__plans": 5}
    run = kill_at(nursery, model, tmp_path, point, hit, json.dumps(shape))
    before = read_record(run)
    waiting = [task for task, state in before.states.items() if state == "ready"]
    assert waiting
    nursery.live(resume, str(run))
    assert_nothing_lost(before, run, max_reuse=max_reuse)
    if max_reuse == 1:  # else a plan may take the same groups again until those that wait are too old
        after = read_record(run)
        assert [after.states[task] for task in waiting] == ["trained"] * len(waiting)
        trained = [task for task, state in after.states.items() if state == "trained"]
        assert trained == list(range(len(trained)))


@pytest.mark.parametrize(
    ("point", "hit"), [("payload_synced", 5), ("answers_recorded", 1), ("after_planned", 2), ("checkpoint_saved", 1)]
)
def test_killed_with_the_journal_locked_for_itself(
    nursery: Nursery, model: Path, straight: Path, tmp_path: Path, point: str, hit: int
) -> None:
    """journal.locking=exclusive, as on a network filesystem."""
    run = kill_at(nursery, model, tmp_path, point, hit, json.dumps({"journal__locking": "exclusive"}))
    assert not (run / "journal.db-shm").exists()
    assert (run / "journal.db-wal").exists()
    before = read_record(run)
    if nursery.preload is not None:
        assert_survives_power_loss(tmp_path, before)
    assert_goes_on(nursery, run, before, straight)


# A sync that is taken away, and what the check says of it.
MISSING_SYNCS = {
    "payloads": (JournalError, "is missing|ends inside"),
    "commits": (JournalError, "is not a journal, or is damaged"),
    "checkpoint files": (AssertionError, r"\{2\} <= set\(\)"),
    "folders": (JournalError, "there is no journal.db here"),
}


@pytest.mark.usefixtures("needs_power")
@pytest.mark.parametrize("what", MISSING_SYNCS)
def test_a_sync_that_is_missing_is_noticed(nursery: Nursery, model: Path, tmp_path: Path, what: str) -> None:
    """The check of the power losses above can fail."""
    error, text = MISSING_SYNCS[what]
    run = kill_at(nursery, model, tmp_path, "checkpoint_recorded", 1, "{}", what)
    with pytest.raises(error, match=text):
        assert_survives_power_loss(tmp_path, read_record(run))
