"""Everything of a run that has to be started and stopped: Ray, workers, pools, weight store.

Built from a recipe and a journal; used by the stages as a context manager, so that whatever ends a run - success, an
error, Ctrl-C - ends its processes and clears its shared memory too. Decides nothing: policies are in trainer and flow.
"""

import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from cauce.algorithms.table import Algorithm
from cauce.recipe.models import Recipe
from cauce.runtime.cluster import node_rooms, start_cluster, stop_cluster
from cauce.runtime.exchange import Exchange
from cauce.runtime.placement import Placement, check_room, plan_placement
from cauce.runtime.pool import RolloutPool
from cauce.runtime.process import available_cpus, resident_megabytes, tree_megabytes
from cauce.runtime.ray_workers import RayWorkers
from cauce.runtime.remote_learner import RemoteLearner
from cauce.runtime.reward_pool import RewardPool
from cauce.runtime.roles import LearnerWorker, RewardWorker, RolloutWorker
from cauce.runtime.world import Clock, SystemClock, Worker
from cauce.weights.store import choose_folder, sweep_orphans

HANG_S = 120.0  # a slice of work lasts half a second; a worker silent for this long is stuck
STALL_S = 1800.0
WORKER_ENV = {
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    # Threads that spin between two small kernels take the cores from whoever else has work; where anything runs beside
    # a run, that slows it down many times over. Sleeping instead costs part of the speed where nothing does.
    "OMP_WAIT_POLICY": "passive",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionPlan:
    """What a session needs to know, resolved from the recipe once."""

    recipe: Recipe
    algorithm: Algorithm
    model_path: str
    model_bytes: int  # of the published weights
    run_id: str
    run_dir: Path
    owner_epoch: int
    lineage: str
    total_steps: int
    slots: int


class Session:
    """Starts on entry, stops on exit."""

    pool_class = RolloutPool

    def __init__(
        self,
        plan: SessionPlan,
        *,
        reward: Any,
        on_event: Callable[[str, dict[str, str]], None],
        on_note: Callable[[str], None],
        only_learner: bool = False,
    ) -> None:
        self._only_learner = only_learner
        self._plan = plan
        self._reward = reward
        self._on_event = on_event
        self._on_note = on_note
        self.clock: Clock = SystemClock()
        self.peak_memory_mb = 0.0
        self._learner_worker: Worker | None = None
        self._num_learners = 0
        self._handed_out = False
        self._next_sample = 0.0

    def __enter__(self) -> "Session":
        plan, recipe = self._plan, self._plan.recipe
        sweep_orphans()
        self.cluster = start_cluster(recipe.cluster, object_store=recipe.rollout.object_store_memory)
        try:
            self.placement = self._place(recipe)
            self.weights_keep = versions_kept(recipe.buffer.max_staleness)
            self.weights_folder = choose_folder(
                plan.run_dir, run_id=plan.run_id, bytes_needed=(self.weights_keep + 1) * plan.model_bytes
            )
            self.workers = RayWorkers(
                log_folder=plan.run_dir / ("logs-replay" if self._only_learner else "logs"), env=WORKER_ENV
            )
            self._build_pools(recipe)
            self._start_workers()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends every process of this run, and removes its published weights."""
        for name in ("pool", "rewards"):
            if name in self.__dict__:
                self.__dict__[name].shutdown()
        if self._learner_worker is not None:
            self.workers.kill(self._learner_worker)
            self._learner_worker = None
        stop_cluster(self.cluster)
        if "weights_folder" in self.__dict__:
            shutil.rmtree(self.weights_folder, ignore_errors=True)

    def fresh_learner(self) -> RemoteLearner:
        """A learner with the initial weights: the first, or one in place of it."""
        if self._handed_out:
            self._start_learner()
        self._handed_out = True
        assert self._learner_worker is not None
        return RemoteLearner(self.workers, self._learner_worker, self.exchange, self.clock)

    def sample_memory(self, *, every_s: float = 3.0) -> float:
        """Memory of all processes of this run in MB, looked at now and then; remembers the peak."""
        now = time.monotonic()
        if now >= self._next_sample:
            self._next_sample = now + every_s
            mb = tree_megabytes(os.getpid())
            if not self.cluster.ours:
                mb += sum(resident_megabytes(worker.pid) for worker in self._all_workers())
            if self.weights_folder.is_relative_to("/dev/shm"):
                mb += sum(f.stat().st_size for f in self.weights_folder.glob("*.safetensors")) / 2**20
            self.peak_memory_mb = max(self.peak_memory_mb, mb)
            for worker in self._all_workers():
                self.workers.note_memory(worker)
        return self.peak_memory_mb

    def _place(self, recipe: Recipe) -> Placement:
        rooms = node_rooms()
        cpus = int(max((room.cpus for room in rooms), default=1)) or available_cpus()
        placement = plan_placement(recipe, cpus=cpus)
        if placement.rollout.gpus or placement.learner.gpus:
            self._on_note(
                f"rollout.gpus={placement.rollout.gpus:g} and learner.gpus={placement.learner.gpus:g} are reserved, "
                "but this version computes on the CPU; set both to 0 to leave them to others"
            )
        check_room(placement, rooms)
        return placement

    def _start_workers(self) -> None:
        """All at once: most of a start is imports and reading the model, which cores can share."""
        with ThreadPoolExecutor(max_workers=3) as threads:
            starts = [threads.submit(start) for start in (self._start_learner, self.pool.fill, self.rewards.warm_up)]
        for each in starts:
            each.result()

    def _build_pools(self, recipe: Recipe) -> None:
        self.pool = self.pool_class(
            self.workers,
            start=self._start_rollout,
            size=0 if self._only_learner else recipe.rollout.actors,
            clock=self.clock,
            owner_epoch=self._plan.owner_epoch,
            hang_s=HANG_S,
            note=self._on_event,
        )
        self.rewards = RewardPool(
            self.workers,
            start=self._start_reward,
            size=0 if self._only_learner else recipe.reward.workers,
            clock=self.clock,
            timeout_s=recipe.reward.timeout_s,
        )
        self.exchange = Exchange(
            self.workers,
            self.pool,
            self.rewards,
            clock=self.clock,
            stall_s=STALL_S,
            on_stall=self._on_note,
            on_turn=self.sample_memory,
        )

    def _start_rollout(self, name: str) -> Worker:
        plan = self._plan
        return self.workers.start(
            RolloutWorker,
            name=name,
            role="rollout",
            resources=self.placement.rollout,
            kwargs={
                "model_path": plan.model_path,
                "dtype": plan.recipe.engine.dtype,
                "slots": plan.slots,
                "deterministic": plan.recipe.engine.deterministic,
                "weights_folder": str(self.weights_folder),
                "lineage": plan.lineage,
            },
        )

    def _start_reward(self, name: str) -> Worker:
        return self.workers.start(
            RewardWorker,
            name=name,
            role="reward",
            resources=self.placement.reward,
            kwargs={"reward": self._reward},
        )

    def _start_learner(self) -> None:
        if self._learner_worker is not None:
            self.workers.kill(self._learner_worker)
        plan, recipe = self._plan, self._plan.recipe
        name = f"learner-{self._num_learners}"
        self._num_learners += 1
        self._learner_worker = self.workers.start(
            LearnerWorker,
            name=name,
            role="learner",
            resources=self.placement.learner,
            kwargs={
                "model_path": plan.model_path,
                "algorithm": plan.algorithm,
                "settings": recipe.learner,
                "temperature": recipe.rollout.temperature,
                "total_steps": plan.total_steps,
                "seed": recipe.run.seed,
                "weights_folder": str(self.weights_folder),
                "weights_keep": self.weights_keep,
                "publish_dtype": recipe.engine.dtype,
            },
        )

    def _all_workers(self) -> list[Worker]:
        found = self.pool.members() + self.rewards.members()
        return found if self._learner_worker is None else [*found, self._learner_worker]


def versions_kept(max_staleness: int) -> int:
    """Published versions that stay: in a synchronous run nobody reads an old one while a new one is written."""
    return max_staleness + 2 if max_staleness else 1
