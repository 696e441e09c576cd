"""Transactions of the journal: group commit, the fence, and the order of the two files.

Every commit first makes the payload records durable and then the rows that point at them. Every transaction
first reads the owner epoch and stops if another process has raised it. A write that fails for the disk's sake
leaves the commits broken for good: after a failed fsync nobody knows what reached the disk, only a new open
does.
"""

import functools
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from cauce import spans
from cauce.errors import FencedError, JournalError
from cauce.faults import fault_point
from cauce.journal.owner import Owner
from cauce.journal.payloads import PayloadWriter


class CallTimer:
    """Lets one thread in at a time, and adds up the time spent in outermost calls."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.seconds = 0.0
        self._depth = 0
        self._started = 0.0

    def __enter__(self) -> None:
        self.lock.acquire()
        if self._depth == 0:
            self._started = time.perf_counter()
        self._depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.seconds += time.perf_counter() - self._started
        self.lock.release()


class HasTimer(Protocol):
    _timer: CallTimer


P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound=HasTimer)


def timed(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """The method under its object's timer; SQLite's errors become JournalError."""

    @functools.wraps(method)
    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._timer:
            try:
                return method(self, *args, **kwargs)
            except sqlite3.Error as error:
                raise JournalError(f"the journal could not be used: {error}") from error

    return call


class Commits:
    """The open transaction of one owner, if any."""

    def __init__(self, connection: sqlite3.Connection, payloads: PayloadWriter, *, owner: Owner, where: str) -> None:
        self._connection = connection
        self._payloads = payloads
        self._owner = owner
        self._where = where
        self._broken: JournalError | None = None
        self.is_open = False
        self.num_commits = 0

    @contextmanager
    def write(self) -> Iterator[sqlite3.Connection]:
        """All or nothing: a savepoint inside an open transaction, a transaction of its own otherwise."""
        is_own = not self.is_open
        if is_own:
            self.begin()
        else:
            self._refuse_if_broken()
            self._connection.execute("SAVEPOINT one_call")
        try:
            yield self._connection
        except BaseException as error:
            self._undo(error, is_own=is_own)
            raise
        if is_own:
            self.commit()
        else:
            self._connection.execute("RELEASE one_call")

    def begin(self) -> None:
        self._refuse_if_broken()
        if os.getpid() != self._owner.pid:
            raise JournalError(
                f"{self._where} was opened in process {self._owner.pid} and is used in its child "
                f"{os.getpid()}; only the driver writes the journal"
            )
        try:
            self._connection.execute("BEGIN IMMEDIATE")
        except sqlite3.Error as error:
            raise JournalError(f"{self._where} could not begin a transaction: {error}") from error
        row = self._connection.execute(
            "SELECT (SELECT value FROM meta WHERE key = 'owner_epoch'), (SELECT value FROM meta WHERE key = 'owner')"
        ).fetchone()
        if int(row[0]) != self._owner.epoch:
            self._connection.execute("ROLLBACK")
            successor = Owner.from_json(row[1])
            who = f"host {successor.host}, pid {successor.pid}" if successor else "another process"
            self._broken = FencedError(
                f"{self._where} was taken over by {who} (owner epoch {row[0]}, ours is {self._owner.epoch}); "
                "this process must stop"
            )
            raise self._broken
        self.is_open = True

    def commit(self) -> None:
        """Payloads first: a committed row never points at bytes that a loss of power can take."""
        self._refuse_if_broken()
        try:
            with spans.span("commit"):
                self._payloads.sync()
                fault_point("payload_synced")
                self._connection.execute("COMMIT")
            fault_point("committed")
        except (OSError, sqlite3.Error) as error:
            self._break(error)
            raise self._broken_error() from error
        self.is_open = False
        self.num_commits += 1

    def rollback(self) -> None:
        self.is_open = False
        if self._connection.in_transaction:  # SQLite may have rolled back by itself
            self._connection.execute("ROLLBACK")

    def _undo(self, error: BaseException, *, is_own: bool) -> None:
        if isinstance(error, (OSError, sqlite3.OperationalError)):
            self._break(error)
            raise self._broken_error() from error
        if is_own:
            self.rollback()
        else:
            self._connection.execute("ROLLBACK TO one_call")
            self._connection.execute("RELEASE one_call")

    def _break(self, error: BaseException) -> None:
        self._broken = JournalError(
            f"{self._where} could not be written: {error}; what was acknowledged is safe. "
            "Make room or repair the disk, then `cauce resume`"
        )
        self.rollback()

    def _broken_error(self) -> JournalError:
        assert self._broken is not None
        return self._broken

    def _refuse_if_broken(self) -> None:
        if self._broken is not None:
            raise type(self._broken)(str(self._broken))
