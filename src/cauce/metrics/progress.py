"""What a view knows of a run so far, and the sentences it derives from that. Views only draw it.

Holds no clock and no terminal: time comes in as an argument, so that every line can be tested.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from cauce.metrics.names import TIME_PARTS
from cauce.metrics.observer import RunInfo
from cauce.metrics.summary import EvalStats, eval_stats, read_eval, time_split


@dataclass(slots=True)
class Progress:
    """The state of one run as its observer has heard it."""

    info: RunInfo
    started: float  # monotonic seconds
    phase: tuple[str, int, int] = ("", 0, 0)
    plan: int = 0
    first_plan: int = 0  # the first plan heard of: a resumed run does not begin at 1
    first_plan_at: float = 0.0
    last_plan_at: float = 0.0
    reward: list[float] = field(default_factory=list)
    accuracy: list[tuple[int, float]] = field(default_factory=list)
    stats: EvalStats | None = None  # of the newest evaluation, where its answers are on disk
    metrics: dict[str, float] = field(default_factory=dict)
    time_s: dict[str, float] = field(default_factory=dict)

    def add_plan(self, plan: int, metrics: Mapping[str, float], *, now: float) -> None:
        if not self.first_plan:
            self.first_plan, self.first_plan_at = plan, now
        self.plan, self.last_plan_at = plan, now
        self.metrics = dict(metrics)
        if metrics.get("reward/mean") is not None:
            self.reward.append(float(metrics["reward/mean"]))
        for part, seconds in time_split([metrics]).items():
            self.time_s[part] = self.time_s.get(part, 0.0) + seconds

    def add_eval(self, plan: int, accuracy: float) -> None:
        self.accuracy.append((plan, accuracy))
        folder = self.info.run_dir / "eval"
        names = ["before.jsonl"] if plan == 0 else [f"plan_{plan:06d}.jsonl", "after.jsonl"]
        found = [stats for name in names if (stats := eval_stats(read_eval(folder / name))) is not None]
        self.stats = found[0] if found else None

    def seconds_per_plan(self) -> float | None:
        """Mean over the plans after the first, which also pays for warming up; the first alone at first."""
        done = self.plan - self.first_plan
        if done > 0:
            return (self.last_plan_at - self.first_plan_at) / done
        return self.metrics.get("time/total")

    def seconds_left(self, now: float) -> float | None:
        per_plan = self.seconds_per_plan()
        if per_plan is None:
            return None
        return max(0.0, per_plan * (self.info.num_plans - self.plan) - (now - self.last_plan_at))

    def time_shares(self) -> list[tuple[str, float]]:
        total = sum(self.time_s.values())
        return [(part, self.time_s.get(part, 0.0) / total) for part in TIME_PARTS] if total > 0 else []

    def normal(self) -> str:
        """One sentence on what a newcomer may worry about right now, or should."""
        metrics = self.metrics
        if not self.plan:
            return "before plan 1 the untrained model answers the held-out tasks, to compare with later"
        if metrics.get("optim/skipped"):
            return "the last plan met non-finite numbers and was skipped; the weights are as they were before it"
        if float(metrics.get("response/truncated_fraction") or 0.0) > 0.5:
            return "most answers hit rollout.max_tokens and end unfinished; if that persists, raise it"
        if float(metrics.get("reward/zero_variance_fraction") or 0.0) > 0.75:
            return "most groups earn equal rewards and teach nothing: tasks are too easy or too hard for it"
        loss = metrics.get("loss/policy")
        if self.plan <= 5 and loss is not None and abs(loss) < 0.05:
            return "a loss near 0 is normal: group-relative advantages sum to zero; watch reward and held-out accuracy"
        return "reward jumps, since each plan has other tasks; watch its trend and held-out accuracy"


def duration(seconds: float) -> str:
    """8:05, or 1:02:03 from an hour on."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def plan_line(progress: Progress, *, now: float) -> str:
    """The plain line of the newest plan, for logs and pipes."""
    metrics = progress.metrics
    parts = [f"plan {progress.plan}/{progress.info.num_plans}"]
    for name, label, form in (
        ("reward/mean", "reward", ".3f"),
        ("loss/policy", "loss", "z.4f"),
        ("optim/grad_norm", "grad norm", ".2f"),
        ("response/length_mean", "length", ".1f"),
        ("tokens_per_s", "tokens/s", ".0f"),
        ("time/total", "seconds", ".1f"),
    ):
        if metrics.get(name) is not None:
            parts.append(f"{label} {metrics[name]:{form}}")
    left = progress.seconds_left(now)
    if left is not None and progress.plan < progress.info.num_plans:
        parts.append(f"{duration(left)} left")
    return "  ".join(parts)
