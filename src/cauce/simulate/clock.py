"""Virtual time: it passes only while somebody waits, and then jumps to the next event.

Events of one time happen in the order in which they were planned. What they do is decided elsewhere.
"""

import heapq
from collections.abc import Callable

START = 1_700_000_000.0


def _ignore() -> None:
    return None


class VirtualClock:
    """A `Clock`. `on_wake` is called whenever the driver has waited, for whatever befalls it then."""

    def __init__(self) -> None:
        self.time = START
        self.on_wake: Callable[[], None] = _ignore
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._planned = 0

    def now(self) -> float:
        return self.time

    def monotonic(self) -> float:
        return self.time - START

    def sleep(self, seconds: float) -> None:
        self.advance(seconds, until=lambda: False)
        self.on_wake()

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        """Plans an event."""
        heapq.heappush(self._events, (self.time + seconds, self._planned, act))
        self._planned += 1

    def advance(self, seconds: float, *, until: Callable[[], bool]) -> None:
        """Lets events happen for so long, or until a condition holds."""
        deadline = self.time + seconds
        while not until():
            if not self._events or self._events[0][0] > deadline:
                self.time = max(self.time, deadline)
                return
            time, _, act = heapq.heappop(self._events)
            self.time = max(self.time, time)
            act()

    def pass_by(self, seconds: float) -> None:
        """Time that the driver itself takes: events that fall into it happen when it waits next."""
        self.time += seconds
