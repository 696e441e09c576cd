"""Named moments at which a test ends the process exactly there, as `kill -9` or a loss of power would.

    CAUCE_FAULT=<point>:<hit>:<marker file>     at the hit-th time this process gets to the point

Without the variable a point does nothing. With it, the marker file is made durable first and SIGKILL follows, so that
a test knows that its point was reached; a marker that is there already disarms the point, in every process of the run.
What happens after a death is not decided here, and no other code may ask whether a point is armed.
"""

import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

VARIABLE = "CAUCE_FAULT"

POINTS = {
    "run_folder_made": "a run's folder and recipe are there, no journal is",
    "journal_made": "the database is there, without a table",
    "lease_open": "a lease is written in a transaction that has not committed",
    "after_lease": "leases are durable, their requests have not left",
    "mid_decode": "an engine has made some tokens of an answer",
    "answers_arrived": "answers have come, none of them is recorded: not acknowledged",
    "answers_recorded": "answers are durable: acknowledged",
    "outcomes_arrived": "rewards have come, none of them is recorded",
    "outcomes_recorded": "outcomes are durable and their groups decided",
    "payload_file_made": "a payload file exists, its name is not durable",
    "payload_torn": "half of a record's bytes are written",
    "payload_written": "a record is written and not durable",
    "payload_synced": "records are durable, the rows that point at them are not committed",
    "committed": "a transaction is durable, its caller does not know it yet",
    "after_planned": "a plan is recorded, the learner has not seen it",
    "between_micro_batches": "one of several micro-batches has left its gradient",
    "between_optim_steps": "an optimizer step of a plan is taken, others may follow",
    "before_applied": "a plan is trained, and recorded as planned only",
    "after_applied": "a plan is recorded as applied, its weights are not published",
    "after_publish": "new weights are published",
    "checkpoint_begun": "the folder beside exists, without a file",
    "checkpoint_written": "its files are written and not durable",
    "checkpoint_synced": "its files are durable, under the name beside",
    "checkpoint_renamed": "it has its name, which is not durable",
    "checkpoint_saved": "it is durable and not recorded",
    "checkpoint_recorded": "it is recorded, older ones are still there",
    "checkpoint_pruned": "an older one is recorded no more and half removed",
    "before_finish": "all plans are applied and the model is saved, the run is not ended in the record",
}

_hits: Counter[str] = Counter()


def fault_point(name: str, *, last_act: Callable[[], object] | None = None) -> None:
    """Ends the process if this point is armed and reached; `last_act` is what it still does, such as half a write."""
    armed = os.environ.get(VARIABLE)
    if armed is None:
        return
    point, hit, marker = armed.split(":", 2)
    if point not in POINTS or name not in POINTS:
        raise ValueError(f"{VARIABLE}={armed!r} at point {name!r}: both must be among {', '.join(POINTS)}")
    if point != name or Path(marker).exists():
        return
    _hits[name] += 1
    if _hits[name] < int(hit):
        return
    if last_act is not None:
        last_act()
    descriptor = os.open(marker, os.O_WRONLY | os.O_CREAT, 0o644)
    os.write(descriptor, f"{name} in process {os.getpid()}\n".encode())
    os.fsync(descriptor)
    os.kill(os.getpid(), signal.SIGKILL)
