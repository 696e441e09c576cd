"""Which accepted groups the next plan takes: capacity, staleness, order and reuse.

A policy that touches no file. The buffer is a view of the journal (after a resume it is filled from
`JournalReader.accepted`); it counts tasks, not uses and not samples. `capacity` says how many more tasks may
be admitted.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from cauce.errors import JournalError
from cauce.journal.queries import Accepted

SamplingOrder = Literal["in_order", "random"]


def capacity(
    *,
    max_staleness: int,
    version: int,
    groups_per_plan: int,
    trained: int,
    planned: int,
    ready: int,
    running: int,
) -> int:
    """How many tasks may be admitted now so that none can become staler than `max_staleness`.

        (max_staleness + version + 1) * groups_per_plan - (trained + planned + ready + running)

    `running` are the pending and leased tasks. Dropped tasks leave the count, with one exception: the tasks
    of a skipped plan took the place of a version, so they count as trained (see `JournalReader.occupancy`).
    Negative where more is under way than the bound allows, after a lowered `max_staleness` for example.
    """
    return (max_staleness + version + 1) * groups_per_plan - (trained + planned + ready + running)


@dataclass(frozen=True, slots=True)
class _Entry:
    version: int
    uses: int


class Buffer:
    """Accepted groups with uses left.

    Args:
        num_draws: draws made so far, which is the number of the last plan; a random draw is a function of the
        seed,
            its number and the tasks held, so that a resumed run draws what the uninterrupted one would have
            drawn.
    """

    def __init__(
        self,
        capacity: int,
        *,
        max_reuse: int = 1,
        sampling: SamplingOrder = "in_order",
        seed: int = 0,
        num_draws: int = 0,
    ) -> None:
        if capacity < 1 or max_reuse < 1:
            raise ValueError(f"buffer: capacity {capacity} and max_reuse {max_reuse} must be at least 1")
        if sampling not in ("in_order", "random"):
            raise ValueError(f"buffer.sampling is {sampling!r}; use 'in_order' or 'random'")
        self.capacity = capacity
        self.max_reuse = max_reuse
        self.sampling = sampling
        self.num_draws = num_draws
        self._seed = seed
        self._entries: dict[int, _Entry] = {}

    @property
    def size(self) -> int:
        """Number of tasks held, however many uses they have left."""
        return len(self._entries)

    @property
    def tasks(self) -> tuple[int, ...]:
        """In order of admission."""
        return tuple(sorted(self._entries))

    def __contains__(self, task: int) -> bool:
        return task in self._entries

    def put(self, task: int, version: int, *, uses: int = 0) -> None:
        """Add a group whose oldest token is of `version`, and which plans have used `uses` times."""
        if task in self._entries:
            raise JournalError(f"task {task} is in the buffer already")
        if not 0 <= uses < self.max_reuse:
            raise JournalError(f"task {task} was used {uses} times and max_reuse is {self.max_reuse}; none is left")
        if self.size >= self.capacity:
            raise JournalError(
                f"task {task} does not fit: the buffer holds {self.size} tasks of {self.capacity}; admit no "
                "more tasks than `capacity` allows"
            )
        self._entries[int(task)] = _Entry(int(version), uses)

    def restore(self, accepted: Iterable[Accepted]) -> None:
        """Fill an empty buffer from the journal."""
        for group in accepted:
            self.put(group.task, group.version, uses=group.uses)

    def remove(self, task: int) -> None:
        """Forget a group that was dropped or finished early."""
        if task not in self._entries:
            raise JournalError(f"task {task} is not in the buffer")
        del self._entries[task]

    def available(self, *, version: int, max_staleness: int) -> tuple[int, ...]:
        """The tasks that a plan at this learner version may take, in order of admission."""
        return tuple(t for t in self.tasks if version - self._entries[t].version <= max_staleness)

    def stale(self, *, version: int, max_staleness: int) -> tuple[int, ...]:
        """The tasks that no plan may take any more: versions only rise."""
        return tuple(t for t in self.tasks if version - self._entries[t].version > max_staleness)

    def sample(self, num: int, *, version: int, max_staleness: int) -> tuple[int, ...]:
        """Take `num` distinct tasks for one plan, each for one use; a task without uses left leaves the
        buffer."""
        eligible = self.available(version=version, max_staleness=max_staleness)
        if not 1 <= num <= len(eligible):
            raise JournalError(
                f"buffer: {num} tasks asked for, and {len(eligible)} of {self.size} can be planned at "
                f"version {version} with max_staleness {max_staleness}; wait for more groups"
            )
        if self.sampling == "in_order":
            drawn = eligible[:num]
        else:
            rng = np.random.default_rng([self._seed % 2**64, self.num_draws])
            drawn = tuple(eligible[i] for i in rng.permutation(len(eligible))[:num].tolist())
        self.num_draws += 1
        for task in drawn:
            self._use(task)
        return drawn

    def _use(self, task: int) -> None:
        entry = self._entries[task]
        if entry.uses + 1 >= self.max_reuse:
            del self._entries[task]
        else:
            self._entries[task] = replace(entry, uses=entry.uses + 1)
