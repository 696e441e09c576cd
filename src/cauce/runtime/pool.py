"""The pool of rollout workers: hands requests out, collects answers, replaces what dies or hangs.

One call to `work` is out per worker at any time; new requests, cancellations and the version to serve travel with the
next one, so a worker that joins or rejoins needs nothing but its first call. The pool decides nothing about tasks: it
reports a lost request with its cause, and its owner leases the missing answers again. A request that may have killed a
worker can be given one for itself (`alone`). Dead ones are replaced by the rules of restarts.py.

A turn costs what happens in it, not what the pool has: it looks at workers that have something to do, at calls that are
done and at the oldest that is not, and finds the least loaded worker in a heap.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from cauce.errors import VersionGoneError
from cauce.runtime.restarts import Restarts
from cauce.runtime.roles import RolloutWorker, WorkResult
from cauce.runtime.world import Call, Clock, Worker, WorkerDied, Workers
from cauce.types import Completion, GenerationRequest

SLICE_S = 0.5  # how long a worker generates before it reports, if no answer ends sooner


@dataclass(slots=True, kw_only=True)
class Lost:
    """A request whose worker is gone, with the indices that had not come back."""

    request: GenerationRequest
    indices: tuple[int, ...]
    worker: str
    cause: str
    num_held: int  # tasks that the worker was at when it died, this one among them; 0: this one had not been sent yet


@dataclass(slots=True, kw_only=True)
class News:
    """What a turn of the pool brought."""

    completions: list[Completion] = field(default_factory=list)
    lost: list[Lost] = field(default_factory=list)
    progressed: set[int] = field(default_factory=set)  # tasks whose lease is renewed
    num_tokens: int = 0
    num_steps: int = 0
    busy_s: float = 0.0
    sync_s: float = 0.0
    checksums: dict[str, tuple[int, str]] = field(default_factory=dict)  # worker -> version, content it serves


@dataclass(slots=True, kw_only=True, eq=False)
class _Member:
    worker: Worker
    number: int  # in the order of starts
    waiting: list[GenerationRequest] = field(default_factory=list)  # not sent yet
    open: dict[tuple[int, int], GenerationRequest] = field(default_factory=dict)  # (task, index) not back yet
    cancel: list[int] = field(default_factory=list)
    call: Call | None = None
    sent: tuple[GenerationRequest, ...] = ()  # with the call
    asked: tuple[str, int] = ("", -1)  # lineage and version that the call asks for


class RolloutPool:
    """A fixed number of rollout workers, kept alive."""

    def __init__(
        self,
        workers: Workers,
        *,
        restarts: Restarts,
        size: int,
        clock: Clock,
        owner_epoch: int,
        hang_s: float,
    ) -> None:
        self._workers = workers
        self._restarts = restarts
        self._size = size
        self._clock = clock
        self._epoch = owner_epoch
        self._hang_s = hang_s
        self._members: dict[_Member, None] = {}  # in the order of starts
        self._num_started = 0
        self._to_call: dict[_Member, None] = {}  # with something to do and, mostly, no call out
        self._out: dict[Call, _Member] = {}  # calls that are out, the oldest first
        self._holders: dict[int, dict[_Member, None]] = {}  # task -> whoever has answers of it open
        self._loads: list[tuple[int, int, _Member]] = []  # a heap: answers open, number; some entries are out of date
        self._reserved: _Member | None = None  # for a request that must be alone: takes no other until that is done
        self._orphans: list[tuple[GenerationRequest, bool]] = []  # without a worker yet, and whether one for itself
        self._version, self._lineage = 0, "0"

    def fill(self) -> None:
        """Starts workers until the pool has its size, unless a death asks for a pause first."""
        while len(self._members) < self._size and self._restarts.may_start:
            worker = self._restarts.start()
            if worker is not None:
                self._join(worker)
        self._restarts.is_up |= len(self._members) == self._size
        self._place_orphans()

    def submit(self, request: GenerationRequest, *, alone: bool = False) -> str:
        """Gives a request to the least loaded worker and returns its name; "none" where it has to wait for one."""
        member = self._choose(alone=alone)
        if member is None:
            self._orphans.append((request, alone))
            return "none"
        member.waiting.append(request)
        member.open.update({(request.task, index): request for index in request.indices})
        self._holders.setdefault(request.task, {})[member] = None
        self._to_call[member] = None
        self._note_load(member)
        return member.worker.name

    def next_worker(self, *, alone: bool = False) -> str:
        """The worker that the next request will go to."""
        member = self._choose(alone=alone)
        return "none" if member is None else member.worker.name

    def cancel(self, task: int) -> None:
        """Stops work on a task whose answers are no longer wanted."""
        self._orphans = [(request, alone) for request, alone in self._orphans if request.task != task]
        for member in self._holders.pop(task, {}):
            member.open = {key: request for key, request in member.open.items() if key[0] != task}
            member.waiting = [request for request in member.waiting if request.task != task]
            member.cancel.append(task)
            self._to_call[member] = None
            self._note_load(member)

    def serve(self, version: int, *, lineage: str = "0") -> None:
        """The version that every worker works with from its next slice on."""
        self._version, self._lineage = version, lineage

    def calls(self) -> list[Call]:
        """Calls that are out; idle workers are not called."""
        self.fill()
        to_call, self._to_call = self._to_call, {}
        for member in to_call:
            if member.call is None and (member.open or member.cancel):  # one that has a call out comes back with it
                member.sent, member.asked = tuple(member.waiting), (self._lineage, self._version)
                member.call = self._workers.call(
                    member.worker,
                    RolloutWorker.work,
                    epoch=self._epoch,
                    version=self._version,
                    lineage=self._lineage,
                    requests=member.sent,
                    cancel=tuple(member.cancel),
                    seconds=SLICE_S,
                )
                member.waiting, member.cancel = [], []
                self._out[member.call] = member
        return list(self._out)

    def take(self, done: Sequence[Call]) -> News:
        """Collects finished calls, and deals with workers that died or hang."""
        news = News()
        for call in done:
            if (member := self._out.pop(call, None)) is not None:
                member.call = None
                self._collect(member, call, news)
        while self._out:
            call, member = next(iter(self._out.items()))
            if self._clock.monotonic() - call.started <= self._hang_s:
                break
            self._workers.kill(member.worker)
            text = f"no word for {self._hang_s:.0f} s, so it was killed; its stack is in its log"
            self._bury(member, self._workers.describe_death(member.worker, text), news)
        return news

    def is_idle(self) -> bool:
        return not self._orphans and not self._holders

    def waiting_for(self) -> list[str]:
        """For the watchdog: worker, task and how many answers are missing."""
        lines = []
        for member in self._members:
            for task in sorted({key[0] for key in member.open}):
                missing = sum(1 for key in member.open if key[0] == task)
                lines.append(f"{member.worker.name} generates task {task}, {missing} answers missing")
        return lines

    def members(self) -> list[Worker]:
        return [member.worker for member in self._members]

    def shutdown(self) -> None:
        for member in self._members:
            self._workers.kill(member.worker)
        self._members, self._to_call, self._out, self._holders, self._loads = {}, {}, {}, {}, []
        self._reserved = None

    def _join(self, worker: Worker) -> None:
        member = _Member(worker=worker, number=self._num_started)
        self._num_started += 1
        self._members[member] = None
        self._note_load(member)

    def _choose(self, *, alone: bool) -> _Member | None:
        """The least loaded worker that is not reserved. For a request that must be alone it becomes reserved, and is
        not chosen before it has nothing else left."""
        if not alone:
            return self._least_loaded()
        self._reserved = self._reserved or self._least_loaded()
        return None if self._reserved is None or self._reserved.open else self._reserved

    def _least_loaded(self) -> _Member | None:
        """Of those that are not reserved; the oldest of several."""
        while self._loads:
            load, _, member = self._loads[0]
            if load == len(member.open) and member in self._members and member is not self._reserved:
                return member
            heapq.heappop(self._loads)
        return None

    def _note_load(self, member: _Member) -> None:
        """Called whenever its load has changed: older entries of it are skipped when they come up."""
        if len(self._loads) > 4 * len(self._members) + 64:
            self._loads = [(len(other.open), other.number, other) for other in self._members]
            heapq.heapify(self._loads)
        heapq.heappush(self._loads, (len(member.open), member.number, member))

    def _place_orphans(self) -> None:
        freed = self._reserved
        if freed is not None and not freed.open and not any(alone for _, alone in self._orphans):
            self._reserved = None
            self._note_load(freed)
        orphans, self._orphans = self._orphans, []
        for request, alone in orphans:
            self.submit(request, alone=alone)

    def _collect(self, member: _Member, call: Call, news: News) -> None:
        self._to_call[member] = None
        try:
            result: WorkResult = self._workers.result(call)
        except WorkerDied as death:
            self._bury(member, str(death), news)
            return
        except VersionGoneError:
            if member.asked == (self._lineage, self._version):
                raise
            # It came to the call so late that newer versions have taken the place of the one it was to pull. It has not
            # begun the requests, and gets them once more, with the version of now.
            unsent = [r for r in member.sent if any((r.task, index) in member.open for index in r.indices)]
            member.waiting = unsent + member.waiting
            return
        for completion in result.completions:
            if member.open.pop((completion.task, completion.index), None) is not None:
                news.completions.append(completion)
        self._release(member, {completion.task for completion in result.completions})
        news.progressed.update(result.progress)
        news.num_tokens += result.num_tokens
        news.num_steps += result.num_steps
        news.busy_s += result.busy_s
        news.sync_s += result.sync_s
        if result.checksum:
            news.checksums[member.worker.name] = (result.version, result.checksum)
        if result.completions:
            self._restarts.forget_deaths()

    def _bury(self, member: _Member, cause: str, news: News) -> None:
        self._forget(member)
        unsent = {id(request) for request in member.waiting}
        num_held = len({key[0] for key, request in member.open.items() if id(request) not in unsent})
        by_request: dict[int, tuple[GenerationRequest, list[int]]] = {}
        for (_, index), request in member.open.items():
            by_request.setdefault(id(request), (request, []))[1].append(index)
        for request, indices in by_request.values():
            news.lost.append(
                Lost(
                    request=request,
                    indices=tuple(sorted(indices)),
                    worker=member.worker.name,
                    cause=cause,
                    num_held=0 if id(request) in unsent else num_held,
                )
            )
        self._restarts.count_death(member.worker.name, cause)

    def _release(self, member: _Member, tasks: set[int]) -> None:
        """Of these tasks it has given answers, of some perhaps the last."""
        still_open = {task for task, _ in member.open}
        for task in tasks - still_open:
            if (holders := self._holders.get(task)) is not None:
                holders.pop(member, None)
                if not holders:
                    del self._holders[task]
        if tasks:
            self._note_load(member)

    def _forget(self, member: _Member) -> None:
        del self._members[member]
        self._to_call.pop(member, None)
        if member.call is not None:
            self._out.pop(member.call, None)
        for task in {task for task, _ in member.open}:
            self._holders[task].pop(member)
            if not self._holders[task]:
                del self._holders[task]
        if self._reserved is member:
            self._reserved = None
