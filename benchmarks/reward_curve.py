"""`reward_curve_vs_trl`: mean reward of each of ten steps, ours and TRL's, on the same prompts in the same order.

Both train in fp32: TRL's fastest bf16 keeps its weights in bf16 too, where most steps of this size round to nothing.
Both sample with a seed of their own kind, so the curves need not coincide; the chart is drawn next to this file.
"""

import tempfile
from pathlib import Path

from benchmarks.bench import Bench
from benchmarks.chart import line_chart
from benchmarks.duel import Side, duel, mean
from benchmarks.grpo_step import COMMON, chosen_trl
from benchmarks.results import Result
from benchmarks.trl_environment import ensure

NAME = "reward_curve_vs_trl"
NUM_STEPS = 10
LAST = 5  # steps whose mean is the figure


def reward_curve(bench: Bench) -> dict[str, Result]:
    """Both curves; the figure is the mean reward of the last five steps."""
    environment = ensure()
    _, chosen = chosen_trl(bench, environment, "fp32")
    with tempfile.TemporaryDirectory() as folder:
        workload = bench.workload(Path(folder), reward="correct", num_steps=NUM_STEPS)
        ours, peer = duel(bench, workload, name=NAME, environment=environment, settings=chosen, dtype="fp32", warm_up=0)
    curves = {"Cauce": rewards(ours), environment.title: rewards(peer)}
    svg = line_chart(
        curves,
        title="Two-digit addition, SmolLM2-135M, GRPO, 8 prompts x 8 answers",
        x_name="step",
        y_name="mean reward",
        y_max=axis_top([value for values in curves.values() for value in values]),
    )
    (bench.charts / "reward_curve.svg").write_text(svg, encoding="utf-8")
    return {
        NAME: Result(
            ours=mean(rewards(ours)[-LAST:]),
            peer=mean(rewards(peer)[-LAST:]),
            unit=f"mean reward of the last {LAST} of {NUM_STEPS} steps",
            dtype="fp32 against fp32",
            runs=1,
            better="higher",
            peer_is=environment.title,
            settings={"work": {**workload.settings(), **COMMON}, "peer": {"chosen": chosen.label}},
            detail={
                "ours": rewards(ours),
                "peer": rewards(peer),
                "ours_s": sum(ours.seconds),
                "peer_s": sum(peer.seconds),
            },
        )
    }


def rewards(side: Side) -> list[float]:
    return [step.reward for step in side.steps]


def axis_top(values: list[float]) -> float:
    """The next multiple of 0.2 above all values, so that low curves are not flat lines."""
    return next(top / 5 for top in range(1, 6) if top == 5 or max(values) < top / 5)
