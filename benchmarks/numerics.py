"""`first_plan_log_ratio_*`: how far sampler and learner are apart on the first plan, before any weight has changed.

The mean over trained tokens of |log p_learner - log p_sampler|. Every group carries signal here, so that every token is
looked at; the figure is the largest of three seeds.
"""

from benchmarks.bench import Bench
from benchmarks.ours import REWARDS
from benchmarks.own_run import train
from benchmarks.results import Result

BOUND_FP32 = 1e-4
SEEDS = (0, 1, 2)
METRIC = "sampler/log_ratio_abs_mean"


def fp32(bench: Bench) -> dict[str, Result]:
    return {"first_plan_log_ratio_fp32": measure(bench, dtype="fp32", bound=BOUND_FP32)}


def bf16(bench: Bench) -> dict[str, Result]:
    """Reported without a bound: both sides round differently at every layer, by design of the dtype."""
    return {"first_plan_log_ratio_bf16": measure(bench, dtype="bf16", bound=None)}


def measure(bench: Bench, *, dtype: str, bound: float | None) -> Result:
    values = []
    settings = {
        "run.plans": 1,
        "model.path": bench.model,
        "data.train": "builtin:addition/train",
        "reward.fn": f"{REWARDS}:ramp",
        "rollout.max_tokens": 48,
        "engine.dtype": dtype,
        "learner.dtype": dtype,
        "eval.at_start": "false",
    }
    for seed in SEEDS:
        name = f"first_plan_log_ratio_{dtype}"
        run = train(bench, name, "grpo", {**settings, "run.seed": seed})
        plan = run.plans[0]
        if plan["learner/skipped_groups"]:
            raise RuntimeError(f"seed {seed}: {plan['learner/skipped_groups']} groups were not looked at")
        values.append(float(plan[METRIC]))
    return Result(
        ours=max(values),
        peer=bound,
        unit="mean |log ratio|, the largest of the seeds",
        dtype=dtype,
        runs=len(values),
        peer_is="bound" if bound is not None else "",
        spread={"ours": [min(values), max(values)]},
        settings={"seeds": list(SEEDS), "prompts": 8, "group_size": 8, "max_tokens": 48, "attention": "sdpa"},
    )
