"""`time_to_accuracy_vs_trl`: seconds of training until held-out accuracy 0.6 on the quickstart's task, once each.

Both sides have the quickstart's model, prompts in the same order, batch, rate and its course, temperature, loss and
stop tokens, and both are evaluated greedily by the same engine and reward after the same steps, outside of the time.
0.6 counts as reached at the first evaluation that is followed by another at or above it. Start-up is left out on both
sides. TRL runs with fp32 weights: its bf16 weights do not hold updates of this size.
"""

import itertools
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.bench import START_TIMEOUT_S, STEP_TIMEOUT_S, Bench
from benchmarks.duel import try_trl
from benchmarks.grpo_step import TRIAL_STEPS
from benchmarks.held_out import HeldOut
from benchmarks.machine import describe
from benchmarks.own_run import OwnRun, train
from benchmarks.results import Result
from benchmarks.trl_environment import ROOT, TrlEnvironment, ensure
from benchmarks.trl_settings import TrlSettings, choose, table, tried
from benchmarks.turns import Player
from benchmarks.workload import Workload
from cauce.recipe.load import load_recipe
from cauce.recipe.models import Recipe
from cauce.runtime.session import WORKER_ENV
from cauce.stages.prepare import Prepared, prepare

NAME = "time_to_accuracy_vs_trl"
TARGET = 0.6
EVERY = 2  # steps between evaluations


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One evaluation: after so many steps and seconds of training."""

    step: int
    seconds: float
    accuracy: float


def time_to_accuracy(bench: Bench) -> dict[str, Result]:
    """TRL is stopped as soon as it is there; ours runs the whole recipe."""
    environment = ensure()
    recipe = load_recipe("quickstart", [f"model.path={bench.model}"])
    prepared = prepare(recipe)
    with tempfile.TemporaryDirectory() as folder:
        workload = workload_of(prepared, Path(folder))
        trials, chosen = chosen_settings(bench, workload, environment)
        ours = points_of(train(bench, NAME, "quickstart", {"model.path": bench.model, "eval.every": EVERY}))
        print(f"  ours: {ours}", flush=True)
        peer = trl_points(bench, prepared, workload, environment=environment, settings=chosen, folder=Path(folder))
    return {
        NAME: as_result(
            ours,
            peer,
            dtype=f"{bench.dtype} against {chosen.dtype}",
            title=environment.title,
            settings={
                "recipe": "quickstart",
                "work": workload.settings(),
                "target": f"held-out accuracy {TARGET}, confirmed by the next evaluation",
                "evaluated": f"every {EVERY} steps, greedily, {len(prepared.test_rows)} tasks, outside of the time",
                "ours": "steps with all that a run does, journal and checkpoints included",
                "peer": {"chosen": chosen.label, "gradient_checkpointing": False},
                "peer_tried_s_per_step": table(trials),
                "peer_versions": dict(environment.versions),
            },
        )
    }


def workload_of(prepared: Prepared, folder: Path) -> Workload:
    """The quickstart's own work as TRL gets it, with its rows in the order in which our run admits them."""
    recipe, source = prepared.recipe, prepared.source
    assert source is not None
    rows = folder / "rows.jsonl"
    num_rows = recipe.run.plans * recipe.learner.tasks_per_plan
    chosen = [source.task(number).row for number in range(num_rows)]
    rows.write_text("".join(json.dumps({"prompt": row.prompt, **row.columns}) + "\n" for row in chosen), "utf-8")
    return Workload(
        model=prepared.model_path,
        rows=str(rows),
        reward="correct",
        num_steps=recipe.run.plans,
        num_prompts=recipe.learner.tasks_per_plan,
        group_size=recipe.rollout.group_size,
        max_tokens=prepared.sampling.max_tokens,
        temperature=recipe.rollout.temperature,
        lr=recipe.learner.lr,
        seed=recipe.run.seed,
    )


