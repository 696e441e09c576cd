"""`grpo_step_vs_trl` and its variants: seconds of one GRPO step, ours against TRL's, medians of steps in turns."""

import tempfile
from pathlib import Path
from statistics import median

from benchmarks.bench import Bench
from benchmarks.duel import WARM_UP, Side, duel, try_trl
from benchmarks.machine import describe
from benchmarks.results import Result
from benchmarks.trl_environment import TrlEnvironment, ensure
from benchmarks.trl_settings import Trial, TrlSettings, choose, table, tried
from benchmarks.workload import Workload

TRIAL_STEPS = WARM_UP + 1
COMMON = {
    "kl_coef": 0,
    "optimizer": "AdamW, weight decay 0, gradient norm clipped at 1",
    "steps_per_batch": 1,
    "turns": "one side computes while the other waits",
}


def best_of_each(bench: Bench) -> dict[str, Result]:
    """Each side with the dtype that is fastest for it, rewards as they come."""
    return {"grpo_step_vs_trl": measure(bench, name="grpo_step_vs_trl", dtype=None, reward="correct")}


def fp32(bench: Bench) -> dict[str, Result]:
    return {"grpo_step_vs_trl_fp32": measure(bench, name="grpo_step_vs_trl_fp32", dtype="fp32", reward="correct")}


def bf16(bench: Bench) -> dict[str, Result]:
    return {"grpo_step_vs_trl_bf16": measure(bench, name="grpo_step_vs_trl_bf16", dtype="bf16", reward="correct")}


def all_signal(bench: Bench) -> dict[str, Result]:
    """Every group carries signal, so that nothing can be skipped."""
    name = "grpo_step_vs_trl_all_signal"
    return {name: measure(bench, name=name, dtype=None, reward="ramp")}


def measure(bench: Bench, *, name: str, dtype: str | None, reward: str) -> Result:
    """One comparison; `dtype` None lets each side have its best."""
    environment = ensure()
    trials, chosen = chosen_trl(bench, environment, dtype)
    with tempfile.TemporaryDirectory() as folder:
        workload = bench.workload(Path(folder), reward=reward, num_steps=WARM_UP + bench.steps)
        ours, peer = duel(
            bench,
            workload,
            name=name,
            environment=environment,
            settings=chosen,
            dtype=dtype or "auto",
        )
    if reward == "ramp":
        require_signal(ours, peer)
    return as_result(ours, peer, workload, chosen=chosen, trials=trials, environment=environment)


def require_signal(*sides: Side) -> None:
    """A group without signal could be skipped, and then the figure would not be what its name says."""
    silent = max(step.silent_groups for side in sides for step in side.steps)
    if silent > 0:
        raise RuntimeError(f"a share of {silent:g} of the groups carried no signal; the reward must differ in each")


def chosen_trl(bench: Bench, environment: TrlEnvironment, dtype: str | None) -> tuple[list[Trial], TrlSettings]:
    """TRL's fastest settings of a dtype, with the trials that say so. Timed on rewards as they come."""
    with tempfile.TemporaryDirectory() as folder:
        workload = bench.workload(Path(folder), reward="correct", num_steps=TRIAL_STEPS)
        trials = tried(
            lambda settings: try_trl(bench, workload, environment=environment, settings=settings),
            dtype=dtype,
            key={
                "model": bench.model,
                "work": workload.settings(),
                "versions": dict(environment.versions),
                "machine": describe(),
            },
            cache=bench.cache / "trl_settings.json",
        )
    return trials, choose(trials, dtype).settings


def as_result(
    ours: Side,
    peer: Side,
    workload: Workload,
    *,
    chosen: TrlSettings,
    trials: list[Trial],
    environment: TrlEnvironment,
) -> Result:
    """The figure of a comparison."""
    ratios = [theirs / own for own, theirs in zip(ours.seconds, peer.seconds, strict=True)]
    dtype = {"bfloat16": "bf16", "float32": "fp32"}[ours.ready["dtype"]]
    return Result(
        ours=median(ours.seconds),
        peer=median(peer.seconds),
        unit="s per step",
        dtype=f"{dtype} against {chosen.dtype}",
        runs=len(ours.steps),
        peer_is=environment.title,
        spread={
            "ours": [min(ours.seconds), max(ours.seconds)],
            "peer": [min(peer.seconds), max(peer.seconds)],
            "ratio": [min(ratios), max(ratios)],
        },
        settings={
            "work": {"model": Path(workload.model).name, **workload.settings(), **COMMON, "warm_up_steps": WARM_UP},
            "ours": ours.ready["settings"],
            "peer": {"chosen": chosen.label, "threads": peer.ready["threads"], "gradient_checkpointing": False},
            "peer_tried_s": table(trials),
            "peer_versions": dict(environment.versions),
        },
        detail={"ours": ours.summary() | ours.end, "peer": peer.summary()},
    )
