"""Rewards in processes of their own.

A worker's clock starts when work starts and never counts a queue. It gets one group at a time, or, where more groups
wait than workers are free, a bundle of them in one call, with as many times the limit. What goes wrong with a bundle
is found out group by group: each is scored again alone, and only there

    stuck beyond the limit   the worker is killed and replaced, and the group ends `timed_out`;
    its worker dies          it is tried twice more, each time on a new worker, and then ends `failed`.

Neither is ever a number. A worker that cannot be started in place of another is a death by the rules of restarts.py;
one that dies at a group is not counted there, since its group answers for it.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cauce.runtime.restarts import Restarts
from cauce.runtime.roles import RewardWorker
from cauce.runtime.world import Call, Clock, Worker, WorkerDied, Workers
from cauce.types import Outcome, Row

MAX_BUNDLE = 8  # groups in one call; a stuck one among them is found after so many times the limit
MAX_DEATHS = 3  # of workers at one group alone


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


@dataclass(slots=True, eq=False)
class _Entry:
    job: ScoreJob
    alone: bool = False  # it was in a bundle that went wrong, or a worker died at it
    deaths: int = 0


class RewardPool:
    """`size` reward workers and a queue before them."""

    def __init__(
        self,
        workers: Workers,
        *,
        restarts: Restarts,
        size: int,
        clock: Clock,
        timeout_s: float,
        what: str = "the reward",
    ) -> None:
        self._workers = workers
        self._restarts = restarts
        self._clock = clock
        self._timeout_s = timeout_s
        self._what = what  # it scores with, for a failure
        self._idle: list[Worker] = []
        self._size = size
        self._queue: deque[_Entry] = deque()
        self._running: list[tuple[Call, list[_Entry]]] = []

    def submit(self, job: ScoreJob) -> None:
        self._queue.append(_Entry(job))

    def calls(self) -> list[Call]:
        """Starts what can start and returns the calls that are out."""
        while self._queue and len(self._running) < self._size:
            worker = self._worker(fresh=self._queue[0].deaths > 0)
            if worker is None:  # in the pause before a replacement
                break
            entries = self._next_entries()
            if len(entries) == 1:
                call = self._workers.call(worker, RewardWorker.score, **_arguments(entries[0].job))
            else:
                jobs = [_arguments(entry.job) for entry in entries]
                call = self._workers.call(worker, RewardWorker.score_many, jobs=jobs)
            self._running.append((call, entries))
        return [call for call, _ in self._running]

    def take(self, done: Sequence[Call]) -> list[ScoredJob]:
        """Collects finished jobs and ends those that ran out of time."""
        scored: list[ScoredJob] = []
        answered = set(done)
        running, self._running = self._running, []
        for call, entries in running:
            if call in answered:
                scored += self._collect(call, entries)
            elif self._clock.monotonic() - call.started > self._timeout_s * len(entries):
                self._workers.kill(call.worker)
                scored += self._time_out(entries)
            else:
                self._running.append((call, entries))
        return scored

    def is_idle(self) -> bool:
        return not self._queue and not self._running

    def warm_up(self) -> None:
        """Starts the workers before the first answer needs one."""
        while len(self._idle) + len(self._running) < self._size and (worker := self._restarts.start()):
            self._idle.append(worker)
        self._restarts.is_up = True

    def waiting_for(self) -> list[str]:
        keys = {call.worker.name: ", ".join(str(e.job.key) for e in entries) for call, entries in self._running}
        return [f"{name} scores task {text}" for name, text in keys.items()]

    def members(self) -> list[Worker]:
        return self._idle + [call.worker for call, _ in self._running]

    def shutdown(self) -> None:
        for worker in self.members():
            self._workers.kill(worker)
        self._idle, self._running = [], []

    def _worker(self, *, fresh: bool) -> Worker | None:
        """An idle worker or a new one. After a death a new one in any case: what idles may have died as well."""
        if self._idle and not fresh:
            return self._idle.pop()
        if not self._restarts.may_start:
            return None
        if self._idle and len(self._idle) + len(self._running) >= self._size:
            self._workers.kill(self._idle.pop())
        worker = self._restarts.start()
        self._restarts.is_up = True
        return worker

    def _next_entries(self) -> list[_Entry]:
        """The next group, or an even share of those that wait if they outnumber the free workers."""
        entries = [self._queue.popleft()]
        free = max(1, self._size - len(self._running))
        share = min(MAX_BUNDLE, -(-(len(self._queue) + 1) // free))
        while not entries[0].alone and len(entries) < share and not self._queue[0].alone:
            entries.append(self._queue.popleft())
        return entries

    def _collect(self, call: Call, entries: list[_Entry]) -> list[ScoredJob]:
        try:
            result = self._workers.result(call)
        except WorkerDied as death:
            self._restarts.note_death(call.worker.name, str(death))
            return self._bury(entries, str(death).splitlines()[0])
        self._restarts.forget_deaths()
        self._idle.append(call.worker)
        results: list[Any] = [result] if len(entries) == 1 else list(result)
        return [
            ScoredJob(job=entry.job, outcomes=tuple(each.outcomes), metrics=dict(each.metrics))
            for entry, each in zip(entries, results, strict=True)
        ]

    def _bury(self, entries: list[_Entry], cause: str) -> list[ScoredJob]:
        if len(entries) > 1:
            self._retry_alone(entries)
            return []
        (entry,) = entries
        entry.deaths += 1
        if entry.deaths >= MAX_DEATHS:
            detail = f"{self._what} ended its process {entry.deaths} times; the last: {cause}"
            return [_without_number(entry.job, status="failed", detail=detail)]
        self._retry_alone(entries)
        return []

    def _time_out(self, entries: list[_Entry]) -> list[ScoredJob]:
        if len(entries) > 1:
            self._retry_alone(entries)
            return []
        text = f"{self._what} did not return within reward.timeout_s={self._timeout_s:g}"
        return [_without_number(entries[0].job, status="timed_out", detail=text)]

    def _retry_alone(self, entries: list[_Entry]) -> None:
        for entry in reversed(entries):
            entry.alone = True
            self._queue.appendleft(entry)


def _arguments(job: ScoreJob) -> dict[str, Any]:
    return {
        "rows": (job.row,) * len(job.texts),
        "texts": job.texts,
        "token_ids": job.token_ids,
        "step": job.step,
        "max_steps": job.max_steps,
    }


def _without_number(job: ScoreJob, *, status: str, detail: str) -> ScoredJob:
    outcome = Outcome(status=status, value=None, parts={}, detail=detail)  # type: ignore[arg-type]
    return ScoredJob(job=job, outcomes=(outcome,) * len(job.texts), metrics={})
