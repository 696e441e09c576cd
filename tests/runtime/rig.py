"""What the tests of the driver's loop share: both pools and their exchange, over scripted workers and a clock that only
a test moves."""

from collections.abc import Callable
from typing import Any

from cauce.runtime.exchange import Exchange
from cauce.runtime.pool import News, RolloutPool
from cauce.runtime.restarts import Restarts
from cauce.runtime.reward_pool import RewardPool, ScoredJob
from cauce.runtime.roles import RewardWorker, RolloutWorker
from cauce.runtime.world import Worker
from tests.fakes import ROOM, FakeClock, ScriptedWorkers


class PoolRig:
    """`make` gives the object behind the worker of a name, which begins with rollout or reward."""

    def __init__(
        self,
        make: Callable[[str], Any],
        *,
        actors: int = 1,
        scorers: int = 1,
        hang_s: float = 60.0,
        timeout_s: float = 10.0,
        stall_s: float = 1e9,
    ) -> None:
        self.clock = FakeClock()
        self.workers = ScriptedWorkers(make, self.clock)
        self.events: list[tuple[str, dict[str, str]]] = []
        self.told: list[str] = []
        self.pool = RolloutPool(
            self.workers,
            restarts=self._restarts(RolloutWorker, "rollout"),
            size=actors,
            clock=self.clock,
            owner_epoch=1,
            hang_s=hang_s,
        )
        restarts = self._restarts(RewardWorker, "reward")
        self.rewards = RewardPool(self.workers, restarts=restarts, size=scorers, clock=self.clock, timeout_s=timeout_s)
        self.exchange = Exchange(
            self.workers, self.pool, self.rewards, clock=self.clock, stall_s=stall_s, on_stall=self.told.append
        )

    def generate(self) -> News:
        """One turn of the rollout pool alone."""
        return self.pool.take(self.workers.wait(self.pool.calls(), timeout_s=1.0))

    def score(self) -> list[ScoredJob]:
        """One turn of the reward pool alone."""
        return self.rewards.take(self.workers.wait(self.rewards.calls(), timeout_s=1.0))

    def _restarts(self, cls: type, role: str) -> Restarts:
        def start(name: str) -> Worker:
            return self.workers.start(cls, name=name, role=role, resources=ROOM, kwargs={})

        def note(kind: str, detail: dict[str, str]) -> None:
            self.events.append((kind, detail))

        return Restarts(start, role=role, clock=self.clock, seed=1, note=note)
