"""Leases, as functions on the open transaction: who makes which answers of a task, and until when.

A task has one living lease at most. Ended ones stay as its history; only the death of a worker counts towards
poison, an expired or returned lease does not.
"""

import json
import sqlite3
from collections.abc import Sequence

from cauce.errors import JournalError


def begin(db: sqlite3.Connection, task: int, *, indices: Sequence[int], worker: str, version: int, until: float) -> int:
    """Lease a pending task for answers that it lacks; returns the number of the attempt, from 1."""
    found = db.execute("SELECT state, attempts FROM task WHERE id = ?", (int(task),)).fetchone()
    state, attempts = found or ("not admitted", 0)
    if state != "pending":
        raise JournalError(f"task {task} cannot be leased to {worker}: it is {state}, and must be pending")
    wanted = [int(index) for index in indices]
    recorded = {row[0] for row in db.execute("SELECT idx FROM sample WHERE task = ?", (int(task),))}
    if not wanted or min(wanted) < 0 or len(set(wanted)) < len(wanted) or recorded & set(wanted):
        raise JournalError(
            f"task {task} cannot be leased for the answers {wanted}: lease at least one, each once, and none "
            f"of {sorted(recorded)}, which are recorded already"
        )
    attempt = int(attempts) + 1
    db.execute("UPDATE task SET state = 'leased', attempts = ? WHERE id = ?", (attempt, int(task)))
    db.execute(
        "INSERT INTO lease (task, attempt, worker, version, indices, until) VALUES (?, ?, ?, ?, ?, ?)",
        (int(task), attempt, worker, int(version), json.dumps(wanted), float(until)),
    )
    return attempt


def renew(db: sqlite3.Connection, task: int, *, until: float) -> bool:
    query = "UPDATE lease SET until = ? WHERE task = ? AND end_reason IS NULL"
    return db.execute(query, (float(until), int(task))).rowcount == 1


def end(db: sqlite3.Connection, task: int, reason: str) -> bool:
    """False where no lease of the task lives."""
    query = "UPDATE lease SET end_reason = ? WHERE task = ? AND end_reason IS NULL"
    return db.execute(query, (reason, int(task))).rowcount == 1


def release(db: sqlite3.Connection, task: int, *, counts_as_death: bool, reason: str) -> None:
    """End the living lease, if there is one, and make the task pending."""
    if end(db, task, reason):
        db.execute(
            "UPDATE task SET state = 'pending', deaths = deaths + ? WHERE id = ? AND state = 'leased'",
            (int(counts_as_death), int(task)),
        )
