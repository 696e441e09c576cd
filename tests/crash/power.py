"""A loss of power: the folder that a disk shows afterwards, from what power.c kept of a process's syncs.

Two disks, between which real ones lie. The strict one forgets everything that was not synced, names too. The other has
all names as of the death, as most journalling filesystems do, and empty files where bytes were never synced.
"""

import os
import shutil
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("power.c")


def build(folder: Path) -> Path | None:
    """The library to preload; None where there is no C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    library = folder / "power.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-Wall", "-o", library, SOURCE, "-ldl"], check=True)
    return library


def environment(root: Path, store: Path) -> dict[str, str]:
    """Variables that let a process's disk forget; `root` exists, and so does whatever it needs from before."""
    return {"CAUCE_POWER_ROOT": os.path.realpath(root), "CAUCE_POWER_STORE": str(store)}


def strict_disk(root: Path, store: Path, target: Path) -> None:
    """Writes to `target` what is left of `root`."""
    _restore(store, root.stat().st_ino, target)


def disk_with_names(root: Path, store: Path, target: Path) -> None:
    """As `strict_disk`, but with every name that was there at the death."""
    target.mkdir()
    for path in sorted(root.rglob("*")):
        place = target / path.relative_to(root)
        if path.is_dir():
            place.mkdir()
        else:
            _restore_file(store, path.stat().st_ino, place)


def _restore(store: Path, inode: int, target: Path) -> None:
    target.mkdir()
    names = store / f"{inode}.names"
    for line in names.read_text().splitlines() if names.exists() else []:
        kind, number, name = line.split(" ", 2)
        if kind == "d":
            _restore(store, int(number), target / name)
        else:
            _restore_file(store, int(number), target / name)


def _restore_file(store: Path, inode: int, target: Path) -> None:
    kept = store / str(inode)
    if kept.exists():
        shutil.copyfile(kept, target)
    else:
        target.touch()
