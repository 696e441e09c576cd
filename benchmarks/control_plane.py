"""The control plane at a thousand actors, in one process: trainer, pool, watchdog and journal are those of every run,
engines take time and no arithmetic (benchmarks/engines.py).

control_plane_1000    answers recorded per second, over the rate that the engines' slots have without a driver
control_plane_memory  what the process holds after 10,000 plans of virtual time, over what it held after 1,000
"""

import gc
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.bench import Bench
from benchmarks.engines import Load, Measured, TimedWorkers
from benchmarks.results import Result
from cauce.algorithms.table import resolve
from cauce.data.source import load_rows
from cauce.environments.single_turn import RenderedPrompt
from cauce.journal import Journal
from cauce.metrics.observer import NullObserver
from cauce.recipe.checks import check_recipe
from cauce.recipe.load import recipe_from_tables
from cauce.recipe.models import Recipe
from cauce.runtime.cluster import Cluster
from cauce.runtime.placement import plan_placement
from cauce.runtime.session import Session
from cauce.runtime.tasks import Environment, TaskSource
from cauce.runtime.world import Clock, SystemClock, Workers
from cauce.simulate.clock import VirtualClock
from cauce.stages.prepare import Prepared
from cauce.stages.run import Parts, Training, run
from cauce.types import Row, Sampling

ACTORS = 1000
REAL_ACTORS = 8
TARGET = 0.95
RAMP_S, WINDOW_S = 25.0, 60.0
FLAT = 1.02  # of memory over 9,000 plans


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A run of the control plane."""

    actors: int = ACTORS
    load: Load = field(default_factory=Load)
    group_size: int = 8
    tasks_per_plan: int = 128
    max_staleness: int = 23  # so that no slot waits for a task: a group takes 36 s, until the last of its answers
    plans: int = 1_000_000
    checkpoint_every: int = 0


class Letters:
    """An environment without a tokenizer."""

    def render(self, row: Row) -> RenderedPrompt:
        return RenderedPrompt(text=row.id, token_ids=np.arange(64, dtype=np.int32))

    def answer_text(self, token_ids: np.ndarray, eos_ids: Any) -> str:
        return token_ids[:8].tobytes().hex()


class SlotsSession(Session):
    """A session over workers that are given."""

    given: Any
    on_turn: Any

    def __enter__(self) -> "SlotsSession":
        self.clock: Clock = type(self).given._clock
        self.workers = type(self).given
        self.cluster = Cluster(how="simulated engines", dashboard=None, ours=False, folder=None, reaper=None)
        self.placement = plan_placement(self._plan.recipe, cpus=8)
        self.weights_folder = self._plan.run_dir / "weights"
        self._connect()
        self._start_learner()
        self.pool.fill()
        self.rewards.warm_up()
        return self

    def close(self) -> None:
        self.pool.shutdown()

    def sample_memory(self, *, every_s: float = 3.0) -> float:
        type(self).on_turn()
        return 0.0


def run_shape(
    shape: Shape,
    folder: Path,
    clock: Clock,
    *,
    environment: Environment | None = None,
    observer: Any = None,
    on_turn: Any = None,
    real: Workers | None = None,
    num_real: int = 0,
) -> dict[str, Any]:
    """A run of this shape; `on_turn` is called at each turn with journal, workers and the run's stop switch."""
    prepared = prepare_shape(shape, environment or Letters())
    workers = TimedWorkers(clock, shape.load, real=real, num_real=num_real)
    meta = {"run_id": "bench", "lineage": "0", "max_reuse": "1", "group_size": str(shape.group_size)}
    with Journal.create(folder, meta=meta, clock=clock.now) as journal:
        switches: list[Any] = []

        class Kept(Training):
            def __init__(self, *args: Any) -> None:
                super().__init__(*args)
                switches.append(self)

        def turn() -> None:
            if on_turn is not None and switches:
                on_turn(journal, workers, switches[0])

        bound = type("Bound", (SlotsSession,), {"given": workers, "on_turn": staticmethod(turn)})
        (folder / "recipe.toml").touch()
        parts = Parts(session=bound, training=Kept)
        return run(prepared, journal, folder, observer or NullObserver(), parts)


def prepare_shape(shape: Shape, environment: Environment) -> Prepared:
    """What a recipe of this shape needs, without a model."""
    recipe = _recipe(shape)
    data = [{"prompt": f"row {number}"} for number in range(256)]
    rows = load_rows(data, settings=recipe.data, split="train")
    source = TaskSource(rows, environment, seed=0, shuffle=False, max_prompt_tokens=512, eos_token_ids=(0,))
    sampling = Sampling(max_tokens=shape.load.tokens, temperature=1.0, stop_token_ids=(0,), seed=0)
    return Prepared(
        recipe=recipe,
        algorithm=resolve(recipe.algorithm, max_tokens=shape.load.tokens, correction_needed=True),
        model_path="",
        model_bytes=0,
        source=source,
        test_rows=(),
        reward=None,
        sampling=sampling,
        eval_sampling=sampling,
        tolerance=1e-4,
        digests={},
    )


