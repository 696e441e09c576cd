"""One turn of the driver's loop: wait for any worker, collect, and hand results to whom they belong.

Consumes: finished calls of rollout workers, reward workers and whatever else the caller waits for (the learner).
Waits for: any one of them, at most `timeout_s`. Unblocked by: a result, a death or the timeout. Produces: answers and
outcomes, given to the desk that asked for them - training tasks have ids from 0 up, evaluation uses negative ones.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from cauce import spans
from cauce.runtime.pool import Lost, News, RolloutPool
from cauce.runtime.reward_pool import RewardPool, ScoredJob
from cauce.runtime.watchdog import Watchdog
from cauce.runtime.world import Call, Clock, Workers
from cauce.types import Completion


class Desk(Protocol):
    """Who asked for answers."""

    def on_answers(self, completions: Sequence[Completion]) -> None: ...

    def on_lost(self, lost: Sequence[Lost]) -> None: ...

    def on_scored(self, scored: Sequence[ScoredJob]) -> None: ...

    def on_progress(self, tasks: set[int]) -> None: ...


class Exchange:
    """Connects pools and desks, and keeps what the watchdog and the metrics need."""

    def __init__(
        self,
        workers: Workers,
        pool: RolloutPool,
        rewards: RewardPool,
        *,
        clock: Clock,
        stall_s: float,
        on_stall: Callable[[str], None],
        on_turn: Callable[[], object] = lambda: None,
    ) -> None:
        self._on_turn = on_turn
        self._workers = workers
        self.pool = pool
        self.rewards = rewards
        self.clock = clock
        self._watchdog = Watchdog(clock=clock, limit_s=stall_s, tell=on_stall)
        self.training: Desk | None = None
        self.evaluation: Desk | None = None
        self.num_tokens = self.num_steps = 0
        self.busy_s = 0.0  # of all rollout workers together
        self.sync_s = 0.0
        self.control_s = 0.0  # spent on what came back: leases, the record of it, the watchdog
        self.served: dict[str, tuple[int, str]] = {}

    def turn(self, *, timeout_s: float = 1.0, extra: Sequence[Call] = ()) -> list[Call]:
        """Waits for something to happen, hands it on, and returns the `extra` calls that are done."""
        calls = [*self.pool.calls(), *self.rewards.calls(), *extra]
        if calls:
            with spans.span("wait", calls=len(calls)):
                done = self._workers.wait(calls, timeout_s=timeout_s)
        else:
            self.clock.sleep(0.05)  # a pool in its pause before a replacement
            done = []
        self._on_turn()
        began = self.clock.monotonic()
        news = self.pool.take(done)
        scored = self.rewards.take(done)
        self._hand_out(news, scored)
        self._watchdog.look(
            calls,
            done,
            is_news=bool(done or news.lost or scored or extra),
            waiting_for=lambda: self.pool.waiting_for() + self.rewards.waiting_for(),
        )
        self.control_s += self.clock.monotonic() - began
        return [call for call in extra if call in done]

    def _hand_out(self, news: News, scored: Sequence[ScoredJob]) -> None:
        self.num_tokens += news.num_tokens
        self.num_steps += news.num_steps
        self.busy_s += news.busy_s
        self.sync_s += news.sync_s
        self.served.update(news.checksums)
        for desk, owns in ((self.training, _is_training), (self.evaluation, _is_evaluation)):
            if desk is None:
                continue
            if answers := [c for c in news.completions if owns(c.task)]:
                desk.on_answers(answers)
            if lost := [item for item in news.lost if owns(item.request.task)]:
                desk.on_lost(lost)
            if outcomes := [item for item in scored if owns(item.job.key)]:
                desk.on_scored(outcomes)
            if progressed := {task for task in news.progressed if owns(task)}:
                desk.on_progress(progressed)


def _is_training(task: int) -> bool:
    return task >= 0


def _is_evaluation(task: int) -> bool:
    return task < 0
