"""Names what a run waits for when nothing comes, within a minute, and ends a run to which nothing will come.

It only speaks, and stops the run at last. Who acts on a worker that is silent is its pool (after HANG_S of session.py,
or the reward's own limit) and, for the learner, runtime/remote_learner.py.
"""

from collections.abc import Callable, Sequence

from cauce.errors import TrainingStopped
from cauce.runtime.world import Call, Clock

WARNING_S = 45.0
LOOK_S = 1.0  # between two looks
# One verb of a learner may take long: it is late once it takes so many times the longest so far, and at the latest
# after LEARNER_S.
USUAL = 3
LEARNER_S = 600.0


class Watchdog:
    """Looks at the calls that are out after each turn."""

    def __init__(self, *, clock: Clock, limit_s: float, tell: Callable[[str], None]) -> None:
        self._clock = clock
        self._limit_s = limit_s
        self._tell = tell
        self._last_news = self._last_look = clock.monotonic()
        self._longest_verb = 0.0
        self._told: set[Call] = set()
        self._has_warned = False

    def look(
        self,
        calls: Sequence[Call],
        done: Sequence[Call],
        *,
        is_news: bool,
        waiting_for: Callable[[], Sequence[str]],
    ) -> None:
        """`waiting_for` says what each worker is at, in lines that begin with its name.

        Raises:
            TrainingStopped: after the limit without news.
        """
        now = self._clock.monotonic()
        for call in done:
            if call.worker.role == "learner":
                self._longest_verb = max(self._longest_verb, now - call.started)
        if is_news:
            self._last_news, self._has_warned = now, False
        if now - self._last_look < LOOK_S:
            return
        self._last_look = now
        self._name_the_late(calls, done, now, waiting_for)
        silent = now - self._last_news
        if silent > WARNING_S and not self._has_warned:
            self._has_warned = True
            if not self._told:
                self._tell(f"nothing has happened for {silent:.0f} s; waiting for: {_listed(waiting_for())}")
        if silent > self._limit_s:
            text = f"nothing has happened for {silent:.0f} s; it waited for: {_listed(waiting_for())}"
            raise TrainingStopped(text)

    def _name_the_late(
        self, calls: Sequence[Call], done: Sequence[Call], now: float, waiting_for: Callable[[], Sequence[str]]
    ) -> None:
        answered = set(done)
        late = [c for c in calls if now - c.started > self._patience(c.worker.role) and c not in answered]
        new = [call for call in late if call not in self._told]
        self._told = set(late)
        if new:
            names = {call.worker.name for call in new}
            lines = [line for line in waiting_for() if line.partition(" ")[0] in names]
            lines += [f"{name} works" for name in sorted(names - {line.partition(" ")[0] for line in lines})]
            self._tell(f"no word for {max(now - call.started for call in new):.0f} s; waiting for: {_listed(lines)}")

    def _patience(self, role: str) -> float:
        return WARNING_S if role != "learner" else min(max(WARNING_S, USUAL * self._longest_verb), LEARNER_S)


def _listed(lines: Sequence[str]) -> str:
    return "; ".join(lines) or "nothing that is known"
