"""Rules of plans, as functions on the open transaction: what may be planned, and how a task ends.

A use of a task is a row of a plan, whatever becomes of the plan, so that no sequence of crashes and skips can
use a task more than `max_reuse` times. When its plan is decided a task

    stays `planned`    while another open plan uses it, or while it has uses left;
    ends `trained`     when its uses are exhausted, or it is finished early, and an applied plan has used it;
    ends `dropped`     as non_finite, when a skipped plan was all that ever used it.
"""

import sqlite3
from collections import Counter

from cauce.errors import JournalError
from cauce.types import Plan


def check_plan(db: sqlite3.Connection, plan: Plan, *, max_reuse: int) -> None:
    """Raise unless the plan continues the sequence and every task in it may be used once more."""
    name = f"plan {plan.number}"
    (last,) = db.execute("SELECT COALESCE(MAX(number), 0) FROM plan").fetchone()
    if plan.number != last + 1:
        raise JournalError(f"{name} cannot follow plan {last}: plans are contiguous, the next one is {last + 1}")
    repeated = [task for task, count in Counter(plan.tasks).items() if count > 1]
    if repeated or not plan.tasks:
        raise JournalError(f"{name} must hold distinct tasks, at least one; repeated: {repeated}")
    in_batches = {task for batch in plan.mini_batches for task in batch}
    if in_batches != set(plan.tasks):
        raise JournalError(
            f"{name}: its mini_batches hold the tasks {sorted(in_batches)} and its tasks are "
            f"{sorted(plan.tasks)}; both must be the same set"
        )
    for task in plan.tasks:
        row = db.execute("SELECT state FROM task WHERE id = ?", (int(task),)).fetchone()
        state = row[0] if row else "not admitted"
        if state not in ("ready", "planned"):
            raise JournalError(f"{name}: task {task} is {state}; only ready tasks, or ones with uses left, are planned")
        uses = sum(uses_by_state(db, task).values())
        if uses >= max_reuse:
            raise JournalError(
                f"{name}: task {task} was used {uses} times and max_reuse is {max_reuse}; plan another task"
            )


def first_open_plan(db: sqlite3.Connection) -> int | None:
    row = db.execute("SELECT MIN(number) FROM plan WHERE state = 'planned'").fetchone()
    return None if row[0] is None else int(row[0])


def check_decides_next(db: sqlite3.Connection, number: int) -> list[int]:
    """The tasks of the plan, if it is the lowest open one; plans are decided in order."""
    # Plans are decided in order, so an open one is the lowest if the one before it is not open.
    query = "SELECT number, state FROM plan WHERE number IN (?, ?)"
    around = dict(db.execute(query, (number - 1, number)).fetchall())
    if around.get(number) != "planned" or around.get(number - 1) == "planned":
        lowest = first_open_plan(db)
        state = db.execute("SELECT state FROM plan WHERE number = ?", (number,)).fetchone()
        what = f"it is {state[0]}" if state else "there is no such plan"
        expected = f"the plan to decide now is {lowest}" if lowest is not None else "no plan is open"
        raise JournalError(f"plan {number} cannot be decided: {what}, and {expected}")
    return [row[0] for row in db.execute("SELECT task FROM plan_use WHERE plan = ? ORDER BY position", (number,))]


def settle(db: sqlite3.Connection, task: int, *, max_reuse: int, is_finished: bool, reason: str) -> None:
    """Bring a task of a plan that was just decided into its state; see the module's docstring."""
    uses = uses_by_state(db, task)
    if uses["planned"] or not (is_finished or sum(uses.values()) >= max_reuse):
        return
    if uses["applied"]:
        db.execute("UPDATE task SET state = 'trained' WHERE id = ?", (task,))
    else:
        end_dropped(db, task, reason="non_finite", detail=reason)


def uses_by_state(db: sqlite3.Connection, task: int) -> Counter[str]:
    query = """SELECT plan.state, COUNT(*) FROM plan_use JOIN plan ON plan.number = plan_use.plan
               WHERE plan_use.task = ? GROUP BY plan.state"""
    return Counter(dict(db.execute(query, (int(task),)).fetchall()))


def end_dropped(db: sqlite3.Connection, task: int, *, reason: str, detail: str) -> None:
    db.execute("UPDATE task SET state = 'dropped', reason = ?, detail = ? WHERE id = ?", (reason, detail, int(task)))
