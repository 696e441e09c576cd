"""The tables of the journal, and how a connection to them is opened.

One SQLite file in WAL mode with `synchronous=FULL`: a commit that returned survives a loss of power. Arrays
are not here; the database holds the place of their record in a payload file. Only the driver writes; see
owner.py for how a second one is kept out, and store.py for the operations.
"""

import re
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from cauce.errors import JournalError
from cauce.journal.locking import busy_timeout_s, held_error, is_busy
from cauce.journal.owner import Locking, this_process

FORMAT_VERSION = 1  # raise it with every change to the tables below or to the payload record
DATABASE_NAME = "journal.db"

# Keys of `meta` that the journal itself keeps; callers add their own beside them.
OWN_META_KEYS = ("format_version", "owner_epoch", "owner")

SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;

CREATE TABLE task (
    id INTEGER PRIMARY KEY,            -- admission number, from 0 without gaps
    source TEXT NOT NULL,              -- "<data source>:<row index>"
    content_hash TEXT NOT NULL,
    row TEXT NOT NULL,                 -- the whole row as JSON: a resume or a replay needs no data file
    file TEXT NOT NULL,                -- where the prompt's token ids are
    offset INTEGER NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('pending', 'leased', 'ready', 'planned', 'trained', 'dropped')),
    attempts INTEGER NOT NULL DEFAULT 0,
    deaths INTEGER NOT NULL DEFAULT 0, -- attempts that ended with the death of their worker
    reason TEXT NOT NULL DEFAULT '',
    detail TEXT NOT NULL DEFAULT '',
    CHECK ((state = 'dropped') = (reason != ''))
);
CREATE INDEX task_state ON task (state);

CREATE TABLE lease (
    task INTEGER NOT NULL REFERENCES task (id),
    attempt INTEGER NOT NULL,
    worker TEXT NOT NULL,
    version INTEGER NOT NULL,
    indices TEXT NOT NULL,             -- JSON list of the sample indices asked for
    until REAL NOT NULL,               -- renewed by token progress
    end_reason TEXT,                   -- NULL while the lease lives
    PRIMARY KEY (task, attempt)
) WITHOUT ROWID;
CREATE UNIQUE INDEX lease_alive ON lease (task) WHERE end_reason IS NULL;

CREATE TABLE sample (
    task INTEGER NOT NULL REFERENCES task (id),
    idx INTEGER NOT NULL CHECK (idx >= 0),
    attempt INTEGER NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('generated', 'scored')),
    finish_reason TEXT NOT NULL,
    num_tokens INTEGER NOT NULL,
    min_version INTEGER NOT NULL,
    max_version INTEGER NOT NULL,
    file TEXT NOT NULL,
    offset INTEGER NOT NULL,
    status TEXT,                       -- of the outcome; NULL until the reward has answered
    value REAL,
    parts TEXT,                        -- JSON, per reward function
    detail TEXT,
    PRIMARY KEY (task, idx),
    CHECK ((state = 'scored') = (status IS NOT NULL)),
    CHECK (status IS NULL OR (status = 'scored') = (value IS NOT NULL))
) WITHOUT ROWID;

CREATE TABLE plan (
    number INTEGER PRIMARY KEY CHECK (number >= 1),
    state TEXT NOT NULL CHECK (state IN ('planned', 'applied', 'skipped')),
    mini_batches TEXT NOT NULL,        -- JSON list of lists of task ids, one per optimizer step
    checksum TEXT,                     -- of the weights after the plan
    metrics TEXT NOT NULL DEFAULT '{}',
    reason TEXT NOT NULL DEFAULT '',
    CHECK ((state = 'applied') = (checksum IS NOT NULL))
);

CREATE TABLE plan_use (
    plan INTEGER NOT NULL REFERENCES plan (number),
    position INTEGER NOT NULL,
    task INTEGER NOT NULL REFERENCES task (id),
    PRIMARY KEY (plan, position),
    UNIQUE (plan, task)
) WITHOUT ROWID;
CREATE INDEX plan_use_task ON plan_use (task);

CREATE TABLE checkpoint (
    plan INTEGER PRIMARY KEY,          -- 0 is the weights before the first plan
    path TEXT NOT NULL                 -- relative to the run folder where it lies inside
);

