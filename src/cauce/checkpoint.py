"""Checkpoints on disk: RUN/checkpoints/plan_000010/, there whole or not at all.

A checkpoint is written beside (`plan_000010.tmp-<pid>`), every file and the folder are fsynced, a list of the files
with their sizes is written last, and one rename makes it visible. Only after `save` returns may the caller record it.
What stands in a folder is the learner's; when a checkpoint is due, and which one a run goes on from, is the caller's.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError

from cauce.durable import make_folder, sync
from cauce.errors import CheckpointError
from cauce.faults import fault_point

MARKER = "complete.json"
FORMAT_VERSION = 1  # raise it when a file of a checkpoint changes its name or meaning
_NAME = re.compile(r"plan_(\d+)")
_UNFINISHED = re.compile(r"plan_\d+\.tmp-\d+")


class Saves(Protocol):
    """Whatever can write itself into an empty folder."""

    def save(self, folder: Path) -> None: ...


def save(run_dir: Path, *, plan: int, learner: Saves, before_rename: Callable[[], object] = lambda: None) -> Path:
    """Write the checkpoint of this plan and return its folder; one that is already complete is replaced.

    Args:
        before_rename: called when everything is written; raises where it must not become visible.
    """
    parent = Path(run_dir) / "checkpoints"
    make_folder(parent)
    folder = parent / f"plan_{plan:06d}"

    def write(beside: Path) -> None:
        learner.save(beside)
        files = {str(f.relative_to(beside)): f.stat().st_size for f in sorted(beside.rglob("*")) if f.is_file()}
        (beside / MARKER).write_text(
            json.dumps({"format": FORMAT_VERSION, "plan": plan, "files": files}, indent=1) + "\n"
        )

    write_beside(folder, write, before_rename=before_rename)
    return folder


def write_beside(
    folder: Path, write: Callable[[Path], None], *, before_rename: Callable[[], object] = lambda: None
) -> None:
    """A folder that is there whole or not at all: written beside, fsynced, renamed; one of that name is replaced.

    Raises:
        CheckpointError: where the disk is full or refuses; what stood there before still does.
    """
    for left in folder.parent.glob(f"{folder.name}.tmp-*"):  # of writers that were killed
        shutil.rmtree(left, ignore_errors=True)
    beside = folder.with_name(f"{folder.name}.tmp-{os.getpid()}")
    beside.mkdir(parents=True)
    fault_point("checkpoint_begun")
    try:
        write(beside)
        fault_point("checkpoint_written")
        _sync_tree(beside)
        fault_point("checkpoint_synced")
        before_rename()
    except BaseException as error:
        shutil.rmtree(beside, ignore_errors=True)
        if isinstance(error, OSError | SafetensorError):
            raise CheckpointError(
                f"{folder} could not be written: {error}. What is on record is safe; make room or repair the disk, "
                "then `cauce resume`"
            ) from error
        raise
    if folder.exists():
        shutil.rmtree(folder)
    beside.rename(folder)
    fault_point("checkpoint_renamed")
    sync(folder.parent)


def complete(run_dir: Path) -> dict[int, Path]:
    """Every whole checkpoint by plan number, ascending."""
    parent = Path(run_dir) / "checkpoints"
    found = [(int(m[1]), f) for f in parent.glob("plan_*") if (m := _NAME.fullmatch(f.name)) and _is_whole(f)]
    return dict(sorted(found))


def latest(run_dir: Path) -> tuple[int, Path] | None:
    """The whole checkpoint of the highest plan; None only where nothing was ever written.

    Files without one whole checkpoint are an error: starting over would throw a run away without a word.
    """
    whole = complete(run_dir)
    if whole:
        number = max(whole)
        return number, whole[number]
    parent = Path(run_dir) / "checkpoints"
    leftovers = sorted(f.name for f in parent.iterdir() if not _UNFINISHED.fullmatch(f.name)) if parent.exists() else []
    if leftovers:
        raise CheckpointError(
            f"{parent} holds {', '.join(leftovers[:5])} but no complete checkpoint; restore one, or move the "
            "folder away to start from the initial weights"
        )
    return None


def prune(run_dir: Path, *, keep: Collection[int]) -> list[int]:
    """Delete the whole checkpoints of all plans but these, and what interrupted saves left.

    Only while nothing is being saved, and after those that go are recorded no more.
    """
    whole = complete(run_dir)
    if whole and not set(keep) & set(whole):
        raise ValueError(f"keep is {sorted(keep)} and complete are {list(whole)}: at least one must stay")
    gone = [(number, folder) for number, folder in whole.items() if number not in keep]
    for _, folder in gone:  # renamed first: what a kill leaves of it is swept by the next prune
        going = folder.rename(folder.with_name(f"{folder.name}.tmp-{os.getpid()}"))
        fault_point("checkpoint_pruned", last_act=(going / MARKER).unlink)
        shutil.rmtree(going)
    for folder in (Path(run_dir) / "checkpoints").glob("plan_*.tmp-*"):
        if folder.name.rpartition("-")[2] != str(os.getpid()):
            shutil.rmtree(folder, ignore_errors=True)
    return [number for number, _ in gone]


def _is_whole(folder: Path) -> bool:
    try:
        marker: dict[str, Any] = json.loads((folder / MARKER).read_text())
        is_whole = all((folder / name).stat().st_size == size for name, size in marker["files"].items())
    except (OSError, ValueError, KeyError):
        return False
    found = int(marker.get("format", 1))  # the first releases wrote none
    if found > FORMAT_VERSION:
        raise CheckpointError(
            f"{folder} has format {found}, and this release reads up to format {FORMAT_VERSION}; install the release "
            "of Cauce that wrote it, or a later one"
        )
    return is_whole


def _sync_tree(folder: Path) -> None:
    for path in folder.rglob("*"):
        sync(path)
    sync(folder)
