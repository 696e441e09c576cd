"""Rewards in processes of their own.

A worker gets one group at a time, so its clock starts when work starts and never counts a queue. One that is stuck is
killed and replaced, and its group ends `timed_out`; one that dies ends its group `failed`. Neither is ever a number.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cauce.runtime.roles import RewardWorker
from cauce.runtime.world import Call, Clock, Worker, WorkerDied, Workers
from cauce.types import Outcome, Row


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreJob:
    """One complete group to score. `key` is the task's id; evaluation uses negative ones."""

    key: int
    row: Row
    texts: tuple[str, ...]
    token_ids: tuple[tuple[int, ...], ...]
    step: int
    max_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredJob:
    job: ScoreJob
    outcomes: tuple[Outcome, ...]
    metrics: dict[str, float]


class RewardPool:
    """`size` reward workers and a queue before them."""

    def __init__(
        self, workers: Workers, *, start: Callable[[str], Worker], size: int, clock: Clock, timeout_s: float
    ) -> None:
        self._workers = workers
        self._start = start
        self._clock = clock
        self._timeout_s = timeout_s
        self._idle: list[Worker] = []
        self._size = size
        self._names = 0
        self._queue: deque[ScoreJob] = deque()
        self._running: list[tuple[Call, ScoreJob]] = []

    def submit(self, job: ScoreJob) -> None:
        self._queue.append(job)

    def calls(self) -> list[Call]:
        """Starts what can start and returns the calls that are out."""
        while self._queue and (self._idle or len(self._running) < self._size):
            worker = self._idle.pop() if self._idle else self._new()
            job = self._queue.popleft()
            call = self._workers.call(
                worker,
                RewardWorker.score,
                rows=(job.row,) * len(job.texts),
                texts=job.texts,
                token_ids=job.token_ids,
                step=job.step,
                max_steps=job.max_steps,
            )
            self._running.append((call, job))
        return [call for call, _ in self._running]

    def take(self, done: Sequence[Call]) -> list[ScoredJob]:
        """Collects finished jobs and ends those that ran out of time."""
        scored, still = [], []
        for call, job in self._running:
            if call in done:
                scored.append(self._collect(call, job))
            elif self._clock.now() - call.started > self._timeout_s:
                self._workers.kill(call.worker)
                text = f"the reward did not return within reward.timeout_s={self._timeout_s:g}"
                scored.append(_without_number(job, status="timed_out", detail=text))
            else:
                still.append((call, job))
        self._running = still
        return scored

    def is_idle(self) -> bool:
        return not self._queue and not self._running

    def warm_up(self) -> None:
        """Starts the workers before the first answer needs one."""
        while len(self._idle) + len(self._running) < self._size:
            self._idle.append(self._new())

    def waiting_for(self) -> list[str]:
        return [f"{call.worker.name} scores task {job.key}" for call, job in self._running]

    def members(self) -> list[Worker]:
        return self._idle + [call.worker for call, _ in self._running]

    def shutdown(self) -> None:
        for worker in self.members():
            self._workers.kill(worker)
        self._idle, self._running = [], []

    def _new(self) -> Worker:
        self._names += 1
        return self._start(f"reward-{self._names - 1}")

    def _collect(self, call: Call, job: ScoreJob) -> ScoredJob:
        try:
            result = self._workers.result(call)
        except WorkerDied as death:
            return _without_number(job, status="failed", detail=str(death).splitlines()[0])
        self._idle.append(call.worker)
        return ScoredJob(job=job, outcomes=tuple(result.outcomes), metrics=dict(result.metrics))


def _without_number(job: ScoreJob, *, status: str, detail: str) -> ScoredJob:
    outcome = Outcome(status=status, value=None, parts={}, detail=detail)  # type: ignore[arg-type]
    return ScoredJob(job=job, outcomes=(outcome,) * len(job.texts), metrics={})
