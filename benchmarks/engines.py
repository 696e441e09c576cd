"""Workers whose work takes time and no arithmetic: the other side of a control plane that is measured.

Each rollout worker has slots, and works only inside a call, as a real one does: while its driver is busy it stands
still. So the rate at which answers come is that of engines, less what the driver costs them. Time is any clock's: the
machine's, or a virtual one. Workers of Ray may stand beside them, with the real `RolloutWorker.work` around the same
slots.
"""

import hashlib
import heapq
import math
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from cauce.rewards.reward import RewardResult
from cauce.runtime.roles import Epoch, RolloutWorker, WorkResult
from cauce.runtime.world import Call, Clock, Resources, Worker, Workers
from cauce.types import Batch, Completion, GenerationRequest, Group, Outcome, Row, ScoredBatch

SIGMA = 0.5  # of the logarithm of an answer's time
REWARD_S = 0.05
LEARN_S = 0.8  # one optimizer step
ROUNDING_S = 1e-6  # of a clock that counts from 1970: an event so near is due
QUICK_S = 0.01  # every other verb of the learner


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What the engines do."""

    slots: int = 8  # answers at the same time, per engine
    mean_s: float = 20.0  # of an answer in its slot
    tokens: int = 500  # of each answer
    learn_s: float = LEARN_S


class Slots:
    """An engine that makes answers in the time that a lognormal draw says. Its time is what it is given."""

    def __init__(self, load: Load, seed: int) -> None:
        self._load = load
        self._random = random.Random(seed)
        self._free = load.slots
        self._is_young = load.slots  # answers to begin in the middle of their time, as if it had run for ever
        self._ends: list[tuple[float, int, GenerationRequest, int, int]] = []  # when, order, request, index, version
        self._queue: deque[tuple[GenerationRequest, int]] = deque()
        self._open: Counter[int] = Counter()  # task -> answers
        self._made = 0
        self._clock = 0.0
        self.version = 0
        self.num_tokens = 0.0

    @property
    def is_idle(self) -> bool:
        return not self._ends and not self._queue

    def submit(self, request: GenerationRequest) -> None:
        self._queue.extend((request, index) for index in request.indices)
        self._open[request.task] += len(request.indices)

    def cancel(self, task: int) -> None:
        self._queue = deque(item for item in self._queue if item[0].task != task)
        kept = [item for item in self._ends if item[2].task != task]
        self._free += len(self._ends) - len(kept)
        heapq.heapify(kept)
        self._ends = kept
        self._open.pop(task, None)

    def progress(self) -> dict[int, int]:
        return dict.fromkeys(self._open, 1)

    def advance(self, seconds: float) -> list[Completion]:
        """The answers that end within so much time."""
        end = self._clock + seconds
        self._begin(self._clock)
        self.num_tokens += len(self._ends) * seconds * self._load.tokens / self._load.mean_s
        done = []
        while self._ends and self._ends[0][0] <= end:
            at, _, request, index, version = heapq.heappop(self._ends)
            done.append(answer_of(request, index, tokens=self._load.tokens, versions=(version, self.version)))
            self._open[request.task] -= 1
            if not self._open[request.task]:
                del self._open[request.task]
            self._free += 1
            self._begin(at)
        self._clock = end
        return done

    def _begin(self, at: float) -> None:
        while self._free and self._queue:
            request, index = self._queue.popleft()
            self._free -= 1
            self._made += 1
            heapq.heappush(self._ends, (at + self._draw(), self._made, request, index, self.version))

    def _draw(self) -> float:
        """A lognormal time. Of the first answers what is left of one that had begun earlier, so that the rate is the
        mean one from the start: a uniform share of a time drawn by length."""
        mu = math.log(self._load.mean_s) - SIGMA**2 / 2
        if self._is_young:
            self._is_young -= 1
            return self._random.random() * self._random.lognormvariate(mu + SIGMA**2, SIGMA)
        return self._random.lognormvariate(mu, SIGMA)


class SlotsWorker:
    """A rollout worker of this process; `work` says how long it takes instead of taking it."""

    def __init__(self, load: Load, seed: int, checksums: dict[tuple[str, int], str]) -> None:
        self._slots = Slots(load, seed)
        self._checksums = checksums
        self._epoch = Epoch()

    def work(
        self,
        *,
        epoch: int,
        version: int,
        requests: Sequence[GenerationRequest],
        cancel: Sequence[int],
        seconds: float,
        lineage: str,
    ) -> tuple[WorkResult, float]:
        self._epoch.check(epoch)
        slots = self._slots
        for task in cancel:
            slots.cancel(task)
        for request in requests:
            slots.submit(request)
        slots.version, before = version, slots.num_tokens
        done = slots.advance(seconds)
        result = WorkResult(
            completions=tuple(done),
            progress=slots.progress(),
            num_tokens=int(slots.num_tokens - before),
            busy_s=seconds,
            sync_s=0.0,
            version=version,
            checksum=self._checksums[lineage, version],
            is_idle=slots.is_idle,
        )
        return result, seconds


class RealSlotsWorker(RolloutWorker):
    """The real rollout worker, with its pulls of weights, in a process of its own, over the same slots."""

    def __init__(self, *, load: Load, seed: int, weights_folder: str, lineage: str) -> None:
        from cauce.weights.store import WeightStore

        self._engine: Any = _PacedEngine(Slots(load, seed))
        self._store = WeightStore(Path(weights_folder), keep=1)
        self._epoch = Epoch()
        self._checksum, self._version, self._lineage = "", -1, lineage


class _PacedEngine:
    """Slots that sleep, behind the methods of an engine."""

    STEP_S = 0.02

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self.submit, self.cancel, self.progress = slots.submit, slots.cancel, slots.progress
        self._last = 0.0

    @property
    def is_idle(self) -> bool:
        return self._slots.is_idle

    def load_state(self, tensors: Any, *, version: int, lineage: str) -> None:
        self._slots.version = version

    def status(self) -> dict[str, Any]:
        return {"sampled_tokens": int(self._slots.num_tokens)}

    def step(self) -> list[Completion]:
        began = time.perf_counter()
        time.sleep(self.STEP_S)
        return self._slots.advance(time.perf_counter() - began)


class HashLearner:
    """A learner whose weights are a hash of the tasks it was trained on; publishes through the real weight store."""

    def __init__(self, folder: Path, keep: int, checksums: dict[tuple[str, int], str]) -> None:
        from cauce.weights.store import WeightStore

        self._store = WeightStore(folder, keep=keep)
        self._keep = keep
        self._checksums = checksums
        self._weights = hashlib.sha256(b"initial weights").digest()
        self._steps = 0

    def score(self, *, groups: Sequence[Group], proximal: bool) -> ScoredBatch:
        logps = tuple(tuple(s.completion.logps for s in group.samples) for group in groups) if proximal else None
        return ScoredBatch(groups=tuple(groups), proximal_logps=logps, reference_logps=None)

    def forward_backward(self, *, batch: Batch) -> dict[str, float]:
        text = " ".join(str(s.group) for s in batch.sequences)
        self._weights = hashlib.sha256(self._weights + text.encode()).digest()
        return {"loss/total": 0.0, "sampler/log_ratio_abs_mean": 0.0}

    def optim_step(self) -> dict[str, float]:
        self._steps += 1
        return {"optim/skipped": 0.0, "optim/step": self._steps, "optim/grad_norm": 1.0}

    def checksum(self) -> str:
        return self._weights.hex()[:32]

    def publish(self, *, epoch: int, version: int, lineage: str) -> str:
        import torch

        tensor = torch.from_numpy(np.frombuffer(self._weights, dtype=np.uint8).copy())
        digest = self._store.publish({"weights": tensor}, version=version, lineage=lineage)
        self._checksums[lineage, version] = digest
        self._checksums.pop((lineage, version - 2 * self._keep), None)
        return digest

    def save_checkpoint(self, *, epoch: int, run_dir: str, plan: int) -> str:
        from cauce import checkpoint

        return str(checkpoint.save(Path(run_dir), plan=plan, learner=self))

    def save(self, folder: Path) -> None:
        (folder / "weights").write_bytes(self._weights)

    def save_model(self, *, folder: str) -> None:
        from cauce import checkpoint

        checkpoint.write_beside(Path(folder), self.save)

    def status(self) -> dict[str, Any]:
        return {"fingerprint": {"threads": "1"}}


class HashReward:
    """Half of all answers are right."""

    def score(self, *, rows: Sequence[Row], texts: Sequence[str], **_: Any) -> RewardResult:
        values = [float(index % 2) for index in range(len(texts))]
        outcomes = [Outcome(status="scored", value=value, parts={"half": value}, detail="") for value in values]
        return RewardResult(outcomes=outcomes, metrics={})

    def score_many(self, *, jobs: Sequence[dict[str, Any]]) -> list[RewardResult]:
        return [self.score(**job) for job in jobs]


@dataclass(slots=True)
class Measured:
    """Since it was last cleared."""

    turns: list[float] = field(default_factory=list)  # seconds of the driver's own work between two waits
    engines_s: float = 0.0  # of this process, in the simulated workers
    waits_s: float = 0.0
    real_calls: list[float] = field(default_factory=list)  # seconds from the call of a real worker to its result
    num_calls: int = 0


class TimedWorkers:
    """`Workers` of this process as events of a clock, with those of Ray beside them, if there are any."""

    def __init__(self, clock: Clock, load: Load, *, real: Workers | None = None, num_real: int = 0) -> None:
        self._clock, self._load = clock, load
        self._real, self._num_real = real, num_real
        self._events: list[tuple[float, int, Call]] = []
        self._num = 0
        self._left_wait = time.perf_counter()
        self._out_real: dict[Call, None] = {}
        self.checksums: dict[tuple[str, int], str] = {}
        self.measured = Measured()

    def start(self, cls: type, *, name: str, role: str, resources: Resources, kwargs: dict[str, Any]) -> Worker:
        number = int(name.rpartition("-")[2])
        if role == "rollout" and self._real is not None and number < self._num_real:
            given = {key: kwargs[key] for key in ("weights_folder", "lineage")}
            none = Resources(cpus=0, gpus=0, memory_bytes=None, threads=1)
            arguments = {"load": self._load, "seed": number, **given}
            return self._real.start(RealSlotsWorker, name=name, role="rollout", resources=none, kwargs=arguments)
        if role == "rollout":
            handle: Any = SlotsWorker(self._load, number, self.checksums)
        elif role == "learner":
            handle = HashLearner(Path(kwargs["weights_folder"]), kwargs["weights_keep"], self.checksums)
        else:
            handle = HashReward()
        return Worker(name=name, role=role, handle=handle, node="simulated")

    def call(self, worker: Worker, method: Callable[..., Any], **kwargs: Any) -> Call:
        self.measured.num_calls += 1
        if worker.node != "simulated":
            assert self._real is not None
            call = self._real.call(worker, method, **kwargs)
            self._out_real[call] = None
            return call
        began = time.perf_counter()
        name = method.__name__
        value = getattr(worker.handle, name)(**kwargs)
        if worker.role == "rollout":
            value, seconds = value
        elif worker.role == "learner":
            seconds = self._load.learn_s if name == "forward_backward" else QUICK_S
        else:
            seconds = REWARD_S * len(kwargs.get("jobs", "1"))
        now = self._clock.monotonic()
        call = Call(worker=worker, ref=value, started=now)
        self._num += 1
        heapq.heappush(self._events, (now + seconds, self._num, call))
        self.measured.engines_s += time.perf_counter() - began
        return call

    def wait(self, calls: Sequence[Call], *, timeout_s: float) -> list[Call]:
        entered = time.perf_counter()
        self.measured.turns.append(entered - self._left_wait)
        done: list[Call] = []
        deadline = self._clock.monotonic() + timeout_s
        while not done:
            now = self._clock.monotonic() + ROUNDING_S
            while self._events and self._events[0][0] <= now:
                done.append(heapq.heappop(self._events)[2])
            if now >= deadline:
                break
            until = min(self._events[0][0] if self._events else deadline, deadline)
            pause = 0.0 if done else max(0.0, until - now)
            if self._out_real:
                assert self._real is not None
                ready = self._real.wait(list(self._out_real), timeout_s=pause)
                for call in ready:
                    del self._out_real[call]
                    self.measured.real_calls.append(self._clock.monotonic() - call.started)
                done += ready
            elif not done:
                self._clock.sleep(pause + ROUNDING_S)
        self._left_wait = time.perf_counter()
        self.measured.waits_s += self._left_wait - entered
        return done

    def result(self, call: Call) -> Any:
        if call.worker.node != "simulated":
            assert self._real is not None
            return self._real.result(call)
        return call.ref

    def kill(self, worker: Worker) -> None:
        if worker.node != "simulated":
            assert self._real is not None
            self._real.kill(worker)

    def describe_death(self, worker: Worker, cause: str) -> str:
        return f"{worker.role} {worker.name} died: {cause}"


def answer_of(request: GenerationRequest, index: int, *, tokens: int, versions: tuple[int, int]) -> Completion:
    """An answer that begins under one version and ends under another."""
    first = (request.task * 31 + index * 7) % 30_000
    made_by = np.full(tokens, versions[1], dtype=np.int32)
    made_by[: tokens // 2] = versions[0]
    return Completion(
        task=request.task,
        index=index,
        attempt=request.attempt,
        token_ids=np.arange(first, first + tokens, dtype=np.int32),
        logps=np.full(tokens, -1.0, dtype=np.float32),
        versions=made_by,
        mask=np.ones(tokens, dtype=np.uint8),
        finish_reason="length",
    )
