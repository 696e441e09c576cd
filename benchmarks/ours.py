"""Our side of a comparison: a whole run of the stage `rl`, as `cauce train` has it, that waits for its turn.

    python -m benchmarks.ours WORKLOAD RUN_FOLDER DTYPE

Ray, rollout actor, learner, reward worker, journal, weights and metrics files are all there. An observer blocks after
each plan; the seconds of a step go from "go" to the next plan's record, so that publishing the weights, which comes
after a record, is in the next step's. Left out, since the other side does not have it either: evaluation, checkpoints
but the last one, and the dashboard, whose processes would work during the other side's turns.
"""

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.turns import Turns
from benchmarks.workload import Workload, prompt_digest
from cauce.metrics.observer import NullObserver, RunInfo
from cauce.recipe.load import load_recipe
from cauce.recipe.models import Recipe

REWARDS = Path(__file__).with_name("rewards.py")
DASHBOARD = "off"


class TakesTurns(NullObserver):
    """Reports each plan and then waits to be called again."""

    def __init__(self, turns: Turns, ready: Mapping[str, Any]) -> None:
        self._turns = turns
        self._ready = dict(ready)
        self._began = 0.0

    def on_start(self, info: RunInfo) -> None:
        self._turns.tell("ready", {**self._ready, "cluster": info.cluster})
        self._begin()

    def on_plan(self, plan: int, metrics: Mapping[str, float]) -> None:
        seconds = time.perf_counter() - self._began
        facts = {
            "seconds": seconds,
            "reward": metrics["reward/mean"],
            "silent_groups": metrics["reward/zero_variance_fraction"],
            "length": metrics["response/length_mean"],
            "split": {name.removeprefix("time/"): value for name, value in metrics.items() if name.startswith("time/")},
        }
        self._turns.tell("step", facts)
        self._begin()

    def _begin(self) -> None:
        self._turns.wait()
        self._began = time.perf_counter()


def recipe_of(workload: Workload, *, run_folder: str, dtype: str) -> Recipe:
    """The recipe that does this work."""
    settings = {
        "run.dir": run_folder,
        "run.plans": workload.num_steps,
        "run.seed": workload.seed,
        "model.path": workload.model,
        "data.train": workload.rows,
        "data.shuffle": "false",
        "reward.fn": f"{REWARDS}:{workload.reward}",
        "rollout.group_size": workload.group_size,
        "rollout.max_tokens": workload.max_tokens,
        "rollout.temperature": workload.temperature,
        "engine.dtype": dtype,
        "learner.dtype": dtype,
        "learner.tasks_per_plan": workload.num_prompts,
        "learner.lr": workload.lr,
        "checkpoint.every": workload.num_steps,
        "eval.every": 0,
        "eval.at_start": "false",
        "cluster.dashboard": "false",
    }
    return load_recipe("grpo", [f"{key}={value}" for key, value in settings.items()])


def digest_of_prompts(workload: Workload, recipe: Recipe) -> str:
    """The prompts as this side renders them."""
    from cauce.environments.single_turn import SingleTurn
    from cauce.models.load import load_tokenizer
    from cauce.types import Row

    environment = SingleTurn(load_tokenizer(workload.model), recipe.data)
    rows = [Row(id=str(i), prompt=row["prompt"], columns={}) for i, row in enumerate(workload.read_rows())]
    return prompt_digest(environment.render(row).token_ids.tolist() for row in rows)


def main() -> None:
    turns = Turns.from_pipes()
    workload = Workload.from_json(sys.argv[1])
    run_folder, dtype = sys.argv[2:]
    recipe = recipe_of(workload, run_folder=run_folder, dtype=dtype)

    from cauce.models.load import resolve_dtype
    from cauce.stages import rl

    ready = {
        "dtype": str(resolve_dtype(dtype)).removeprefix("torch."),
        "prompts": digest_of_prompts(workload, recipe),
        "settings": {"dtype": dtype, "dashboard": DASHBOARD, "evaluation": "none", "checkpoints": "the last"},
    }
    summary = rl.train(recipe, name="bench", observer=TakesTurns(turns, ready))
    turns.tell("end", {"peak_memory_mb": summary["peak_memory_mb"], "status": summary["status"]})


if __name__ == "__main__":
    main()
