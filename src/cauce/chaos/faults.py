"""Which faults a chaos run meets, and when."""

import random
from collections.abc import Mapping

from cauce.errors import RecipeError

# kind -> what is done
KINDS = {
    "rollout": "kill -9 of a rollout actor",
    "reward": "kill -9 of a reward worker",
    "learner": "kill -9 of the learner",
    "driver": "kill -9 of the driver, and `cauce resume`",
    "hang": "kill -STOP of a rollout actor: it holds its work and says nothing",
    "pause": "SIGTERM to the driver, which ends after its plan, and `cauce resume`",
}


def parse_faults(text: str) -> dict[str, float]:
    """`rollout=1,driver=0.2` -> faults per minute.

    Raises:
        RecipeError: for a kind that does not exist, or a rate that is no positive number.
    """
    rates: dict[str, float] = {}
    for part in text.split(","):
        kind, _, rate = (word.strip() for word in part.partition("="))
        if kind not in KINDS:
            known = "".join(f"\n  {name}: {what}" for name, what in KINDS.items())
            raise RecipeError(f"--faults: there is no kind {kind!r}. There are:{known}")
        try:
            rates[kind] = float(rate or "1")
        except ValueError:
            rates[kind] = 0.0
        if not 0 < rates[kind] <= 60:
            raise RecipeError(f"--faults: {kind}={rate}: give faults per minute, above 0 and at most 60")
    return rates


class Schedule:
    """When each kind is due next, in seconds of a run at work: at its rate, jittered by half."""

    def __init__(self, rates: Mapping[str, float], seed: int) -> None:
        self._rates = dict(rates)
        self.random = random.Random(seed)
        self._next = {kind: self._pause(kind) for kind in rates}

    def due(self, seconds: float) -> list[str]:
        """The kinds whose moment has come, the longest due first."""
        return sorted((kind for kind in self._next if self._next[kind] <= seconds), key=lambda kind: self._next[kind])

    def done(self, kind: str, seconds: float) -> None:
        """It happened now. One that was late is not made up for."""
        self._next[kind] = seconds + self._pause(kind)

    def _pause(self, kind: str) -> float:
        return 60 / self._rates[kind] * self.random.uniform(0.5, 1.5)
