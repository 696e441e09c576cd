"""Checkpoints on disk: whole or absent, newest by number."""

import json
import os
import shutil
from pathlib import Path

import pytest
from safetensors import SafetensorError

from cauce import checkpoint
from cauce.errors import CheckpointError


class Writes:
    """Stands for a learner: writes two files, and may fail between them."""

    def __init__(self, text="weights", fails=False):
        self.text, self.fails = text, fails

    def save(self, folder):
        (folder / "model.safetensors").write_text(self.text)
        if self.fails:
            raise OSError("No space left on device")
        (folder / "deeper").mkdir()
        (folder / "deeper" / "state.json").write_text("{}")


@pytest.fixture
def run(tmp_path):
    return tmp_path / "run"


def test_latest_is_the_highest_number_not_the_last_name(run):
    """G7."""
    for plan in (9, 100, 10, 1_000_000):
        checkpoint.save(run, plan=plan, learner=Writes())
    assert list(checkpoint.complete(run)) == [9, 10, 100, 1_000_000]
    number, folder = checkpoint.latest(run)
    assert number == 1_000_000
    assert folder == run / "checkpoints" / "plan_1000000"
    assert (folder / "deeper" / "state.json").read_text() == "{}"


def test_nothing_written_is_no_checkpoint(run):
    assert checkpoint.latest(run) is None
    assert checkpoint.complete(run) == {}


def test_a_failed_save_leaves_what_was_there(run):
    checkpoint.save(run, plan=1, learner=Writes())
    with pytest.raises(CheckpointError, match="No space left"):
        checkpoint.save(run, plan=2, learner=Writes(fails=True))
    assert [f.name for f in (run / "checkpoints").iterdir()] == ["plan_000001"]
    assert checkpoint.latest(run)[0] == 1


def test_a_save_that_was_killed_is_not_seen_and_swept(run):
    checkpoint.save(run, plan=1, learner=Writes())
    left = run / "checkpoints" / "plan_000002.tmp-1"
    shutil.copytree(run / "checkpoints" / "plan_000001", left)
    own = run / "checkpoints" / f"plan_000003.tmp-{os.getpid()}"
    own.mkdir()
    assert list(checkpoint.complete(run)) == [1]
    checkpoint.prune(run, keep=[1])
    assert not left.exists()
    assert own.exists()


@pytest.mark.parametrize("damage", ["cut", "missing", "unmarked"])
def test_a_damaged_checkpoint_is_passed_over(run, damage):
    """G7."""
    checkpoint.save(run, plan=1, learner=Writes())
    folder = checkpoint.save(run, plan=2, learner=Writes())
    if damage == "cut":
        (folder / "model.safetensors").write_text("wei")
    elif damage == "missing":
        (folder / "deeper" / "state.json").unlink()
    else:
        (folder / checkpoint.MARKER).unlink()
    assert checkpoint.latest(run)[0] == 1
    shutil.rmtree(run / "checkpoints" / "plan_000001")
    with pytest.raises(CheckpointError, match="plan_000002 but no complete checkpoint"):
        checkpoint.latest(run)


def test_saving_again_replaces(run):
    checkpoint.save(run, plan=3, learner=Writes("old"))
    folder = checkpoint.save(run, plan=3, learner=Writes("new"))
    assert (folder / "model.safetensors").read_text() == "new"


def test_prune_keeps_the_newest(run):
    for plan in (9, 10, 100):
        checkpoint.save(run, plan=plan, learner=Writes())
    assert checkpoint.prune(run, keep=[10, 100]) == [9]
    assert list(checkpoint.complete(run)) == [10, 100]
    assert [f.name for f in sorted((run / "checkpoints").iterdir())] == ["plan_000010", "plan_000100"]
    with pytest.raises(ValueError, match=r"keep is \[9\] and complete are \[10, 100\]"):
        checkpoint.prune(run, keep=[9])
    assert list(checkpoint.complete(run)) == [10, 100]


def test_a_folder_is_replaced_whole_or_not_at_all(run):
    checkpoint.write_beside(run / "model", lambda folder: Writes("old").save(folder))
    (run / "model.tmp-1").mkdir()
    with pytest.raises(CheckpointError, match="No space left"):
        checkpoint.write_beside(run / "model", Writes("new", fails=True).save)
    assert (run / "model" / "model.safetensors").read_text() == "old"
    checkpoint.write_beside(run / "model", Writes("new").save)
    assert (run / "model" / "model.safetensors").read_text() == "new"
    assert [f.name for f in run.iterdir()] == ["model"]


def test_a_newer_format_is_refused_naming_both(run):
    """G9."""
    folder = checkpoint.save(run, plan=1, learner=Writes())
    marker = folder / checkpoint.MARKER
    whole = json.loads(marker.read_text())
    assert whole["format"] == checkpoint.FORMAT_VERSION
    marker.write_text(json.dumps({**whole, "format": 99}))
    with pytest.raises(CheckpointError, match="plan_000001 has format 99, and this release reads up to format 1"):
        checkpoint.complete(run)
    del whole["format"]  # as written before there was one
    marker.write_text(json.dumps(whole))
    assert list(checkpoint.complete(run)) == [1]


def test_what_must_not_become_visible_leaves_what_was_there(run):
    checkpoint.save(run, plan=1, learner=Writes("old"))

    def refuse():
        raise RuntimeError("another owner")

    for plan in (1, 2):
        with pytest.raises(RuntimeError, match="another owner"):
            checkpoint.save(run, plan=plan, learner=Writes("new"), before_rename=refuse)
    assert [f.name for f in (run / "checkpoints").iterdir()] == ["plan_000001"]
    assert (run / "checkpoints" / "plan_000001" / "model.safetensors").read_text() == "old"


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SafetensorError("I/O error: os error 28")])
def test_a_full_disk_leaves_what_was_there_and_says_what_to_do(tmp_path: Path, error: Exception) -> None:
    folder = tmp_path / "plan_000001"
    checkpoint.write_beside(folder, lambda beside: (beside / "old").touch())

    def fail(beside: Path) -> None:
        (beside / "half").touch()
        raise error

    with pytest.raises(CheckpointError, match=r"could not be written: .*28.*make room .*then `cauce resume`"):
        checkpoint.write_beside(folder, fail)
    assert [f.name for f in tmp_path.iterdir()] == ["plan_000001"]
    assert [f.name for f in folder.iterdir()] == ["old"]
