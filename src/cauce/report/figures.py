"""The figures of the report, as data for plotly: which numbers, on which axes, with which words.

Pure functions of the metric rows. Colours are names ("$reward") that the page replaces by those of its light
or dark theme; drawing happens in the browser (assets/report.js).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cauce.metrics.names import TIME_PARTS
from cauce.metrics.summary import EvalStats
from cauce.report.family import Relative

MAX_DISTINCT = 12  # rewards with at most so many values are counted by value, others in bins
NUM_BINS = 20
CURVES: tuple[tuple[str, str, str, str], ...] = (  # metric, title, colour, what a reader should know
    ("loss/policy", "Policy loss", "$loss", "Near 0 is normal: group-relative advantages sum to zero."),
    (
        "policy/entropy",
        "Entropy",
        "$entropy",
        "Nats per token. Falls as the policy commits; a drop to 0 is too much.",
    ),
    ("optim/grad_norm", "Gradient norm", "$grad", "Before clipping. Above 0 whenever something is learned."),
    (
        "sampler/log_ratio_abs_mean",
        "Sampler against learner",
        "$ratio",
        "Mean |log ratio| per token. Small where both compute in one precision; a jump means stale weights.",
    ),
    (
        "sampler/effective_sample_size",
        "Effective sample size",
        "$entropy",
        "Share of the tokens that count once weighed by how likely this policy finds them. Near 1: as if its own.",
    ),
    ("response/length_mean", "Answer length", "$length", "Tokens per answer, truncated ones included."),
    ("response/truncated_fraction", "Truncated answers", "$truncated", "Share that hit the token limit."),
    (
        "reward/zero_variance_fraction",
        "Groups without signal",
        "$zero",
        "Share of groups whose answers all earned the same: they teach nothing.",
    ),
    ("policy/kl_reference", "KL to the reference", "$ratio", "Per token, against the frozen starting model."),
    (
        "policy/clip_fraction_high",
        "Clipped above",
        "$grad",
        "Share of tokens whose gradient the bound removed.",
    ),
    (
        "policy/clip_fraction_low",
        "Clipped below",
        "$loss",
        "Share of tokens whose gradient the bound removed.",
    ),
    ("optim/lr", "Learning rate", "$idle", "Of the plan's last optimizer step."),
    ("tokens_per_s", "Speed", "$generate", "Sampled tokens per second of plan time."),
)
ALWAYS_ZERO_IS_DULL = {"policy/clip_fraction_high", "policy/clip_fraction_low", "policy/kl_reference"}
PART_COLOURS = {part: "$score" if part == "reward" else f"${part}" for part in TIME_PARTS}
SHARES = {"response/truncated_fraction", "reward/zero_variance_fraction", "sampler/effective_sample_size"}
# What the samples decide is the same in a run and its forks; what the learner does with them is compared.
COMPARED = ("loss/", "policy/", "optim/", "sampler/")
OWN_COLOUR = "$reward"  # among relatives one colour is one run, in every figure
KIN_COLOURS = tuple(f"$kin{i}" for i in range(1, 7))


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One plot: plotly traces, its layout, and the words below it. `is_wide` takes a row of the page."""

    key: str
    title: str
    note: str
    traces: list[dict[str, Any]]
    layout: dict[str, Any]
    is_wide: bool = False


def learning_figure(
    rows: Sequence[Mapping[str, Any]], evals: Mapping[str, Sequence[tuple[int, float, EvalStats | None]]]
) -> Figure | None:
    """Reward of the training samples, and held-out accuracy with its interval, by plan."""
    traces = []
    plans, rewards = _series(rows, "reward/mean")
    if plans:
        traces.append(_line(plans, rewards, "reward of training samples", "$reward"))
    for name, points in evals.items():
        trace = _line([point[0] for point in points], [point[1] for point in points], f"held-out: {name}", "$held_out")
        trace["mode"] = "lines+markers"
        trace["marker"] = {"size": 8, "color": "$held_out"}
        if all(stats is not None for _, _, stats in points):
            trace["error_y"] = {
                "type": "data",
                "symmetric": False,
                "array": [stats.high - accuracy for _, accuracy, stats in points if stats],
                "arrayminus": [accuracy - stats.low for _, accuracy, stats in points if stats],
                "color": "$held_out",
                "thickness": 1.2,
                "width": 4,
            }
        traces.append(trace)
    if not traces:
        return None
    return Figure(
        key="learning",
        title="Reward and held-out accuracy",
        note="Reward jumps from plan to plan, since each has other tasks. Held-out tasks are not trained on, "
        "their answers are greedy, bars are 95 % intervals. Plan 0 is the model before training.",
        traces=traces,
        layout={"yaxis": {"rangemode": "tozero"}, "showlegend": True},
        is_wide=True,
    )


