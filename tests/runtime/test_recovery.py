"""Killed at any point and resumed, a run equals the one that never stopped: whole runs without Ray, bit for bit."""

import json
import shutil
import sqlite3
from pathlib import Path

import pytest

from cauce import checkpoint
from cauce.errors import JournalError
from cauce.journal import Journal
from cauce.runtime.recovery import newest_checkpoint
from cauce.runtime.world import WorkerDied
from cauce.stages import rl
from tests.local_session import (
    Killed,
    LocalSession,
    Watcher,
    answers,
    checksums,
    dying,
    resume_locally,
    train_locally,
    trained_rows,
    use_local_session,
)

SHAPE = {"rows": [{"prompt": f"say {i}", "answer": str(i)} for i in range(4)], "checkpoint__every": 2}  # 2 plans an epoch
PLANS = 4

# Who dies at which call, before or after its work, and the newest plan that is decided by then.
KILLS = {
    "generated, not recorded": ("rollout", "work", 2, True),
    "answers recorded, not scored": ("reward_worker", "score", 3, False),
    "planned, not begun": ("learner", "score", 2, False),
    "between gradient and step": ("learner", "optim_step", 3, False),
    "trained, not applied": ("learner", "checksum", 2, True),
    "published, not checkpointed": ("learner", "publish", 3, True),
    "checkpoint on disk, not recorded": ("learner", "save_checkpoint", 1, True),
}


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that never stops; `model` lies beside it."""
    from tests.tiny import tiny_model

    folder = tmp_path_factory.mktemp("straight")
    with pytest.MonkeyPatch.context() as patch:
        use_local_session(patch)
        train_locally(tiny_model(folder / "model"), folder / "run", run__plans=PLANS, **SHAPE)
    return folder / "run"


def assert_equal_runs(run: Path, straight: Path) -> None:
    assert checksums(run) == checksums(straight)
    assert trained_rows(run) == trained_rows(straight)
    assert answers(run) == answers(straight)
    with Journal.read_only(run) as journal:
        counts = journal.counts()
        assert counts == {**dict.fromkeys(counts, 0), "trained": 2 * PLANS}
    assert (run / "model" / "model.safetensors").read_bytes() == (straight / "model" / "model.safetensors").read_bytes()


def killed_run(local: type[LocalSession], straight: Path, run: Path, kill: str) -> None:
    role, method, call, after = KILLS[kill]
    healthy = getattr(local, role)
    setattr(local, role, dying(healthy, method, call=call, after=after))
    with pytest.raises(Killed):
        train_locally(straight.parent / "model", run, run__plans=PLANS, **SHAPE)
    setattr(local, role, healthy)


@pytest.mark.parametrize("kill", KILLS)
def test_killed_anywhere_it_resumes_to_the_same_weights(
    local: type[LocalSession], straight: Path, tmp_path: Path, kill: str
) -> None:
    """G2, G3: the same rows in the same order, the same answers and, after AdamW, the same bits."""
    run = tmp_path / "run"
    killed_run(local, straight, run, kill)
    before, decided = answers(run), checksums(run)
    assert len(decided) < PLANS
    summary = resume_locally(run, rows=SHAPE["rows"])
    assert summary["status"] == "finished"
    assert_equal_runs(run, straight)
    assert before.items() <= answers(run).items()  # nothing acknowledged was made again
    result = rl.replay(run)
    assert (result.plans, result.divergent_plan) == (PLANS, None)


def test_killed_at_the_end_of_an_epoch_it_goes_on_with_the_next(
    local: type[LocalSession], straight: Path, tmp_path: Path
) -> None:
    """G1: plan 2 ends the first epoch of four rows; the resumed run trains on all four again, in their new order."""
    run = tmp_path / "run"
    with pytest.raises(Killed):
        train_locally(
            straight.parent / "model", run, run__plans=PLANS, observer=Watcher(kill_after=2), **SHAPE
        )
    assert len(checksums(run)) == 2
    resume_locally(run, rows=SHAPE["rows"])
    assert_equal_runs(run, straight)
    epochs = trained_rows(run)[:2], trained_rows(run)[2:]
    assert [sorted(sum(epoch, [])) for epoch in epochs] == [[f"train:{i}" for i in range(4)]] * 2
    assert epochs[0] != epochs[1]


def test_a_redo_starts_from_the_newest_checkpoint_that_is_whole(
    local: type[LocalSession], straight: Path, tmp_path: Path
) -> None:
    """G7: numbers in order, damaged ones passed over; without any, the record gives the same weights from the start."""
    run = tmp_path / "run"
    shutil.copytree(straight, run)
    with Journal.open(run) as journal:
        assert newest_checkpoint(run, journal) == (4, run / "checkpoints" / "plan_000004")
        (run / "checkpoints" / "plan_000004" / checkpoint.MARKER).unlink()
        assert newest_checkpoint(run, journal) == (2, run / "checkpoints" / "plan_000002")
    (watcher, both) = Watcher(), Watcher()
    resume_locally(run, rows=SHAPE["rows"], observer=watcher)
    assert "2 plans after checkpoint plan_000002 were trained again" in watcher.notes[0]
    shutil.rmtree(run / "checkpoints")
    resume_locally(run, rows=SHAPE["rows"], observer=both)
    assert "4 plans after the initial weights were trained again" in both.notes[0]
    assert_equal_runs(run, straight)


def falsify(run: Path, plan: int) -> None:
    with sqlite3.connect(run / "journal.db") as db:
        db.execute("UPDATE plan SET checksum = 'false' || substr(checksum, 6) WHERE number = ?", (plan,))


def test_a_false_checksum_is_found_and_named_with_its_plan(
    local: type[LocalSession], straight: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(straight, run)
    falsify(run, 3)
    falsify(run, 4)
    assert rl.replay(run).divergent_plan == 3
    shutil.rmtree(run / "checkpoints" / "plan_000004")
    with pytest.raises(JournalError, match=r"plan 3 redone gives weights \w{32}, recorded were false\w+, under the same"):
        resume_locally(run, rows=SHAPE["rows"])


def test_another_fingerprint_begins_a_new_lineage_and_training_goes_on(
    local: type[LocalSession], straight: Path, tmp_path: Path
) -> None:
    run, watcher = tmp_path / "run", Watcher()
    shutil.copytree(straight, run)
    falsify(run, 4)
    shutil.rmtree(run / "checkpoints" / "plan_000004")
    with Journal.open(run) as journal:
        recorded = json.loads(journal.meta["fingerprint"])
        journal.set_meta("fingerprint", json.dumps({**recorded, "threads": "64"}))
    summary = resume_locally(run, rows=SHAPE["rows"], observer=watcher)
    assert summary["status"] == "finished"
    assert any("a new lineage begins there" in note for note in watcher.notes)
    with Journal.read_only(run) as journal:
        assert journal.meta["lineage"] == "1"
        assert json.loads(journal.meta["fingerprint"]) == recorded
        assert [event.detail["plan"] for event in journal.events("lineage")] == [4]


@pytest.mark.parametrize(
    ("method", "call", "version"),
    [
        ("score", 3, 2),
        ("forward_backward", 3, 2),
        ("optim_step", 3, 2),
        ("checksum", 3, 2),
        ("publish", 3, 2),
        ("save_checkpoint", 2, 4),
    ],
)
def test_a_learner_that_dies_is_rebuilt_and_goes_on(
    local: type[LocalSession], straight: Path, tmp_path: Path, method: str, call: int, version: int
) -> None:
    run, watcher = tmp_path / "run", Watcher()
    death = WorkerDied("learner learner-0 on here died: SIGKILL")
    local.learner = dying(local.learner, method, call=call, error=death)
    summary = train_locally(straight.parent / "model", run, run__plans=PLANS, observer=watcher, **SHAPE)
    assert summary["status"] == "finished"
    assert_equal_runs(run, straight)
    assert local.started.count("learner") == 2
    assert "learner learner-0 on here died: SIGKILL" in watcher.notes[0]
    with Journal.read_only(run) as journal:
        assert [event.detail["version"] for event in journal.events("learner_died")] == [version]
