"""Small real classes that stand in for time and for processes; nothing here pretends to compute."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from cauce.runtime.roles import WorkResult
from cauce.runtime.world import Call, Resources, Worker, WorkerDied
from cauce.types import Completion, FinishReason, GenerationRequest, Sampling

ROOM = Resources(cpus=1, gpus=0, memory_bytes=None, threads=1)
GREEDY = Sampling(max_tokens=4, temperature=1.0, stop_token_ids=(0,), seed=0)


class FakeClock:
    """Time that passes only when told to, or when somebody sleeps."""

    def __init__(self) -> None:
        self.time = 1000.0

    def now(self) -> float:
        return self.time

    def monotonic(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds


class ScriptedRollout:
    """Answers each request on its next call, unless its script says die, wait, abort or cut (the first answer of a
    task ends by length) at that call."""

    def __init__(self, script: Sequence[str] = ()) -> None:
        self.script = list(script)
        self.requests: list[GenerationRequest] = []
        self.versions: list[int] = []
        self.cancelled: list[int] = []

    def work(
        self,
        *,
        epoch: int,
        version: int,
        requests: Sequence[GenerationRequest],
        cancel: Sequence[int],
        seconds: float,
        lineage: str,
    ) -> WorkResult:
        self.requests += requests
        self.versions.append(version)
        self.cancelled += cancel
        act = self.script.pop(0) if self.script else "answer"
        if act == "die":
            raise WorkerDied("scripted death")
        done = [completion(r.task, i, version=version) for r in self.requests for i in r.indices]
        done = [] if act == "wait" else done
        if act == "abort":
            done = [completion(c.task, c.index, version=version, tokens=(), finish_reason="aborted") for c in done]
        if act == "cut":
            done = [replace(c, finish_reason="length") if c.index == 0 else c for c in done]
        self.requests = self.requests if act == "wait" else []
        return WorkResult(
            completions=tuple(done),
            progress={r.task: 1 for r in self.requests},
            num_tokens=3 * len(done),
            busy_s=0.1,
            sync_s=0.0,
            version=version,
            checksum=f"content-{version}",
            is_idle=not self.requests,
        )


class ScriptedWorkers:
    """`Workers` over plain objects that a test makes; a call may be held back to look like a hang."""

    def __init__(self, make: Callable[[str], Any]) -> None:
        self.make = make
        self.started: list[str] = []
        self.killed: list[str] = []
        self.held: set[str] = set()

    def start(self, cls: type, *, name: str, role: str, resources: Resources, kwargs: dict[str, Any]) -> Worker:
        self.started.append(name)
        return Worker(name=name, role=role, handle=self.make(name), node="here")

    def call(self, worker: Worker, method: Callable[..., Any], **kwargs: Any) -> Call:
        return Call(worker=worker, ref=(method.__name__, kwargs), started=self.now())

    def wait(self, calls: Sequence[Call], *, timeout_s: float) -> list[Call]:
        return [call for call in calls if call.worker.name not in self.held]

    def result(self, call: Call) -> Any:
        name, kwargs = call.ref
        return getattr(call.worker.handle, name)(**kwargs)

    def kill(self, worker: Worker) -> None:
        self.killed.append(worker.name)

    def describe_death(self, worker: Worker, cause: str) -> str:
        return f"{worker.role} {worker.name} died: {cause}"

    now: Callable[[], float] = staticmethod(lambda: 0.0)


def completion(
    task: int,
    index: int,
    *,
    version: int = 0,
    tokens: Sequence[int] = (5, 6, 0),
    finish_reason: FinishReason = "stop",
) -> Completion:
    """A finished answer with plausible arrays."""
    n = len(tokens)
    return Completion(
        task=task,
        index=index,
        attempt=1,
        token_ids=np.asarray(tokens, dtype=np.int32),
        logps=np.full(n, -1.0, dtype=np.float32),
        versions=np.full(n, version, dtype=np.int32),
        mask=np.ones(n, dtype=np.uint8),
        finish_reason=finish_reason,
    )


def request(task: int, *, indices: Sequence[int] = (0, 1)) -> GenerationRequest:
    """A request for some answers to a task with a prompt of three tokens."""
    return GenerationRequest(
        task=task,
        attempt=1,
        indices=tuple(indices),
        prompt_ids=np.asarray([1, 2, 3], dtype=np.int32),
        sampling=GREEDY,
    )
