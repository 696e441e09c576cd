"""What a seed draws - settings, fault rates, delays, the moment of each fault - and the trace of what came of it.

Every draw is made in the order of virtual events, so that a seed gives the same run in any process. A seed has a
budget of faults: once it is spent nothing fails any more, and the run must come to its end.
"""

import math
import random
from collections import Counter
from typing import Any

from cauce.simulate.clock import START, VirtualClock

# Probability per occasion. A seed takes about half of the kinds, each at a tenth to three times its rate.
RATES = {
    "crash": 0.01,  # of the driver, at a write, a commit or a wake-up
    "takeover": 0.003,  # by another driver, at a wake-up
    "stop": 0.002,  # a signal, at a wake-up
    "disk_full": 0.002,  # from a write on, for a while
    "moved": 0.3,  # a resume on a machine of another numeric fingerprint
    "reward_raises": 0.02,
    **{f"rollout_{kind}": rate for kind, rate in (("death", 0.03), ("late_death", 0.02), ("hang", 0.01))},
    **{f"rollout_{kind}": rate for kind, rate in (("pause", 0.06), ("lost", 0.01), ("start", 0.02), ("idle", 0.01))},
    **{f"reward_{kind}": rate for kind, rate in (("death", 0.03), ("late_death", 0.02), ("hang", 0.02))},
    **{f"reward_{kind}": rate for kind, rate in (("pause", 0.02), ("lost", 0.01), ("start", 0.02), ("idle", 0.01))},
    **{f"learner_{kind}": rate for kind, rate in (("death", 0.02), ("late_death", 0.02), ("hang", 0.002))},
    **{f"learner_{kind}": rate for kind, rate in (("pause", 0.02), ("lost", 0.002), ("start", 0.02), ("idle", 0.01))},
}
RARE = ("moved", "takeover", "learner_hang", "learner_lost")  # taken by one seed in eight
SHARE_QUIET = 0.15  # seeds without any fault
SHARE_OF_ROWS = {"long": 0.05, "aborts": 0.02, "poison": 0.02, "non_finite": 0.03}  # traits of rows


class Crashed(BaseException):
    """The driver ends here, as by kill -9: nothing that comes after this line has happened."""


class Violation(BaseException):
    """What must never happen has happened. No handler of the run may take it for one of its own errors."""


class Script:
    """The draws of one seed. `quiet`: the same settings, other delays, and no fault."""

    def __init__(self, seed: int, *, quiet: bool = False) -> None:
        self.seed = seed
        self.clock = VirtualClock()
        self.rng = random.Random(f"cauce {seed} {'quiet' if quiet else 'faults'}")
        drawn = random.Random(f"cauce {seed} settings")
        self.settings = draw_settings(drawn)
        self.rows = draw_rows(drawn)
        rates = draw_rates(drawn)
        self.rates = {} if quiet else rates
        self.budget = drawn.randint(3, 30)
        self.counts: Counter[str] = Counter()  # faults since the driver's last start
        self.total: Counter[str] = Counter()
        self.losses: Counter[str] = Counter()  # per role: workers that the driver lost in a row without progress
        self.trace: list[str] = []

    def fires(self, kind: str) -> bool:
        """Whether this fault happens now."""
        rate = self.rates.get(kind, 0.0)
        if not rate or self.budget <= 0 or self.rng.random() >= rate:
            return False
        self.budget -= 1
        self.counts[kind] += 1
        self.total[kind] += 1
        self.log(f"FAULT {kind}")
        return True

    def delay(self, low: float, high: float) -> float:
        """Seconds between two bounds, on a logarithmic scale: most delays are short, a few are long."""
        return math.exp(self.rng.uniform(math.log(low), math.log(high)))

    def log(self, text: str) -> None:
        self.trace.append(f"{self.clock.time - START:11.4f} {text}")


def draw_settings(rng: random.Random) -> dict[str, Any]:
    """A small run, as settings of a recipe."""
    staleness = rng.choice([0, 0, 0, 1, 2, 3])
    mini_batches = rng.choice([1, 1, 2])
    return {
        "run.seed": rng.randrange(1000),
        "run.plans": rng.choice([1, 2, 2, 3, 3, 4, 6, 8]),
        "rollout.actors": rng.randint(1, 4),
        "rollout.group_size": rng.choice([2, 2, 3, 4]),
        "rollout.max_tokens": rng.randint(2, 8),
        "learner.tasks_per_plan": mini_batches * rng.randint(1, 3 // mini_batches),
        "learner.mini_batches": mini_batches,
        "learner.epochs": rng.choice([1, 1, 2]),
        "buffer.max_staleness": staleness,
        "buffer.max_reuse": rng.choice([1, 2]) if staleness else 1,
        "buffer.sampling": rng.choice(["in_order", "random"]) if staleness else "in_order",
        "weights.every": rng.randint(1, 2) if staleness else 1,
        "reward.workers": rng.randint(1, 3),
        "reward.timeout_s": rng.choice([5, 30]),
        "algorithm.dynamic_sampling": rng.random() < 0.3,
        "algorithm.mask_truncated": rng.random() < 0.2,
        "eval.every": rng.choice([0, 0, 1, 2]),
        "eval.at_start": rng.random() < 0.3,
        "checkpoint.every": rng.choice([0, 1, 2, 3]),
        "checkpoint.max_redo_s": rng.choice([1, 10, 60]),
        "checkpoint.keep": rng.randint(1, 2),
        "data.shuffle": rng.random() < 0.5,
        "data.max_prompt_tokens": 8,
    }


def draw_rows(rng: random.Random) -> list[dict[str, str]]:
    """The data: a few rows, some of them with a trait that makes trouble."""
    rows = []
    for number in range(rng.randint(4, 24)):
        traits = [trait for trait, share in SHARE_OF_ROWS.items() if rng.random() < share]
        rows.append({"prompt": f"row {number}", "trait": traits[0] if traits and number else "plain"})
    return rows


def draw_rates(rng: random.Random) -> dict[str, float]:
    """Which faults a seed has, and how often."""
    if rng.random() < SHARE_QUIET:
        return {}
    chances = {kind: 0.125 if kind in RARE else 0.5 for kind in RATES}
    return {kind: RATES[kind] * 10 ** rng.uniform(-1, 0.5) for kind in RATES if rng.random() < chances[kind]}
