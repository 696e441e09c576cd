"""Starting the workers of a pool, and starting one in place of a dead one: each pool has one of these, and nobody else
restarts anything.

Before a pool is up, a worker that cannot be started is an error at once. Later it counts as a death. After the second
death in a row comes a pause, jittered and growing, and after too many the run stops with the last cause.
"""

import math
import random
from collections.abc import Callable

from cauce.errors import CauceError, WorkerError
from cauce.runtime.world import Clock, Worker

BACKOFF_S = (0.5, 30.0)
DEATHS_IN_A_ROW = 6

Note = Callable[[str, dict[str, str]], None]


class Restarts:
    """Names workers, starts them, and counts the deaths since the last sign of success."""

    def __init__(self, start: Callable[[str], Worker], *, role: str, clock: Clock, seed: int, note: Note) -> None:
        self._start = start
        self._role = role
        self._clock = clock
        self._note = note
        self._random = random.Random(seed)
        self._names = 0
        self._deaths = 0
        self._retry_at = -math.inf
        self.is_up = False  # to be set once the pool has its first workers

    @property
    def may_start(self) -> bool:
        """False during the pause before a replacement."""
        return self._clock.monotonic() >= self._retry_at

    def start(self) -> Worker | None:
        """The next worker; None where a replacement could not be started, which a pause follows."""
        name = f"{self._role}-{self._names}"
        self._names += 1
        try:
            worker = self._start(name)
        except CauceError as error:
            if not self.is_up:
                raise
            self.count_death(name, str(error))
            return None
        if self.is_up:
            self._note("worker_started", {"worker": name})
        return worker

    def count_death(self, name: str, cause: str) -> None:
        """
        Raises:
            WorkerError: after too many in a row.
        """
        self._deaths += 1
        self.note_death(name, cause)
        if self._deaths >= DEATHS_IN_A_ROW:
            raise WorkerError(
                f"{self._deaths} {self._role} workers in a row died or could not be started, without one result in "
                f"between; the last: {cause}"
            )
        low, high = BACKOFF_S
        pause = min(high, low * 2 ** (self._deaths - 1)) * self._random.uniform(0.5, 1.5)
        self._retry_at = self._clock.monotonic() + (pause if self._deaths > 1 else 0.0)

    def note_death(self, name: str, cause: str) -> None:
        """For people and the record; it counts towards nothing."""
        self._note("worker_died", {"worker": name, "cause": cause})

    def forget_deaths(self) -> None:
        """Work came back: what died before it is history."""
        self._deaths = 0
