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

import cauce
from cauce import spans
from cauce.algorithms.table import Algorithm
from cauce.engine.vllm_python import find_vllm_python
from cauce.recipe.models import Recipe
from cauce.runtime.cluster import node_rooms, own_room, start_cluster, stop_cluster
from cauce.runtime.exchange import Exchange
from cauce.runtime.placement import Placement, check_room, plan_placement
from cauce.runtime.pool import RolloutPool
from cauce.runtime.process import available_cpus, resident_megabytes, tree_megabytes
from cauce.runtime.ray_workers import Interpreter, RayWorkers
from cauce.runtime.remote_learner import RemoteLearner
from cauce.runtime.restarts import Note, Restarts
from cauce.runtime.reward_pool import RewardPool
from cauce.runtime.roles import LearnerWorker, RewardWorker, RolloutWorker
from cauce.runtime.world import Clock, Resources, SystemClock, Worker, Workers
from cauce.weights.store import choose_folder, sweep_orphans, versions_kept

HANG_S = 120.0  # a slice of work lasts half a second; a worker silent for this long is stuck
STALL_S = 1800.0
WORKER_ENV = {
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    # How long a thread spins before it sleeps when it waits for others. Sleeping at once makes decoding half as fast;
    # spinning for long takes the cores from whoever else has work, and slows a run beside other work down many times
    # over. This is nine tenths of the one and loses a quarter in the other case.
    "GOMP_SPINCOUNT": "10000",
    # Huge pages, where the system leaves the choice to programs: every decode step reads all weights, and the walk
    # through page tables is half of that time. And large blocks come from memory that the process keeps: to fetch it
    # from the system for each tensor, and clear it, is a third of a training step.
    "GLIBC_TUNABLES": (
        "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=33554432:glibc.malloc.trim_threshold=536870912"
    ),
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
    reward_names: tuple[str, ...] = ()

    @property
    def weights_keep(self) -> int:
        """Published versions that stay."""
        return versions_kept(self.recipe.buffer.max_staleness)

    def rollout_arguments(self, weights_folder: Path) -> dict[str, Any]:
        """What a RolloutWorker is made with."""
        return {
            "model_path": self.model_path,
            "dtype": self.recipe.engine.dtype,
            "slots": self.slots,
            "deterministic": self.recipe.engine.deterministic,
            "compiled": self.recipe.engine.compiled,
            "weights_folder": str(weights_folder),
            "lineage": self.lineage,
            "backend": self.recipe.engine.backend,
            "gpus": float(self.recipe.rollout.gpus),
        }

    def learner_arguments(self, weights_folder: Path) -> dict[str, Any]:
        """What a LearnerWorker is made with."""
        return {
            "model_path": self.model_path,
            "algorithm": self.algorithm,
            "settings": self.recipe.learner,
            "temperature": self.recipe.rollout.temperature,
            "total_steps": self.total_steps,
            "seed": self.recipe.run.seed,
            "weights_folder": str(weights_folder),
            "weights_keep": self.weights_keep,
            "publish_dtype": self.recipe.engine.dtype,
        }


def build_exchange(
    plan: SessionPlan,
    workers: Workers,
    *,
    start_rollout: Callable[[str], Worker],
    start_reward: Callable[[str], Worker],
    clock: Clock,
    only_learner: bool,
    on_event: Note,
    on_note: Callable[[str], None],
    on_turn: Callable[[], object] = lambda: None,
) -> Exchange:
    """The exchange of a run with its two pools, in which no worker is started yet."""
    recipe, epoch = plan.recipe, plan.owner_epoch
    actors, scorers = (0, 0) if only_learner else (recipe.rollout.actors, recipe.reward.workers)
    restarts = Restarts(start_rollout, role="rollout", clock=clock, seed=epoch, note=on_event)
    pool = RolloutPool(workers, restarts=restarts, size=actors, clock=clock, owner_epoch=epoch, hang_s=HANG_S)
    restarts = Restarts(start_reward, role="reward", clock=clock, seed=epoch, note=on_event)
    rewards = RewardPool(
        workers,
        restarts=restarts,
        size=scorers,
        clock=clock,
        timeout_s=recipe.reward.timeout_s,
        what=f"the reward {names}" if (names := ", ".join(plan.reward_names)) else "the reward",
    )
    return Exchange(workers, pool, rewards, clock=clock, stall_s=STALL_S, on_stall=on_note, on_turn=on_turn)


class Session:
    """Starts on entry, stops on exit."""

    def __init__(
        self,
        plan: SessionPlan,
        *,
        reward: Any,
        on_event: Note,
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
        if (room := own_room(recipe.cluster)) is not None:  # what cannot fit is refused before Ray starts
            check_room(plan_placement(recipe, cpus=int(room.cpus)), [room])
        self.cluster = start_cluster(recipe.cluster, object_store=recipe.rollout.object_store_memory)
        try:
            self.placement = self._place(recipe)
            self.weights_folder = choose_folder(
                plan.run_dir, run_id=plan.run_id, bytes_needed=(plan.weights_keep + 1) * plan.model_bytes
            )
            self.workers = RayWorkers(
                log_folder=plan.run_dir / ("logs-replay" if self._only_learner else "logs"),
                env=WORKER_ENV,
                interpreters=self._interpreters(),
            )
            self._connect()
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
        return RemoteLearner(
            self.workers, self._learner_worker, self.exchange, self.clock, epoch=self._plan.owner_epoch
        )

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

    def _connect(self) -> None:
        """The exchange over the workers of this session, and its two pools."""
        self.exchange = build_exchange(
            self._plan,
            self.workers,
            start_rollout=self._start_rollout,
            start_reward=self._start_reward,
            clock=self.clock,
            only_learner=self._only_learner,
            on_event=self._on_event,
            on_note=self._on_note,
            on_turn=self.sample_memory,
        )
        self.pool, self.rewards = self.exchange.pool, self.exchange.rewards

    def _place(self, recipe: Recipe) -> Placement:
        rooms = node_rooms()
        cpus = int(max((room.cpus for room in rooms), default=1)) or available_cpus()
        placement = plan_placement(recipe, cpus=cpus)
        engine_gpus = 0.0 if recipe.engine.backend == "vllm" else placement.rollout.gpus
        if engine_gpus or placement.learner.gpus:
            self._on_note(
                f"rollout.gpus={placement.rollout.gpus:g} and learner.gpus={placement.learner.gpus:g} are reserved, "
                "but learner and native engine compute on the CPU; set them to 0 to leave them to others"
            )
        check_room(placement, rooms)
        return placement

    def _interpreters(self) -> dict[str, Interpreter]:
        """Of the roles that live in another environment than this one."""
        engine = self._plan.recipe.engine
        if engine.backend != "vllm" or self._only_learner:
            return {}
        source = self.weights_folder / "python"  # a link, since beside an installed cauce lie packages of this one
        source.mkdir(parents=True, exist_ok=True)
        (source / "cauce").symlink_to(Path(cauce.__file__).parent)
        return {"rollout": Interpreter(python=find_vllm_python(engine.python).python, source=source)}

    def _start_workers(self) -> None:
        """All at once: most of a start is imports and reading the model, which cores can share."""
        with ThreadPoolExecutor(max_workers=3) as threads:
            starts = [threads.submit(start) for start in (self._start_learner, self.pool.fill, self.rewards.warm_up)]
        for each in starts:
            each.result()

    def _start_rollout(self, name: str) -> Worker:
        arguments = self._plan.rollout_arguments(self.weights_folder)
        return self._start(RolloutWorker, name, "rollout", self.placement.rollout, arguments)

    def _start_reward(self, name: str) -> Worker:
        return self._start(RewardWorker, name, "reward", self.placement.reward, {"reward": self._reward})

    def _start_learner(self) -> None:
        if self._learner_worker is not None:
            self.workers.kill(self._learner_worker)
            self._learner_worker = None
        name = f"learner-{self._num_learners}"
        self._num_learners += 1
        arguments = self._plan.learner_arguments(self.weights_folder)
        self._learner_worker = self._start(LearnerWorker, name, "learner", self.placement.learner, arguments)

    def _start(self, cls: type, name: str, role: str, resources: Resources, arguments: dict[str, Any]) -> Worker:
        with spans.span(f"start {name}"):  # a lane for each: the first ones start side by side
            return self.workers.start(cls, name=name, role=role, resources=resources, kwargs=arguments)

    def _all_workers(self) -> list[Worker]:
        found = self.pool.members() + self.rewards.members()
        return found if self._learner_worker is None else [*found, self._learner_worker]
