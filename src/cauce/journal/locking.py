"""How the database of a run is locked: shared, or exclusive for filesystems that several hosts mount.

SQLite's write-ahead log keeps an index in memory that readers and writer share, which a network filesystem cannot
give. In exclusive mode the owner keeps the index to itself and the file locked while it lives: nobody else can read
the journal, a second start is refused by the lock, and a takeover waits for the owner's exit, since an owner that
cannot be seen cannot be fenced. metrics.jsonl is what others read meanwhile.
"""

import os
import re
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from cauce.errors import FencedError
from cauce.journal.owner import Locking, current_owner

LockingChoice = Literal["auto", "shared", "exclusive"]

MOUNTS = Path("/proc/self/mountinfo")
BUSY_TIMEOUT_S = 10.0
BEHIND_EXCLUSIVE_S = 0.2  # its owner gives the lock back when it ends, not before
TAKEOVER_WAIT_S = 600.0
_POLL_S = 0.2

# Filesystems that other hosts may have mounted too; every FUSE filesystem but the one for local disks is among them.
NETWORK = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "virtiofs", "afs", "ceph", "glusterfs", "lustre", "beegfs"}
NETWORK |= {"gpfs", "gfs2", "ocfs2", "orangefs", "wekafs", "fuse"}


def choose_locking(wanted: LockingChoice, run_dir: Path, *, mountinfo: str | None = None) -> Locking:
    """The mode for a run folder; "auto" looks at the filesystem it is on."""
    if wanted != "auto":
        return wanted
    if mountinfo is None:
        mountinfo = MOUNTS.read_text() if MOUNTS.exists() else ""
    kind = filesystem_of(run_dir, mountinfo)
    return "exclusive" if kind in NETWORK or kind.startswith("fuse.") else "shared"


def filesystem_of(path: Path, mountinfo: str) -> str:
    """The type of the filesystem that holds a path, by the text of /proc/self/mountinfo; empty where unknown."""
    real = os.path.realpath(path)
    found = best = ""
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        point = re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), left.split()[4])
        is_above = real == point or real.startswith(point.rstrip("/") + "/")
        if is_above and len(point) >= len(best):  # of equal ones the later lies on top
            found, best = right.split()[0], point
    return found


def busy_timeout_s(run_dir: Path) -> float:
    """How long a connection waits for another's lock: not for one that is kept until its owner ends."""
    owner = current_owner(run_dir)
    return BEHIND_EXCLUSIVE_S if owner is not None and owner.locking == "exclusive" else BUSY_TIMEOUT_S


def is_busy(error: sqlite3.Error) -> bool:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY


def held_error(run_dir: Path) -> FencedError:
    owner = current_owner(run_dir)
    who = f"host {owner.host}, pid {owner.pid}" if owner else "another process"
    return FencedError(
        f"the journal of {run_dir} is locked by {who}. With journal.locking=exclusive, as on network filesystems, "
        "nobody else can read it before that process ends; read metrics.jsonl beside it meanwhile"
    )


def wait_for_exit(try_to_read: Callable[[], object], *, say: Callable[[str], None], limit_s: float) -> None:
    """Waits until the journal can be read again, and says once for whom; raises what the last try did."""
    deadline = time.monotonic() + limit_s
    has_said = False
    while True:
        try:
            try_to_read()
            return
        except FencedError as error:
            if time.monotonic() > deadline:
                raise
            if not has_said:
                say(f"{error}. The takeover waits for its exit, {limit_s:.0f} s at most")
                has_said = True
        time.sleep(_POLL_S)
