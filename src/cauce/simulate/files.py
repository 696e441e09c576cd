"""The journal on a simulated disk: its writes may find the disk full, and the driver may die at any of them.

SQLite and payload files are the real ones. A kill keeps what was written; a loss of power also takes whatever of a
payload file, or of the end of metrics.jsonl, was not synced. What SQLite has committed with synchronous=FULL stays: to
take back its own writes too would need a filesystem of ours.
"""

import errno
import os
import sqlite3
from pathlib import Path
from typing import Any, ClassVar, cast

from cauce.journal import Journal
from cauce.journal.owner import OwnerLock
from cauce.journal.payloads import FOLDER_NAME, PayloadRef, PayloadWriter
from cauce.simulate.script import Crashed, Script

COMMIT_S = 0.004


class Disk:
    """What the files of one run live on."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._full_until = -1.0
        self._synced: dict[str, int] = {}  # payload file -> bytes that survive a loss of power
        self.is_dead = False  # the driver; the disk outlives it
        self.was_full = False  # since the driver's start

    def point(self, name: str) -> None:
        """A moment at which the driver may die. Once it has, every further one ends the same way."""
        if not self.is_dead and self._script.fires("crash"):
            self._script.log(f"driver dies {name}")
            self.is_dead = True
        if self.is_dead:
            raise Crashed(name)

    def write_point(self, name: str) -> None:
        """The same before a write, which may find no room."""
        self.point(name)
        if self._script.fires("disk_full"):
            self._full_until = self._script.clock.time + self._script.delay(1, 300)
        self.require_room()

    def require_room(self) -> None:
        if self._script.clock.time < self._full_until:
            self.was_full = True
            raise OSError(errno.ENOSPC, "No space left on device (simulated)")

    def note_synced(self, name: str, size: int) -> None:
        self._synced[name] = size

    def lose_power(self, run_dir: Path) -> None:
        """Takes back what nobody had synced."""
        for path in sorted((run_dir / FOLDER_NAME).glob("*.bin")):
            self._cut(path, keep=self._synced.get(path.name, 0))
        metrics = run_dir / "metrics.jsonl"
        if metrics.exists():
            self._cut(metrics, keep=max(0, metrics.stat().st_size - 40))

    def _cut(self, path: Path, *, keep: int) -> None:
        size = path.stat().st_size
        left = self._script.rng.randint(min(keep, size), size)
        if left < size:
            self._script.log(
                f"power: {path.name} loses {size - left} bytes" if path.suffix == ".bin" else "power: metrics"
            )
            os.truncate(path, left)


class SimulatedPayloads(PayloadWriter):
    """Payload files whose appends tear and whose syncs fail."""

    disk: ClassVar[Disk]

    def append(self, record: bytes) -> PayloadRef:
        try:
            self.disk.write_point("in a payload record")
        except (Crashed, OSError):
            super().append(record[: len(record) // 2])
            raise
        return super().append(record)

    def sync(self) -> None:
        self.disk.write_point("before a payload sync")
        super().sync()
        self.disk.note_synced(self._name, self._size)
        self.disk.point("after a payload sync")


class _Connection:
    """SQLite's connection, with the driver's death on either side of a commit."""

    def __init__(self, connection: sqlite3.Connection, disk: Disk, script: Script) -> None:
        self._connection, self._disk, self._script = connection, disk, script

    def execute(self, statement: str, values: Any = ()) -> sqlite3.Cursor:
        if statement != "COMMIT":
            return self._connection.execute(statement, values)
        try:
            self._disk.write_point("before a commit")
        except OSError as error:
            raise sqlite3.OperationalError("database or disk is full") from error
        done = self._connection.execute(statement)
        self._script.clock.pass_by(COMMIT_S)
        self._script.log("commit")
        self._disk.point("after a commit")
        return done

    def executemany(self, statement: str, values: Any) -> sqlite3.Cursor:
        return self._connection.executemany(statement, values)

    @property
    def in_transaction(self) -> bool:
        return self._connection.in_transaction

    def close(self) -> None:
        self._connection.close()


class SimulatedJournal(Journal):
    """The journal of every run, on a simulated disk."""

    disk: ClassVar[Disk]
    script: ClassVar[Script]

    def __init__(self, run_dir: Path, connection: sqlite3.Connection, *, lock: OwnerLock, **given: Any) -> None:
        wrapped = cast(sqlite3.Connection, _Connection(connection, self.disk, self.script))
        super().__init__(run_dir, wrapped, lock=lock, **given)


def journal_on(disk: Disk, script: Script, base: type[SimulatedJournal]) -> type[SimulatedJournal]:
    """The journal class, bound to the disk of one run."""
    writer = type("Payloads", (SimulatedPayloads,), {"disk": disk})
    return type(base.__name__, (base,), {"disk": disk, "script": script, "writer": writer})
