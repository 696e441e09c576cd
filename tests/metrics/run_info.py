"""A run to watch, and numbers of its plans."""

import json
from pathlib import Path

from cauce.metrics.observer import RunInfo


def run_info(run_dir: Path, *, num_plans: int = 40) -> RunInfo:
    return RunInfo(
        run_dir=run_dir,
        recipe_name="quickstart",
        model="SmolLM2-135M-Instruct",
        num_plans=num_plans,
        algorithm="grpo",
        cluster="own Ray on this machine, 2 CPUs",
        dashboard="http://127.0.0.1:8265",
        eval_tasks=200,
    )


def plan_metrics(plan: int) -> dict[str, float]:
    return {
        "reward/mean": 0.1 + 0.01 * plan,
        "loss/policy": 0.001,
        "optim/grad_norm": 1.25,
        "response/length_mean": 14.0,
        "time/generate": 3.0,
        "time/reward": 0.0,
        "time/learn": 5.0,
        "time/sync": 1.0,
        "time/idle": 0.75,
        "time/journal": 0.05,
        "time/checksum": 0.2,
        "time/checkpoint": 0.0,
        "time/eval": 2.5 if plan == 1 else 0.0,
        "time/total": 10.0,
        "tokens_per_s": 400.0,
    }


def write_eval(run_dir: Path, name: str, rewards: list[float | None], *, text: str = "it is {task}") -> None:
    folder = run_dir / "eval"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.jsonl").open("w") as file:
        for task, reward in enumerate(rewards):
            answer = {
                "task": task,
                "row": {"id": f"test:{task}", "columns": {"answer": f"gold-{task}"}},
                "prompt": [{"role": "user", "content": f"How much is {task}?"}],
                "completion": text.format(task=task) + f" ({name})",
                "reward": reward,
                "finish_reason": "length" if task == 0 else "stop",
                "num_tokens": 8 if task == 0 else 2,
            }
            file.write(json.dumps(answer) + "\n")
