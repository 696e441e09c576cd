"""How many tasks are in which state, kept while they change: the trainer asks at every turn, and to count the tasks of
a long run anew takes longer than all else that a turn does.

A table of the owner's connection alone, in memory, filled at the start and kept by triggers: it takes part in every
transaction, so that it is rolled back with the rows it counts. A reader counts the rows.
"""

import sqlite3

COUNTS = "SELECT state, SUM(num) FROM task_count GROUP BY state"
DROPS = "SELECT reason, num FROM task_count WHERE state = 'dropped' AND num > 0"

_ONE_MORE = """INSERT INTO task_count VALUES (NEW.state, NEW.reason, 1)
               ON CONFLICT (state, reason) DO UPDATE SET num = num + 1;"""
_ONE_LESS = "UPDATE task_count SET num = num - 1 WHERE state = OLD.state AND reason = OLD.reason;"
_STATEMENTS = (
    "PRAGMA temp_store = MEMORY",
    """CREATE TEMP TABLE task_count (
        state TEXT NOT NULL, reason TEXT NOT NULL, num INTEGER NOT NULL, PRIMARY KEY (state, reason)
    ) WITHOUT ROWID""",
    "INSERT INTO task_count SELECT state, reason, COUNT(*) FROM task GROUP BY state, reason",
    f"CREATE TEMP TRIGGER task_came AFTER INSERT ON main.task BEGIN {_ONE_MORE} END",
    f"CREATE TEMP TRIGGER task_changed AFTER UPDATE OF state, reason ON main.task BEGIN {_ONE_LESS} {_ONE_MORE} END",
)


def install(connection: sqlite3.Connection) -> None:
    """Counts once, and from now on as rows change. To be called outside a transaction, once the tables are made."""
    for statement in _STATEMENTS:
        connection.execute(statement)