def chosen_settings(bench: Bench, workload: Workload, environment: TrlEnvironment) -> tuple[list[Any], TrlSettings]:
    """TRL's fastest of those that keep fp32 weights, on work of this shape."""
    short = Workload(**{**asdict(workload), "num_steps": TRIAL_STEPS})
    trials = tried(
        lambda settings: try_trl(bench, short, environment=environment, settings=settings),
        dtype=None,
        key={
            "model": bench.model,
            "work": short.settings(),
            "versions": dict(environment.versions),
            "machine": describe(),
        },
        cache=bench.cache / "trl_settings.json",
    )
    trials = [trial for trial in trials if trial.settings.weights == "float32"]
    return trials, choose(trials, None).settings


def points_of(run: OwnRun) -> list[Point]:
    """Our run's evaluations, with the seconds of all plans and checkpoints so far and without those of evaluations."""
    points, seconds = [], 0.0
    for row in run.rows:
        seconds += float(row.get("time/total", 0.0)) + float(row.get("time/checkpoint", 0.0))
        accuracy = row.get("eval/test/accuracy")
        if accuracy is not None and row["plan"] > 0:
            points.append(Point(step=int(row["plan"]), seconds=seconds, accuracy=float(accuracy)))
    return points


def trl_points(
    bench: Bench,
    prepared: Prepared,
    workload: Workload,
    *,
    environment: TrlEnvironment,
    settings: TrlSettings,
    folder: Path,
) -> list[Point]:
    """Evaluations of TRL's weights, until the target is confirmed or its steps are done."""
    evaluator, weights = HeldOut(prepared), folder / "weights"
    points: list[Point] = []
    with start_trl(bench, prepared, workload, environment, settings, weights) as player:
        player.expect("ready", timeout_s=START_TIMEOUT_S)
        while reached(points) is None and (not points or points[-1].step + EVERY <= workload.num_steps):
            player.go()
            facts = player.expect("round", timeout_s=EVERY * STEP_TIMEOUT_S)
            points.append(Point(**facts, accuracy=evaluator.accuracy(weights)))
            print(f"  {player.name}: {points[-1]}", flush=True)
    return points


def start_trl(
    bench: Bench,
    prepared: Prepared,
    workload: Workload,
    environment: TrlEnvironment,
    settings: TrlSettings,
    weights: Path,
) -> Player:
    recipe: Recipe = prepared.recipe
    work = {
        "workload": asdict(workload),
        "system": recipe.data.system,
        "stop_ids": list(prepared.sampling.stop_token_ids),
        "schedule": recipe.learner.schedule,
        "every": EVERY,
        "weights": str(weights),
    }
    command = [str(environment.python), "-m", "benchmarks.peer_trl_accuracy", json.dumps(work), settings.to_json()]
    env = environment.env() | ({"GLIBC_TUNABLES": WORKER_ENV["GLIBC_TUNABLES"]} if settings.malloc else {})
    return Player("TRL", command, env=env, cwd=ROOT, log=bench.log(f"{NAME}-trl"))


def reached(points: Sequence[Point]) -> Point | None:
    """The first evaluation at or above the target that the next one confirms."""
    for point, after in itertools.pairwise(points):
        if point.accuracy >= TARGET and after.accuracy >= TARGET:
            return point
    return None


def as_result(
    ours: Sequence[Point], peer: Sequence[Point], *, dtype: str, title: str, settings: dict[str, Any]
) -> Result:
    """A peer that never gets there counts with the time of all its steps, and is said not to have got there."""
    own, other = reached(ours), reached(peer)
    if own is None:
        raise RuntimeError(f"our run did not reach {TARGET}: {[point.accuracy for point in ours]}")
    end = other or peer[-1]
    return Result(
        ours=own.seconds,
        peer=end.seconds,
        unit=f"s to held-out accuracy {TARGET}",
        dtype=dtype,
        runs=1,
        peer_is=title if other else f"{title}, which did not reach it in {end.step} steps",
        settings=settings,
        detail={
            "ours_step": own.step,
            "peer_step": end.step,
            "ours": [asdict(point) for point in ours],
            "peer": [asdict(point) for point in peer],
        },
    )
