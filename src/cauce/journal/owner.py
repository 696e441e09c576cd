"""Who owns a run: one process at a time, by a lock on RUN/owner.lock and by an epoch in the database.

The lock keeps out a second start on a machine that sees the same lock. The epoch fences an owner that was
replaced while it could not be seen: `takeover` puts a new lock file in the place of the old one, raises the
epoch, and the older owner stops at its next transaction, which checks the epoch (commits.py). POSIX record
locks are used because they end with the process, whatever children it forked.
"""

import contextlib
import fcntl
import json
import os
import socket
import struct
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Literal

from cauce.errors import FencedError

LOCK_NAME = "owner.lock"
Locking = Literal["shared", "exclusive"]  # see locking.py


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """A process that owns, or owned, a run."""

    host: str
    pid: int
    epoch: int
    locking: Locking = "shared"

    def to_json(self) -> str:
        return json.dumps({"host": self.host, "pid": self.pid, "epoch": self.epoch, "locking": self.locking})

    @staticmethod
    def from_json(text: str) -> "Owner | None":
        """None where the text is not whole: it is written in place, and a reader may come in between."""
        try:
            found = json.loads(text)
            locking: Locking = "exclusive" if found.get("locking") == "exclusive" else "shared"
            return Owner(host=str(found["host"]), pid=int(found["pid"]), epoch=int(found["epoch"]), locking=locking)
        except (ValueError, KeyError, TypeError):
            return None


def this_process(*, epoch: int, locking: Locking = "shared") -> Owner:
    return Owner(host=socket.gethostname(), pid=os.getpid(), epoch=epoch, locking=locking)


def current_owner(run_dir: Path) -> Owner | None:
    """Who owns a run, or owned it last, by its lock file; None where that is not written yet."""
    mine = _held_here(run_dir / LOCK_NAME)
    if mine is not None:
        return mine.owner
    try:
        return Owner.from_json((run_dir / LOCK_NAME).read_text(errors="replace"))
    except FileNotFoundError:
        return None


def refuse_older(run_dir: Path, *, epoch: int) -> None:
    """For writes outside the journal by workers: FencedError where an owner newer than `epoch` has come."""
    newer = current_owner(run_dir)
    if newer is not None and newer.epoch > epoch:
        raise FencedError(
            f"{run_dir} was taken over by host {newer.host}, pid {newer.pid} (owner epoch {newer.epoch}, ours is "
            f"{epoch}); this process must stop"
        )


class OwnerLock:
    """The held lock of one run folder; released by `release`, or by the end of the process."""

    def __init__(self, path: Path, file: FileIO) -> None:
        self._path = path
        self._file = file
        self._pid = os.getpid()
        self.owner: Owner | None = None

    def describe(self, owner: Owner) -> None:
        """Write who owns the run, for the message that refuses the next one."""
        self.owner = owner
        text = owner.to_json().encode()
        os.pwrite(self._file.fileno(), text, 0)
        os.ftruncate(self._file.fileno(), len(text))

    def release(self) -> None:
        key = _key(self._path)
        with _HELD_LOCK:
            if _HELD.get(key) is self:
                del _HELD[key]
        self._file.close()


# A record lock does not keep out its own process, and closing any descriptor of the file, even one that was opened to
# read it, would drop it; so locks held here are looked up before the file is touched. Weak: a lock whose journal was
# thrown away goes with it.
_HELD: weakref.WeakValueDictionary[str, OwnerLock] = weakref.WeakValueDictionary()
_HELD_LOCK = threading.Lock()


def acquire(run_dir: Path, *, takeover: bool) -> OwnerLock:
    """Take the lock of a run, or raise FencedError naming host and process of the owner.

    With `takeover` a live owner is replaced: the caller must raise the epoch before it reads or writes
    anything.
    """
    path = run_dir / LOCK_NAME
    with _HELD_LOCK:
        if _held_here(path) is not None and not takeover:
            raise FencedError(
                f"{run_dir} is already open in this process (host {socket.gethostname()}, "
                f"pid {os.getpid()}); close the earlier Trainer or Journal first"
            )
        lock = _replace(path) if takeover else _take(path)
        _HELD[_key(path)] = lock
    return lock


def live_owner(run_dir: Path) -> Owner | None:
    """The process that owns the run now, asked for without taking the lock from it; None where there is none.

    Where the system cannot say who holds a record lock, an owner on this host counts as alive while its pid does.
    """
    path = run_dir / LOCK_NAME
    with _HELD_LOCK:
        mine = _HELD.get(_key(path))
        if mine is not None and mine._pid == os.getpid():
            return mine.owner  # opening the file here and closing it would drop the lock
        try:
            text = path.read_text(errors="replace")
            with path.open("rb") as file:
                is_held = _is_locked(file.fileno())
        except OSError:
            return None
    owner = Owner.from_json(text)
    if is_held is None:
        is_held = owner is not None and owner.host == socket.gethostname() and _is_alive(owner.pid)
    return owner if is_held else None


def _is_locked(descriptor: int) -> bool | None:
    """Whether another process holds a record lock on the file; None where this system is asked another way."""
    if sys.platform != "linux":
        return None
    fields = struct.Struct("hhqqi4x")  # struct flock: type, whence, start, length, pid
    asked = fields.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    kind: int = fields.unpack(fcntl.fcntl(descriptor, fcntl.F_GETLK, asked))[0]
    return kind != fcntl.F_UNLCK


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _held_here(path: Path) -> OwnerLock | None:
    held = _HELD.get(_key(path))
    return held if held is not None and held._pid == os.getpid() else None


def _take(path: Path) -> OwnerLock:
    while True:
        file = FileIO(path, "r+", opener=_open_or_create)
        if not _lock(file):
            text = path.read_text(errors="replace")
            file.close()
            owner = Owner.from_json(text)
            who = f"host {owner.host}, pid {owner.pid}" if owner else "a process that is just starting"
            raise FencedError(
                f"{path.parent} is owned by {who}, which is alive; stop that process, or pass --takeover "
                "if it cannot be reached (it then stops at its next transaction)"
            )
        if _is_at(path, file):
            return OwnerLock(path, file)
        file.close()  # a takeover put another file here in between


def _replace(path: Path) -> OwnerLock:
    beside = path.with_name(f"{path.name}.{socket.gethostname()}.{os.getpid()}")
    file = FileIO(beside, "w+")
    _lock(file)
    os.replace(beside, path)
    return OwnerLock(path, file)


def _open_or_create(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CREAT, 0o644)


def _lock(file: FileIO) -> bool:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True


def _is_at(path: Path, file: FileIO) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    return False


_key: Callable[[Path], str] = os.path.realpath
