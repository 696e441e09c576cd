"""The interfaces through which the control plane meets the world: a clock and workers.

Trainer, pool and flow know only these, so that a test can run them with plain objects in one process, and a simulator
can fix every delay and fault from one seed. Ray stands behind `Workers` in production (`ray_workers.py`); files are
`pathlib` paths inside the run folder.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from cauce.errors import WorkerError


class WorkerDied(WorkerError):
    """The process behind a worker is gone, or cannot be reached. The text carries the cause where one is known."""


@dataclass(slots=True, kw_only=True, eq=False)
class Worker:
    """One process that runs a plain class: its name, its role, and whatever the implementation needs to reach it."""

    name: str
    role: str  # rollout, learner or reward
    handle: Any
    pid: int = 0
    node: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True, eq=False)
class Call:
    """A method of a worker that has been asked for. `ref` belongs to the implementation."""

    worker: Worker
    ref: Any
    started: float


class Clock(Protocol):
    """Seconds since the epoch, seconds that never go back, and a pause."""

    def now(self) -> float: ...

    def monotonic(self) -> float: ...

    def sleep(self, seconds: float) -> None: ...


class Workers(Protocol):
    """Starts workers, calls them and learns of their deaths.

    `call` names the method by the function itself (`workers.call(w, RolloutWorker.poll, seconds=1)`), so that a
    reader and a type checker can follow it.
    """

    def start(self, cls: type, *, name: str, role: str, resources: "Resources", kwargs: dict[str, Any]) -> Worker: ...

    def call(self, worker: Worker, method: Callable[..., Any], **kwargs: Any) -> Call: ...

    def wait(self, calls: Sequence[Call], *, timeout_s: float) -> list[Call]: ...

    def result(self, call: Call) -> Any:
        """The value, the method's own exception, or WorkerDied."""
        ...

    def kill(self, worker: Worker) -> None: ...

    def describe_death(self, worker: Worker, cause: str) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What Ray reserves for one worker, and how many threads its numerics use."""

    cpus: float
    gpus: float
    memory_bytes: int | None
    threads: int


class SystemClock:
    """The machine's clock."""

    def now(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class LocalWorkers:
    """Workers as plain objects in this process: no isolation, no parallelism; for tests and for one-process use."""

    def start(self, cls: type, *, name: str, role: str, resources: Resources, kwargs: dict[str, Any]) -> Worker:
        return Worker(name=name, role=role, handle=cls(**kwargs), node="here")

    def call(self, worker: Worker, method: Callable[..., Any], **kwargs: Any) -> Call:
        return Call(worker=worker, ref=(method, kwargs), started=time.time())

    def wait(self, calls: Sequence[Call], *, timeout_s: float) -> list[Call]:
        return list(calls)

    def result(self, call: Call) -> Any:
        if call.worker.handle is None:
            raise WorkerDied(f"{call.worker.name} was killed")
        method, kwargs = call.ref
        return getattr(call.worker.handle, method.__name__)(**kwargs)

    def kill(self, worker: Worker) -> None:
        worker.handle = None

    def describe_death(self, worker: Worker, cause: str) -> str:
        return f"{worker.role} {worker.name} died: {cause}"