CREATE TABLE event (
    id INTEGER PRIMARY KEY,
    time REAL NOT NULL,
    kind TEXT NOT NULL,
    detail TEXT NOT NULL               -- JSON
);
"""


def connect_writer(run_dir: Path, *, locking: Locking = "shared") -> sqlite3.Connection:
    """A connection with the durability the protocol needs; transactions are begun and ended by hand."""
    timeout = busy_timeout_s(run_dir)
    connection = sqlite3.connect(
        run_dir / DATABASE_NAME, timeout=timeout, isolation_level=None, check_same_thread=False
    )
    try:
        if locking == "exclusive":  # before anything is read, so that no index in shared memory is made
            connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        mode = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
        if mode != "wal":
            raise JournalError(
                f"{run_dir / DATABASE_NAME}: SQLite answers journal mode {mode!r} instead of 'wal'; "
                "put the run folder (run.dir) on a local filesystem"
            )
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")
    except sqlite3.Error as error:
        connection.close()
        if is_busy(error):
            raise held_error(run_dir) from error
        raise JournalError(f"{run_dir / DATABASE_NAME} is not a journal, or is damaged: {error}") from error
    except BaseException:
        connection.close()
        raise
    return connection


def connect_reader(run_dir: Path) -> sqlite3.Connection:
    """A connection that cannot write, also beside a live owner and in a folder that may not be written."""
    uri = (run_dir / DATABASE_NAME).absolute().as_uri()
    connection = sqlite3.connect(
        f"{uri}?mode=ro", uri=True, timeout=busy_timeout_s(run_dir), isolation_level=None, check_same_thread=False
    )
    try:
        connection.execute("SELECT 1 FROM sqlite_master").fetchone()
    except sqlite3.OperationalError as error:
        if is_busy(error):
            connection.close()
            raise held_error(run_dir) from error
        # WAL needs its shared-memory file. In a read-only folder without one nobody can be writing either.
        connection.close()
        connection = sqlite3.connect(
            f"{uri}?mode=ro&immutable=1", uri=True, isolation_level=None, check_same_thread=False
        )
    except sqlite3.DatabaseError as error:
        connection.close()
        raise JournalError(f"{run_dir / DATABASE_NAME} is not a journal, or is damaged: {error}") from error
    return connection


def require_database(run_dir: Path) -> None:
    if not (run_dir / DATABASE_NAME).is_file():
        raise JournalError(
            f"{run_dir}: there is no {DATABASE_NAME} here, so this is not a run folder; "
            "name a folder that `cauce train` has written"
        )


def check_format(connection: sqlite3.Connection, run_dir: Path) -> None:
    """Refuse a file that is no journal, and one that a newer release has written."""
    try:
        found = connection.execute("SELECT value FROM meta WHERE key = 'format_version'").fetchone()
    except sqlite3.DatabaseError as error:
        raise JournalError(f"{run_dir / DATABASE_NAME} is not a journal, or is damaged: {error}") from error
    if found is None or not str(found[0]).isdigit():
        raise JournalError(f"{run_dir / DATABASE_NAME} names no format version; it is not a journal, or is damaged")
    if int(found[0]) > FORMAT_VERSION:
        raise JournalError(
            f"{run_dir / DATABASE_NAME} has format {found[0]}, and this release reads up to format "
            f"{FORMAT_VERSION}; install the release of Cauce that wrote it, or a later one"
        )


def create_tables(connection: sqlite3.Connection, meta: Mapping[str, str]) -> None:
    """All tables and the first meta in one commit: a crash leaves a whole journal or an empty file."""
    taken = sorted(set(meta) & set(OWN_META_KEYS))
    if taken:
        raise JournalError(f"meta {taken} belong to the journal; choose other keys")
    own = {"format_version": str(FORMAT_VERSION), "owner_epoch": "0", "owner": ""}
    with _one_commit(connection):
        for statement in re.sub("--.*", "", SCHEMA).split(";"):  # executescript would commit in between
            connection.execute(statement)
        connection.executemany("INSERT INTO meta VALUES (?, ?)", [*own.items(), *meta.items()])


def raise_epoch(connection: sqlite3.Connection) -> int:
    """Every owner has an epoch of its own; one that remembers an older number is fenced off."""
    with _one_commit(connection):
        epoch = 1 + int(connection.execute("SELECT value FROM meta WHERE key = 'owner_epoch'").fetchone()[0])
        values = {"owner_epoch": str(epoch), "owner": this_process(epoch=epoch).to_json()}
        connection.executemany("UPDATE meta SET value = ? WHERE key = ?", [(v, k) for k, v in values.items()])
    return epoch


@contextmanager
def _one_commit(connection: sqlite3.Connection) -> Iterator[None]:
    """For the writes of a start; everything later goes through commits.py."""
    try:
        connection.execute("BEGIN IMMEDIATE")
        yield
        connection.execute("COMMIT")
    except BaseException as error:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        if isinstance(error, sqlite3.OperationalError):
            raise JournalError(
                f"the journal could not be written at the start: {error}. Make room or repair the disk; what was "
                "recorded before is safe"
            ) from error
        raise


def plain(value: Any) -> Any:
    """SQLite binds no NumPy scalars, and ids often come out of arrays."""
    return value.item() if isinstance(value, np.generic) else value