def _recipe(shape: Shape) -> Recipe:
    tables: dict[str, dict[str, Any]] = {
        "run": {"plans": shape.plans},
        "model": {"path": "none"},
        "rollout": {"actors": shape.actors, "group_size": shape.group_size, "max_tokens": shape.load.tokens},
        "engine": {"slots": shape.load.slots, "dtype": "fp32"},
        "learner": {"tasks_per_plan": shape.tasks_per_plan, "dtype": "fp32"},
        "buffer": {"max_staleness": shape.max_staleness},
        "reward": {"workers": 4},
        "eval": {"every": 0, "at_start": False},
        "checkpoint": {"every": shape.checkpoint_every, "max_redo_s": 1e9, "keep": 1},
        "logging": {"tensorboard": False},
    }
    recipe = recipe_from_tables(tables)
    check_recipe(recipe)
    return recipe


class Window:
    """Looks at a run from outside: after the ramp begins the window, at its end asks the run to stop."""

    def __init__(self, ramp_s: float, window_s: float) -> None:
        self._began = time.monotonic()
        self._ramp_s, self._window_s = ramp_s, window_s
        self._first: dict[str, float] = {}
        self.measured = Measured()
        self.found: dict[str, float] = {}

    def __call__(self, journal: Journal, workers: TimedWorkers, training: Training) -> None:
        now = time.monotonic()
        if not self._first and now - self._began >= self._ramp_s:
            self._first = self._state(journal)
            workers.measured = Measured()
        elif self._first and not self.found and now - self._first["at"] >= self._window_s:
            last = self._state(journal)
            self.found = {key: last[key] - self._first[key] for key in last}
            self.measured, workers.measured = workers.measured, Measured()
            training.switch.is_set = True

    def _state(self, journal: Journal) -> dict[str, float]:
        ((answers, scored),) = journal.select("SELECT COUNT(*), COUNT(status) FROM sample")
        ((trained,),) = journal.select("SELECT COUNT(*) FROM task WHERE state = 'trained'")
        payloads = sum(file.stat().st_size for file in (journal.run_dir / "payloads").iterdir())
        return {
            "at": time.monotonic(),
            "cpu_s": time.process_time(),
            "journal_s": journal.seconds_spent,
            "commits": journal.num_commits,
            "answers": answers,
            "scored": scored,
            "trained_tasks": trained,
            "plans": journal.last_decided,
            "bytes": payloads + (journal.run_dir / "journal.db").stat().st_size,
        }


def figures(window: Window, shape: Shape) -> dict[str, float]:
    """What the window found, per second of it."""
    found, measured = window.found, window.measured
    seconds = found["at"]
    turns = sorted(measured.turns)
    figures = {
        "answers_per_s": found["answers"] / seconds,
        "trained_samples_per_s": found["trained_tasks"] * shape.group_size / seconds,
        "plans": found["plans"],
        "window_s": seconds,
        "cpu_share": found["cpu_s"] / seconds,
        "engines_cpu_share": measured.engines_s / seconds,
        "journal_share": found["journal_s"] / seconds,
        "waiting_share": measured.waits_s / seconds,
        "commits_per_s": found["commits"] / seconds,
        "journal_mb_per_s": found["bytes"] / seconds / 1e6,
        "turns_per_s": len(turns) / seconds,
        "calls_per_s": measured.num_calls / seconds,
        "turn_ms_median": 1e3 * statistics.median(turns),
        "turn_ms_p99": 1e3 * turns[int(0.99 * len(turns))],
        "turn_ms_max": 1e3 * turns[-1],
    }
    if measured.real_calls:
        calls = sorted(measured.real_calls)
        figures["real_call_ms_median"] = 1e3 * statistics.median(calls)
        figures["real_call_ms_p99"] = 1e3 * calls[int(0.99 * len(calls))]
        figures["real_calls_per_s"] = len(calls) / seconds
    return figures


