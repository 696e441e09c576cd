"""summary.json, and the held-out answers that it compares: pure functions of what the run recorded.

An evaluation is a file of answers, RUN/eval/before.jsonl, plan_000010.jsonl or after.jsonl. Its accuracy is
the mean reward over scored answers; an answer whose reward failed is counted apart, never as 0.
"""

import functools
import importlib.metadata
import json
import math
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cauce.metrics.names import TIME_PARTS

Z95 = 1.959963984540054
GOLD_COLUMNS = ("answer", "gold", "ground_truth", "solution", "target", "label")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalAnswer:
    """One greedy answer to a held-out task; `reward` is None where the reward gave no number."""

    task: int
    row: dict[str, Any]
    prompt: str
    completion: str
    reward: float | None
    finish_reason: str
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalStats:
    """An evaluation in numbers; `low` and `high` bound the 95 % interval of the accuracy."""

    count: int
    unscored: int
    accuracy: float
    low: float
    high: float
    length_mean: float
    truncated_fraction: float


def read_eval(path: Path) -> list[EvalAnswer]:
    """Answers of one evaluation file; empty where the file is missing."""
    if not path.exists():
        return []
    answers = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue  # the last line of a file that a crash tore
        reward = record.get("reward")
        row = record.get("row")
        answers.append(
            EvalAnswer(
                task=int(record.get("task") or 0),
                row=row if isinstance(row, dict) else {"id": row},
                prompt=_as_text(record.get("prompt", "")),
                completion=str(record.get("completion", "")),
                reward=None if reward is None else float(reward),
                finish_reason=str(record.get("finish_reason", "")),
                num_tokens=int(record.get("num_tokens") or 0),
            )
        )
    return answers


def eval_stats(answers: Sequence[EvalAnswer]) -> EvalStats | None:
    """The numbers of an evaluation; None where no answer was scored."""
    rewards = [answer.reward for answer in answers if answer.reward is not None]
    if not rewards:
        return None
    low, high = mean_interval(rewards)
    return EvalStats(
        count=len(answers),
        unscored=len(answers) - len(rewards),
        accuracy=sum(rewards) / len(rewards),
        low=low,
        high=high,
        length_mean=sum(answer.num_tokens for answer in answers) / len(answers),
        truncated_fraction=sum(answer.finish_reason == "length" for answer in answers) / len(answers),
    )


def gold_of(row: Mapping[str, Any]) -> str:
    """The gold answer where the row has one under a usual name, to read; scoring never uses this."""
    columns = row.get("columns", row)
    for name in GOLD_COLUMNS:
        if isinstance(columns, Mapping) and columns.get(name) not in (None, ""):
            return str(columns[name])
    return ""


def mean_interval(rewards: Sequence[float]) -> tuple[float, float]:
    """95 % interval of a mean: Wilson's where every reward is 0 or 1, the normal one elsewhere."""
    count = len(rewards)
    mean = sum(rewards) / count
    if all(reward in (0.0, 1.0) for reward in rewards):
        return wilson(mean, count)
    variance = sum((reward - mean) ** 2 for reward in rewards) / max(count - 1, 1)
    half = Z95 * math.sqrt(variance / count)
    return mean - half, mean + half


def wilson(share: float, count: int) -> tuple[float, float]:
    """Wilson's 95 % score interval of a share of `count` trials; inside 0..1, and never of width 0."""
    denominator = 1 + Z95**2 / count
    centre = (share + Z95**2 / (2 * count)) / denominator
    half = Z95 * math.sqrt(share * (1 - share) / count + Z95**2 / (4 * count**2)) / denominator
    return max(0.0, centre - half), min(1.0, centre + half)


def build_summary(
    rows: Sequence[Mapping[str, Any]],
    *,
    run: str,
    status: str,
    num_plans: int,
    wall_s: float,
    before: EvalStats | None,
    after: EvalStats | None,
    peak_memory_mb: float,
    details: Mapping[str, Any],
) -> dict[str, Any]:
    """What summary.json holds, from the rows of metrics.jsonl.

    Args:
        run: the folder of the run, as commands take it.
        status: "finished", "stopped" (by a person) or "failed".
        num_plans: how many the recipe asks for; `plans` counts those that are done.
        details: further facts of the run (model, algorithm, seed, versions, a failure), kept as they are.
    """
    done = [row for row in rows if row["plan"] > 0]
    return {
        "run": run,
        "status": status,
        "plans": len(done),
        "num_plans": num_plans,
        "wall_s": round(wall_s, 3),
        "eval_before": before.accuracy if before else None,
        "eval_before_interval": [before.low, before.high] if before else None,
        "eval_after": after.accuracy if after else None,
        "eval_after_interval": [after.low, after.high] if after else None,
        "eval_tasks": before.count if before else after.count if after else 0,
        "reward_first": _number(done[0].get("reward/mean")) if done else None,
        "reward_last": _number(done[-1].get("reward/mean")) if done else None,
        "tokens_per_s": tokens_per_s(done),
        "peak_memory_mb": round(peak_memory_mb, 1),
        "time_s": time_split(done),
        "skipped_plans": sum(bool(row.get("optim/skipped")) for row in done),
        **details,
    }


@functools.cache
def environment() -> Mapping[str, str]:
    """Versions and machine of this process, for `details`; nothing is imported to ask."""
    facts = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
    }
    for package in ("cauce", "torch", "transformers", "ray"):
        facts[package] = importlib.metadata.version(package)
    facts["cpus"] = str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())
    return facts


def time_split(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds of each part of the time split, summed over the plans."""
    return {
        part: round(sum(_number(row.get(name)) or 0.0 for row in rows for name in names), 3)
        for part, names in TIME_PARTS.items()
    }


def tokens_per_s(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """All sampled tokens over all plan time: a plan's rate weighs by its time, so it is no mean of means."""
    pairs = [(_number(row.get("tokens_per_s")), _number(row.get("time/total"))) for row in rows]
    known = [(rate, seconds) for rate, seconds in pairs if rate is not None and seconds]
    total = sum(seconds for _, seconds in known)
    return round(sum(rate * seconds for rate, seconds in known) / total, 2) if total else None


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _as_text(prompt: Any) -> str:
    """A prompt of messages as lines of text; a string stays as it is."""
    if isinstance(prompt, list):
        return "\n".join(f"{message.get('role', '')}: {message.get('content', '')}" for message in prompt)
    return str(prompt)
