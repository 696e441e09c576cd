"""`startup`: import, quick commands, and from the command to the first reward of the quickstart, with its memory.

One name measures a family of figures: startup_import, _help, _doctor, _first_reward and _peak_memory.
"""

import subprocess
import sys
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

from benchmarks.bench import Bench
from benchmarks.own_run import COMMAND, OwnRun, train
from benchmarks.results import Result
from benchmarks.trl_environment import ROOT

REPEATS = 5
COMMAND_BOUND_S = 2.0
MEMORY_BOUND_MB = 6 * 1024
NUM_PLANS = 3


def startup(bench: Bench) -> dict[str, Result]:
    """All figures of the family."""
    python = [sys.executable, "-c"]
    bare = median(seconds_of([*python, "pass"]))
    results = {
        "startup_import": timed([*python, "import cauce"], bound=None, detail={"bare_python_s": bare}),
        "startup_help": timed([str(COMMAND), "--help"], bound=COMMAND_BOUND_S),
        "startup_doctor": timed([str(COMMAND), "doctor"], bound=COMMAND_BOUND_S),
    }
    settings = {"run.plans": NUM_PLANS, "eval.every": 0}
    run = train(bench, "startup", "quickstart", {"model.path": bench.model, **settings})
    dtype = bench.dtype
    results["startup_first_reward"] = Result(
        ours=first_reward_s(run),
        peer=None,
        unit="s",
        dtype=dtype,
        runs=1,
        settings={"recipe": "quickstart", "model": "on disk already"},
        detail={
            "held_out_evaluation_done_s": run.rows[0]["time"] - run.began,
            "first_plan_done_s": run.plans[0]["time"] - run.began,
        },
    )
    results["startup_peak_memory"] = Result(
        ours=run.summary["peak_memory_mb"],
        peer=MEMORY_BOUND_MB,
        unit="MB",
        dtype=dtype,
        runs=1,
        peer_is="bound",
        settings={"recipe": "quickstart", "plans": NUM_PLANS, "counted": "all processes of the run, shared pages once"},
    )
    return results


def first_reward_s(run: OwnRun) -> float:
    """From the call of the command to all rewards of the first plan; the evaluation before training lies in between.

    A plan's row is written when it has been trained on, so its training is taken off.
    """
    plan = run.plans[0]
    return float(plan["time"] - plan["time/learn"] - plan["time/checksum"] - run.began)


def timed(command: Sequence[str], *, bound: float | None, detail: dict[str, Any] | None = None) -> Result:
    """The median wall time of a command, in a warm file cache."""
    seconds = seconds_of(command)
    return Result(
        ours=median(seconds),
        peer=bound,
        unit="s",
        dtype="",
        runs=len(seconds),
        peer_is="bound" if bound is not None else "",
        spread={"ours": [min(seconds), max(seconds)]},
        detail=detail or {},
    )


def seconds_of(command: Sequence[str]) -> list[float]:
    """Wall seconds of each of several calls, after one that warms the file cache."""
    seconds = []
    for _ in range(1 + REPEATS):
        began = time.perf_counter()
        subprocess.run(list(command), cwd=ROOT, stdout=subprocess.DEVNULL, check=True, timeout=120)
        seconds.append(time.perf_counter() - began)
    return seconds[1:]