def ideal_rate(shape: Shape) -> float:
    """Answers per second of slots that never wait."""
    return shape.actors * shape.load.slots / shape.load.mean_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What the process holds at one plan."""

    plan: int
    resident_mb: float
    objects: int  # that the garbage collector knows
    blocks: int  # of Python's allocator


class MemoryWatch(NullObserver):
    """Looks at chosen plans."""

    def __init__(self, plans: tuple[int, ...]) -> None:
        self._plans = plans
        self.held: list[Held] = []

    def on_plan(self, plan: int, metrics: Any) -> None:
        if plan in self._plans:
            gc.collect()
            objects, blocks = len(gc.get_objects()), sys.getallocatedblocks()
            self.held.append(Held(plan=plan, resident_mb=_resident_mb(), objects=objects, blocks=blocks))


# Small plans over all actors: what may grow does so with plans, tasks and turns, whatever their size.
LONG_RUN = Shape(
    load=Load(tokens=16, mean_s=2.0),
    group_size=2,
    tasks_per_plan=2,
    max_staleness=3,
    plans=10_000,
    checkpoint_every=500,
)
LOOKS = (1_000, 5_000, 10_000)


def control_plane_memory(bench: Bench) -> dict[str, Result]:
    """10,000 plans in virtual time. The journal lies in memory: what is on its disk is meant to grow."""
    shared = Path("/dev/shm")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="cauce-plans-", dir=shared if shared.is_dir() else None) as folder:
        watch = run_long(LONG_RUN, Path(folder) / "run", LOOKS)
    first, *_, last = watch.held
    return {
        "control_plane_memory": Result(
            ours=last.resident_mb / first.resident_mb,
            peer=FLAT,
            unit="times the memory at plan 1,000",
            dtype="",
            runs=1,
            peer_is="bound",
            settings={"plans": LONG_RUN.plans, "actors": LONG_RUN.actors, "samples_per_plan": 4},
            detail={str(each.plan): asdict(each) for each in watch.held} | {"took_s": time.monotonic() - began},
        )
    }


def run_long(shape: Shape, folder: Path, looks: tuple[int, ...]) -> MemoryWatch:
    """A run in virtual time."""
    watch = MemoryWatch(looks)
    # What this benchmark itself notes at each turn is not the control plane's.
    run_shape(
        shape,
        folder,
        VirtualClock(),
        observer=watch,
        on_turn=lambda journal, workers, _: workers.measured.turns.clear(),
    )
    return watch


def control_plane_1000(bench: Bench) -> dict[str, Result]:
    """A minute of real time, with the real journal on the disk; then again with real actors beside."""
    from cauce.environments.single_turn import SingleTurn
    from cauce.models.load import load_tokenizer

    shape = Shape()
    environment = SingleTurn(load_tokenizer(str(bench.model_folder)), _recipe(shape).data)
    alone = measure(shape, bench.cache, environment=environment)
    beside = measure_with_real(shape, bench.cache, environment=environment)
    return {
        "control_plane_1000": Result(
            ours=min(alone["answers_per_s"], beside["answers_per_s"]),
            peer=ideal_rate(shape),
            unit="answers/s",
            dtype="",
            runs=2,
            better="higher",
            peer_is="slots that never wait",
            spread={"ours": sorted([alone["answers_per_s"], beside["answers_per_s"]])},
            settings={
                "actors": shape.actors,
                "slots": shape.load.slots,
                "mean_s": shape.load.mean_s,
                "tokens": shape.load.tokens,
                "group_size": shape.group_size,
                "tasks_per_plan": shape.tasks_per_plan,
                "max_staleness": shape.max_staleness,
                "real_actors": REAL_ACTORS,
                "target": TARGET,
            },
            detail={"simulated": alone, "with_real": beside},
        )
    }


def measure(
    shape: Shape,
    cache: Path,
    *,
    environment: Environment | None = None,
    ramp_s: float = RAMP_S,
    window_s: float = WINDOW_S,
    real: Workers | None = None,
    num_real: int = 0,
) -> dict[str, float]:
    """A run in real time with its journal in a folder of `cache`, which has to be on a disk."""
    cache.mkdir(parents=True, exist_ok=True)
    window = Window(ramp_s, window_s)
    with tempfile.TemporaryDirectory(prefix="control-", dir=cache) as folder:
        run_dir = Path(folder) / "run"
        run_shape(shape, run_dir, SystemClock(), environment=environment, on_turn=window, real=real, num_real=num_real)
    return figures(window, shape)


def measure_with_real(shape: Shape, cache: Path, **how: Any) -> dict[str, float]:
    """The same with real actors of Ray in the places of the first ones, and what their calls take."""
    import ray

    from cauce.runtime.ray_workers import RayWorkers

    with tempfile.TemporaryDirectory(prefix="ct-", dir="/tmp") as folder:  # short: Ray's sockets lie in it
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            _temp_dir=folder,
            log_to_driver=False,
            runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}},
        )
        try:
            workers = RayWorkers(log_folder=Path(folder) / "logs", env={})
            return measure(shape, cache, real=workers, num_real=REAL_ACTORS, **how)
        finally:
            ray.shutdown()


def _resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
