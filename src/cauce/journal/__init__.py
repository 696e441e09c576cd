"""The durable record of a run, and the policy of its buffer.

`Journal` is for the owner of a run, `Journal.read_only` for everyone else; `Buffer` and `capacity` decide
what is planned and admitted next, without touching a file. Nothing here imports torch or ray.
"""

from cauce.journal.buffer import Buffer, capacity
from cauce.journal.queries import Accepted, CheckpointRecord, EventRecord, JournalReader, Lease, PlanRecord
from cauce.journal.schema import FORMAT_VERSION
from cauce.journal.store import Journal

__all__ = [
    "FORMAT_VERSION",
    "Accepted",
    "Buffer",
    "CheckpointRecord",
    "EventRecord",
    "Journal",
    "JournalReader",
    "Lease",
    "PlanRecord",
    "capacity",
]
