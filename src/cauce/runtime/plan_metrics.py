"""The numbers of one plan: what was sampled, what was learned, and where the time went."""

import time
from collections.abc import Callable, Sequence

import numpy as np

from cauce import spans
from cauce.journal import Journal
from cauce.runtime.exchange import Exchange
from cauce.runtime.flow import Tally
from cauce.runtime.learn import Learned
from cauce.types import Group


def plan_metrics(groups: Sequence[Group], learned: Learned, *, staleness: int, tally: Tally) -> dict[str, float]:
    """Reward statistics are those of the user's function, whatever the algorithm subtracts later."""
    rewards = [[s.outcome.value for s in g.samples if s.outcome.value is not None] for g in groups]
    flat = np.asarray([value for group in rewards for value in group], dtype=np.float64)
    samples = [sample for group in groups for sample in group.samples]
    lengths = np.asarray([len(s.completion.token_ids) for s in samples], dtype=np.float64)
    truncated = np.asarray([s.completion.finish_reason == "length" for s in samples], dtype=np.float64)
    metrics = {
        "reward/mean": float(flat.mean()),
        "reward/std": float(flat.std()),
        "reward/zero_variance_fraction": float(np.mean([len(set(group)) <= 1 for group in rewards])),
        "response/length_mean": float(lengths.mean()),
        "response/length_max": float(lengths.max()),
        "response/truncated_fraction": float(truncated.mean()),
        "staleness/max": float(staleness),
        "rollout/unscored": float(tally.unscored),
    }
    for reason, count in tally.drops.items():
        metrics[f"rollout/dropped_{reason}"] = float(count)
    names = {name for s in samples for name in s.outcome.parts}
    for name in sorted(names):
        parts = [s.outcome.parts[name] for s in samples if s.outcome.parts.get(name) is not None]
        if parts:
            metrics[f"reward/{name}/mean"] = float(np.mean(np.asarray(parts, dtype=np.float64)))
    for name, values in tally.reward_metrics.items():
        metrics[name] = float(np.mean(values))
    return metrics | learned.metrics


class PhaseTimer:
    """Splits the wall time of a plan: generate, reward, learn, checksum, sync, journal, and idle for the rest.

    Within the wait for groups, time counts as `reward` while only rewards are outstanding. Time inside journal calls
    is taken out of the phase it fell into. What comes after a plan's record - publishing, a checkpoint, an evaluation -
    is carried over to the next plan; the latter two stand beside its total, since they are not due at every plan.
    """

    def __init__(self, *, exchange: Exchange, journal: Journal, clock: Callable[[], float] = time.perf_counter) -> None:
        self._exchange = exchange
        self._journal = journal
        self._clock = clock
        self._split: dict[str, float] = {}
        self.carried: dict[str, float] = {}  # seconds that no plan has in its split yet
        self.start()

    def start(self) -> None:
        now = self._clock()
        self._began = self._mark = self._turn_mark = now
        self._split = {}
        self._reward_s = 0.0
        self._only_rewards = False
        self._journal_at_start = self._journal.seconds_spent
        self._tokens_at_start = self._exchange.num_tokens
        self._sync_at_start = self._exchange.sync_s
        self._busy_at_start = self._exchange.busy_s
        self._steps_at_start = self._exchange.num_steps

    def note_waiting(self) -> None:
        """Called after each turn of the wait for groups."""
        now = self._clock()
        if self._only_rewards:  # as it stood before the turn: the turn that brings the last answers is generation
            self._reward_s += now - self._turn_mark
        self._only_rewards = self._exchange.pool.is_idle() and not self._exchange.rewards.is_idle()
        self._turn_mark = now

    def stop(self, phase: str) -> None:
        now = self._clock()
        self._split[phase] = self._split.get(phase, 0.0) + now - self._mark
        spans.record(phase, self._mark, now)
        self._mark = self._turn_mark = now

    def finish(self) -> dict[str, float]:
        """The split of the plan that ends now."""
        carried, self.carried = self.carried, {}
        published = carried.get("sync", 0.0)
        total = self._clock() - self._began
        journal = self._journal.seconds_spent - self._journal_at_start
        pulled = self._exchange.sync_s - self._sync_at_start
        sync = pulled + published
        collect = self._split.get("collect", 0.0)
        waited = max(0.0, collect - pulled - journal)
        reward = min(self._reward_s, waited)  # its turns contain journal calls too
        generate = waited - reward
        learn = self._split.get("learn", 0.0)
        checksum = self._split.get("checksum", 0.0)
        total += published
        known = generate + reward + learn + checksum + sync + journal
        tokens = self._exchange.num_tokens - self._tokens_at_start
        spans.record("plan", self._began, self._clock())
        return self._sampling(tokens, total) | {
            "time/total": total,
            "time/generate": generate,
            "time/reward": reward,
            "time/learn": learn,
            "time/checksum": checksum,
            "time/sync": sync,
            "time/journal": journal,
            "time/idle": max(0.0, total - known),
            "time/checkpoint": carried.get("checkpoint", 0.0),
            "time/eval": carried.get("eval", 0.0),
        }

    def carry(self, part: str, seconds: float) -> None:
        """Notes what happened between two plans: sync, checkpoint or eval."""
        self.carried[part] = self.carried.get(part, 0.0) + seconds
        now = self._clock()
        spans.record("publish" if part == "sync" else part, now - seconds, now)

    def _sampling(self, tokens: int, total: float) -> dict[str, float]:
        """How fast, and how far engines were used; a recorded plan samples nothing."""
        if not tokens:
            return {}
        num_actors = max(1, len(self._exchange.pool.members()))
        busy = (self._exchange.busy_s - self._busy_at_start) / (num_actors * total)
        steps = self._exchange.num_steps - self._steps_at_start
        used = {"rollout/live_slots": tokens / steps} if steps else {}
        return {"tokens_per_s": tokens / total, "rollout/busy_fraction": min(1.0, busy)} | used
