"""The record of a fork: a copy of another run's record in which the plans after one number are open again.

Copied, not referred to: a fork can be resumed, replayed and read when its source was moved or deleted, and no
reader has to follow paths out of a run folder. Samples cost 13 bytes a token, little beside one checkpoint. The
plans up to the fork stay as they were applied; those after it wait as `planned`, with the groups they had, so that
training a fork is the finishing of recorded plans. A task in none of these plans ends here: a fork generates
nothing. The source is only read, and may be a run that goes on.

Left out: the weights that the fork begins with (stages/fork.py puts their checkpoint into the folder first).
"""

import json
import os
import shutil
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from cauce.durable import sync
from cauce.journal import schema
from cauce.journal.encoding import to_json
from cauce.journal.payloads import FOLDER_NAME

MiniBatches = Callable[[Sequence[int]], Sequence[Sequence[int]]]

# In this order; :at is the last plan that the fork keeps as it was, :until the last that it takes.
_STATEMENTS = """
DELETE FROM event;
DELETE FROM checkpoint;
DELETE FROM plan_use WHERE plan > :until;
DELETE FROM plan WHERE number > :until;
UPDATE plan SET state = 'planned', checksum = NULL, metrics = '{}', reason = '' WHERE number > :at;
UPDATE lease SET end_reason = 'the run was forked' WHERE end_reason IS NULL;
UPDATE task SET state = 'planned', reason = '', detail = '' WHERE id IN (SELECT task FROM plan_use WHERE plan > :at);
UPDATE task SET state = 'trained' WHERE state NOT IN ('dropped', 'trained')
    AND id NOT IN (SELECT task FROM plan_use WHERE plan > :at)
    AND id IN (SELECT task FROM plan_use JOIN plan ON number = plan WHERE plan.state = 'applied');
UPDATE task SET state = 'dropped', reason = 'run_complete', detail = 'in no plan of the fork' WHERE state != 'dropped'
    AND id NOT IN (SELECT task FROM plan_use WHERE plan > :at)
    AND id NOT IN (SELECT task FROM plan_use JOIN plan ON number = plan WHERE plan.state = 'applied');
DELETE FROM meta WHERE key IN ('fingerprint', 'owner')
"""


def fork_journal(
    source: Path,
    target: Path,
    *,
    at: int,
    until: int,
    meta: Mapping[str, str],
    event: Mapping[str, object],
    checkpoint: Path | None,
    mini_batches: MiniBatches | None = None,
    now: float,
) -> None:
    """Writes the journal of a fork into `target`; its database appears last and whole.

    Args:
        at: the last plan of the source that counts as applied.
        until: the last plan that the fork trains on; later ones are left out.
        meta: keys that differ from the source's.
        event: what the first event of the fork says.
        checkpoint: folder in `target` with the weights after plan `at`; None at plan 0.
        mini_batches: cuts the tasks of each open plan anew; None keeps them as recorded.
        now: the time of the event.
    """
    beside = target / f"{schema.DATABASE_NAME}.tmp"
    beside.unlink(missing_ok=True)
    reader, db = schema.connect_reader(source), sqlite3.connect(beside, isolation_level=None)
    try:
        schema.check_format(reader, source)
        reader.backup(db)  # one consistent state, also of a run that goes on
        db.execute("PRAGMA journal_mode = DELETE")  # the file alone is the database when it is renamed
        _copy_payloads(db, source, target)
        db.execute("BEGIN IMMEDIATE")
        for statement in _STATEMENTS.split(";"):
            db.execute(statement, {"at": at, "until": until})
        if mini_batches is not None:
            _cut_anew(db, mini_batches)
        if checkpoint is not None:
            db.execute("INSERT INTO checkpoint VALUES (?, ?)", (at, str(checkpoint.relative_to(target))))
        db.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", [("owner", ""), *meta.items()])
        text = to_json(dict(event), what="event 'forked'")
        db.execute("INSERT INTO event (time, kind, detail) VALUES (?, 'forked', ?)", (now, text))
        db.execute("COMMIT")
    finally:
        reader.close()
        db.close()
    with beside.open("rb") as file:
        os.fsync(file.fileno())
    beside.replace(target / schema.DATABASE_NAME)
    sync(target)


def _copy_payloads(db: sqlite3.Connection, source: Path, target: Path) -> None:
    """Whole files; what the source appended after the copied state is cut off when the fork is opened."""
    folder = target / FOLDER_NAME
    folder.mkdir(exist_ok=True)
    for (name,) in db.execute("SELECT file FROM task UNION SELECT file FROM sample").fetchall():
        shutil.copyfile(source / FOLDER_NAME / name, folder / name)
        with (folder / name).open("rb") as file:
            os.fsync(file.fileno())
    sync(folder)


def _cut_anew(db: sqlite3.Connection, mini_batches: MiniBatches) -> None:
    for (number,) in db.execute("SELECT number FROM plan WHERE state = 'planned' ORDER BY number").fetchall():
        rows = db.execute("SELECT task FROM plan_use WHERE plan = ? ORDER BY position", (number,)).fetchall()
        text = json.dumps([list(batch) for batch in mini_batches([task for (task,) in rows])])
        db.execute("UPDATE plan SET mini_batches = ? WHERE number = ?", (text, number))
