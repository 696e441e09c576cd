"""What a process did when, for the timeline of a run: spans, counts and marks, told to whoever listens.

Nobody listens unless `logging.trace` is set, and then every call here is one comparison. A worker keeps what it
recorded until its next reply takes it along; the driver writes a file (metrics/trace.py). Times are `time.monotonic`,
which all processes of one Linux machine share.
"""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

now = time.monotonic

MAX_KEPT = 4096  # events of a worker between two replies; a slice of generation makes some tens


class Event(NamedTuple):
    """A span from `start` to `end`, a count (`args` holds the numbers) or a mark; `name` is also its lane."""

    kind: Literal["span", "count", "mark"]
    name: str
    start: float
    end: float
    args: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Reply:
    """What a traced call of a worker returns: the method's value, the call's own times, and what was recorded."""

    value: Any
    began: float
    ended: float
    events: tuple[Event, ...]


class Listener(Protocol):
    """Takes events; those of a worker come through `reply`."""

    def event(self, event: Event) -> None: ...

    def reply(self, actor: str, reply: Reply, *, sent: float, is_here: bool) -> None: ...

    def lost(self, actor: str, *, sent: float) -> None: ...


class Keeper:
    """Keeps the events of a worker until a reply takes them; the oldest go where there are too many."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque(maxlen=MAX_KEPT)

    def event(self, event: Event) -> None:
        self._events.append(event)

    def reply(self, actor: str, reply: Reply, *, sent: float, is_here: bool) -> None:
        """A worker calls no workers."""

    def lost(self, actor: str, *, sent: float) -> None:
        """A worker calls no workers."""

    def take(self) -> tuple[Event, ...]:
        events = tuple(self._events)
        self._events.clear()
        return events


_listener: Listener | None = None


def listen(listener: Listener | None) -> None:
    """From now on this process tells `listener`; None: nobody."""
    global _listener
    _listener = listener


def listener() -> Listener | None:
    return _listener


def record(name: str, start: float, end: float, **args: Any) -> None:
    """Something that took from `start` to `end`."""
    if _listener is not None:
        _listener.event(Event("span", name, start, end, args))


@contextmanager
def span(name: str, **args: Any) -> Iterator[None]:
    """Records what happens inside, also where it raises."""
    start = now()
    try:
        yield
    finally:
        record(name, start, now(), **args)


def count(name: str, **numbers: float) -> None:
    """Numbers as they are from now on."""
    if _listener is not None:
        moment = now()
        _listener.event(Event("count", name, moment, moment, numbers))


def mark(name: str, **args: Any) -> None:
    """Something that happened now."""
    if _listener is not None:
        moment = now()
        _listener.event(Event("mark", name, moment, moment, args))
