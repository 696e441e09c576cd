"""How a run is watched: the trainer tells an `Observer` what happens and knows nothing of terminals or files.

The metrics file, TensorBoard and the live view are observers; `Observers` tells several of them.
An observer only listens: it never changes the run, and returns nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """What is known when a run starts. `cluster` is one line for people: whose Ray, with how many CPUs."""

    run_dir: Path
    recipe_name: str
    model: str
    num_plans: int
    algorithm: str
    cluster: str
    dashboard: str | None
    eval_tasks: int


class Observer(Protocol):
    """Told of a run in the order in which things happen, from the trainer's thread."""

    def on_start(self, info: RunInfo) -> None:
        """The run is about to do its first work."""

    def on_note(self, text: str) -> None:
        """Something a person should read, once: a choice that was made, a death, a warning."""

    def on_phase(self, name: str, done: int, total: int) -> None:
        """Work of one kind has got so far, for example ("generate", 37, 64)."""

    def on_plan(self, plan: int, metrics: Mapping[str, float]) -> None:
        """A plan was applied or skipped; these are its numbers."""

    def on_eval(self, plan: int, name: str, accuracy: float) -> None:
        """The weights after `plan` (0: before training) were evaluated on the set `name`."""

    def on_end(self, summary: Mapping[str, Any]) -> None:
        """The run ended, well or not; this is what summary.json holds."""


class NullObserver:
    """Listens to nothing. Observers that care for a few of the calls build on it."""

    def on_start(self, info: RunInfo) -> None:
        pass

    def on_note(self, text: str) -> None:
        pass

    def on_phase(self, name: str, done: int, total: int) -> None:
        pass

    def on_plan(self, plan: int, metrics: Mapping[str, float]) -> None:
        pass

    def on_eval(self, plan: int, name: str, accuracy: float) -> None:
        pass

    def on_end(self, summary: Mapping[str, Any]) -> None:
        pass


class Observers:
    """Tells each of its observers, in the order given."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = tuple(observers)

    def on_start(self, info: RunInfo) -> None:
        for observer in self._observers:
            observer.on_start(info)

    def on_note(self, text: str) -> None:
        for observer in self._observers:
            observer.on_note(text)

    def on_phase(self, name: str, done: int, total: int) -> None:
        for observer in self._observers:
            observer.on_phase(name, done, total)

    def on_plan(self, plan: int, metrics: Mapping[str, float]) -> None:
        for observer in self._observers:
            observer.on_plan(plan, metrics)

    def on_eval(self, plan: int, name: str, accuracy: float) -> None:
        for observer in self._observers:
            observer.on_eval(plan, name, accuracy)

    def on_end(self, summary: Mapping[str, Any]) -> None:
        for observer in self._observers:
            observer.on_end(summary)