def metric_figures(
    rows: Sequence[Mapping[str, Any]], *, name: str = "this run", others: Sequence[Relative] = ()
) -> list[Figure]:
    """One small curve for each metric that the run has, with those of its relatives where they can differ."""
    figures = []
    for metric, title, colour, note in CURVES:
        plans, values = _series(rows, metric)
        is_dull = metric in ALWAYS_ZERO_IS_DULL or (metric == "tokens_per_s" and bool(others))
        if not plans or (is_dull and not any(values)):
            continue
        traces = [_line(plans, values, metric, colour)]
        kin = _kin_lines(metric, others) if metric.startswith(COMPARED) else []
        if kin:
            traces = [*kin, _line(plans, values, name, OWN_COLOUR)]
        axis: dict[str, Any] = {"tickformat": ".0%"} if metric in SHARES else {"exponentformat": "power"}
        if metric not in ("loss/policy",):
            axis["rangemode"] = "tozero"
        figures.append(
            Figure(
                key=metric.replace("/", "-"),
                title=title,
                note=note,
                traces=traces,
                layout={"yaxis": axis, "showlegend": bool(kin)},
            )
        )
    return figures


def _kin_lines(metric: str, others: Sequence[Relative]) -> list[dict[str, Any]]:
    lines = []
    for other, colour in zip(others, KIN_COLOURS, strict=False):
        plans, values = _series(other.rows, metric)
        if plans:
            line = _line(plans, values, other.name, colour)
            lines.append({**line, "line": {**line["line"], "dash": "solid" if other.forked_at is None else "dot"}})
    return lines


def time_figure(rows: Sequence[Mapping[str, Any]]) -> Figure | None:
    """Seconds of each plan, stacked by what they were spent on."""
    traces = []
    for part, names in TIME_PARTS.items():
        known = [row for row in rows if row["plan"] > 0 and any(row.get(name) is not None for name in names)]
        plans = [row["plan"] for row in known]
        seconds = [sum(row.get(name) or 0.0 for name in names) for row in known]
        if plans:
            traces.append(
                {
                    "type": "bar",
                    "x": plans,
                    "y": seconds,
                    "name": part,
                    "marker": {"color": PART_COLOURS[part]},
                }
            )
    if not traces:
        return None
    return Figure(
        key="time",
        title="Where the time goes",
        note=(
            "Seconds per plan. Record is the journal and checksums, idle what no other part accounts for; checkpoint "
            "and eval came before the plan they stand at."
        ),
        traces=traces,
        layout={
            "barmode": "stack",
            "legend": {"traceorder": "normal"},
            "showlegend": True,
            "bargap": 0.15,
            "yaxis": {"ticksuffix": " s"},
        },
        is_wide=True,
    )


def reward_figure(first: Mapping[int, Sequence[float]], last: Mapping[int, Sequence[float]]) -> Figure | None:
    """Distribution of single rewards in the first plans against the last ones, where there are two ends."""
    parts = [(rewards, colour) for rewards, colour in ((first, "$before"), (last, "$reward")) if rewards]
    if not parts:
        return None
    values = [[reward for plan in rewards.values() for reward in plan] for rewards, _ in parts]
    labels, counts = reward_bins(values)
    traces = [
        {
            "type": "bar",
            "x": labels,
            "y": [count / len(sample) for count in part_counts],
            "name": _plans_name(sorted(rewards)),
            "marker": {"color": colour},
        }
        for (rewards, colour), sample, part_counts in zip(parts, values, counts, strict=True)
    ]
    return Figure(
        key="rewards",
        title="Rewards of single answers",
        note="Share of answers by the reward they earned.",
        traces=traces,
        layout={
            "barmode": "group",
            "showlegend": True,
            "xaxis": {"type": "category", "title": {"text": "reward"}},
            "yaxis": {"tickformat": ".0%"},
        },
        is_wide=True,
    )


def reward_bins(samples: Sequence[Sequence[float]]) -> tuple[list[str], list[list[int]]]:
    """Labels of common bins, and the count of each sample in each: by value where values are few."""
    distinct = sorted({round(value, 6) for sample in samples for value in sample})
    if len(distinct) <= MAX_DISTINCT:
        return [f"{value:g}" for value in distinct], [
            [sum(round(value, 6) == wanted for value in sample) for wanted in distinct] for sample in samples
        ]
    low, high = distinct[0], distinct[-1]
    step = (high - low) / NUM_BINS
    counts = [[0] * NUM_BINS for _ in samples]
    for count, sample in zip(counts, samples, strict=True):
        for value in sample:
            count[min(int((value - low) / step), NUM_BINS - 1)] += 1
    return [f"{low + step * i:.3g} to {low + step * (i + 1):.3g}" for i in range(NUM_BINS)], counts


def _series(rows: Sequence[Mapping[str, Any]], metric: str) -> tuple[list[int], list[float | None]]:
    """Plans (from 1) that know the metric, and its values; None, a gap, where it was not finite."""
    known = [row for row in rows if row["plan"] > 0 and metric in row]
    if all(row[metric] is None for row in known):
        return [], []
    return [row["plan"] for row in known], [row[metric] for row in known]


def _line(plans: Sequence[int], values: Sequence[float | None], name: str, colour: str) -> dict[str, Any]:
    return {
        "type": "scatter",
        "x": list(plans),
        "y": list(values),
        "name": name,
        # One point has no line to draw.
        "mode": "lines" if len(plans) > 1 else "markers",
        "line": {"color": colour, "width": 2},
        "marker": {"size": 8, "color": colour},
    }


def _plans_name(plans: Sequence[int]) -> str:
    return f"plan {plans[0]}" if len(plans) == 1 else f"plans {plans[0]} to {plans[-1]}"
