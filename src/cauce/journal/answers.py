"""Answers and their outcomes, as functions on the open transaction: two writes, and the first of each wins.

An answer is taken from any attempt that was leased, also from one that has ended meanwhile; once the group is
ready, or its task dropped, nothing in it changes any more.
"""

import math
import sqlite3

from cauce.errors import JournalError
from cauce.journal.encoding import to_json
from cauce.journal.payloads import PayloadWriter, encode_answer
from cauce.types import Completion, Outcome


def record_answer(db: sqlite3.Connection, payloads: PayloadWriter, answer: Completion) -> bool:
    task, index = int(answer.task), int(answer.index)
    found = db.execute("SELECT state, attempts FROM task WHERE id = ?", (task,)).fetchone()
    if found is None:
        raise JournalError(f"answer {task}[{index}]: task {task} was never admitted")
    state, attempts = found
    if answer.finish_reason == "aborted":
        raise JournalError(f"answer {task}[{index}] was aborted; only finished answers are recorded")
    if not 1 <= answer.attempt <= attempts:
        raise JournalError(
            f"answer {task}[{index}] names attempt {answer.attempt}, and {attempts} were leased; lease the "
            "task before it is sent out, and hand the lease's attempt on"
        )
    known = db.execute("SELECT 1 FROM sample WHERE task = ? AND idx = ?", (task, index)).fetchone()
    if known or state not in ("pending", "leased"):
        return False
    ref = payloads.append(encode_answer(answer))
    if len(answer.versions):
        oldest, newest = int(answer.versions.min()), int(answer.versions.max())
    else:  # an answer of no tokens is as old as its lease
        query = "SELECT version FROM lease WHERE task = ? AND attempt = ?"
        (oldest,) = (newest,) = db.execute(query, (task, int(answer.attempt))).fetchone()
    db.execute(
        "INSERT INTO sample (task, idx, attempt, state, finish_reason, num_tokens, min_version, max_version, "
        "file, offset) VALUES (?, ?, ?, 'generated', ?, ?, ?, ?, ?, ?)",
        (
            *(task, index, int(answer.attempt), answer.finish_reason, len(answer.token_ids)),
            *(oldest, newest, ref.file, ref.offset),
        ),
    )
    return True


def record_outcome(db: sqlite3.Connection, task: int, index: int, outcome: Outcome) -> bool:
    key = (int(task), int(index))
    name = f"outcome of {task}[{index}]"
    found = db.execute("SELECT state FROM sample WHERE task = ? AND idx = ?", key).fetchone()
    if found is None:
        raise JournalError(f"{name}: no such answer is recorded; record the answer before its outcome")
    if found[0] == "scored":
        return False
    value = None if outcome.value is None else float(outcome.value)
    if value is not None and not math.isfinite(value):
        raise JournalError(f"{name} is {value}; a score is finite, record the outcome as 'failed'")
    db.execute(
        "UPDATE sample SET state = 'scored', status = ?, value = ?, parts = ?, detail = ? WHERE task = ? AND idx = ?",
        (outcome.status, value, to_json(outcome.parts, what=name), outcome.detail, *key),
    )
    return True


def check_complete(db: sqlite3.Connection, task: int, *, group_size: str | None) -> None:
    """Raise unless the task is undecided and all answers of its group are recorded and scored."""
    found = db.execute("SELECT state FROM task WHERE id = ?", (int(task),)).fetchone()
    state = found[0] if found else "not admitted"
    rows = db.execute("SELECT idx, state FROM sample WHERE task = ? ORDER BY idx", (int(task),)).fetchall()
    wanted = len(rows) if group_size is None else int(group_size)
    unscored = [index for index, sample_state in rows if sample_state != "scored"]
    indices = [index for index, _ in rows]
    is_complete = bool(rows) and indices == list(range(wanted)) and not unscored
    if state not in ("pending", "leased") or not is_complete:
        raise JournalError(
            f"task {task} cannot be ready: it is {state}, has the answers {indices} of a group of "
            f"{group_size or 'at least 1'}, and no outcome for {unscored}; record all of them first"
        )
