"""The numbers of a plan by hand, and that the parts of its time add up."""

import time
from dataclasses import replace

import numpy as np
import pytest

from cauce.metrics.names import is_known
from cauce.runtime.flow import Tally
from cauce.runtime.learn import Learned
from cauce.runtime.plan_metrics import PhaseTimer, plan_metrics
from cauce.types import Group, Outcome
from tests.algorithms.cases import group, rewards_group, sample


def learned(**metrics: float) -> Learned:
    return Learned(num_steps=1, num_skipped=0, had_signal=True, first_log_ratio=0.0, metrics=metrics)


def metrics_of(*groups: Group, tally: Tally | None = None, **more: float) -> dict[str, float]:
    return plan_metrics(groups, learned(**more), staleness=2, tally=tally or Tally())


def test_rewards_lengths_and_ends_by_hand() -> None:
    """A12, E5, J11: equal groups are a fraction; what has no number is in no mean; nothing is subtracted."""
    uneven = group(
        0,
        [
            sample(1.0, logps=[-1.0] * 2),
            sample(None, index=1, logps=[-1.0] * 9, status="failed"),
            sample(0.0, index=2, logps=[-1.0] * 4, finish_reason="length"),
        ],
    )
    found = metrics_of(uneven, rewards_group(1, [3.0, 3.0]), rewards_group(2, [0.0, 1.0]), **{"loss/total": 0.5})
    values = [1.0, 0.0, 3.0, 3.0, 0.0, 1.0]
    assert found["reward/mean"] == pytest.approx(np.mean(values))
    assert found["reward/std"] == pytest.approx(np.std(values))
    assert found["reward/zero_variance_fraction"] == pytest.approx(1 / 3)
    assert found["response/length_mean"] == pytest.approx((2 + 9 + 4 + 2 * 4) / 7)
    assert found["response/length_max"] == 9
    assert found["response/truncated_fraction"] == pytest.approx(1 / 7)
    assert (found["staleness/max"], found["loss/total"]) == (2, 0.5)


def test_all_groups_equal_is_a_fraction_of_one() -> None:
    """A12."""
    found = metrics_of(rewards_group(0, [1.0, 1.0]), rewards_group(1, [0.0, 0.0]))
    assert (found["reward/zero_variance_fraction"], found["reward/mean"]) == (1.0, 0.5)


def test_each_function_has_a_mean_over_what_it_answered() -> None:
    """E8."""

    def with_parts(index: int, **parts: float | None):
        made = sample(1.0, index=index)
        return replace(made, outcome=Outcome(status="scored", value=1.0, parts=dict(parts), detail=""))

    found = metrics_of(group(0, [with_parts(0, f=1.0, g=None), with_parts(1, f=0.0, g=None), with_parts(2, f=0.5)]))
    assert found["reward/f/mean"] == 0.5
    assert "reward/g/mean" not in found


def test_counts_since_the_last_plan_and_the_rewards_own_numbers() -> None:
    tally = Tally(unscored=3, drops={"no_signal": 2}, reward_metrics={"reward/f/length": [1.0, 3.0]})
    found = metrics_of(rewards_group(0, [0.0, 1.0]), tally=tally)
    assert (found["rollout/unscored"], found["rollout/dropped_no_signal"]) == (3, 2)
    assert [value for name, value in found.items() if name.endswith("reward/f/length")] == [2.0]
    assert [name for name in found if not is_known(name) and not name.endswith("f/length")] == []


class Part:
    """A pool that is idle or not, and a journal and an exchange that have spent time."""

    def __init__(self, *, idle: bool = True) -> None:
        self.idle = idle
        self.seconds_spent = self.sync_s = self.busy_s = 0.0
        self.num_tokens = self.num_steps = 0

    def is_idle(self) -> bool:
        return self.idle

    def members(self) -> list[str]:
        return ["rollout-0", "rollout-1"]


class Turns(Part):
    def __init__(self) -> None:
        super().__init__()
        self.pool, self.rewards = Part(), Part()


def timer() -> tuple[PhaseTimer, Turns, Part]:
    turns, journal = Turns(), Part()
    return PhaseTimer(exchange=turns, journal=journal), turns, journal  # type: ignore[arg-type]


def test_the_parts_of_the_time_add_up_to_the_whole() -> None:
    each, turns, journal = timer()
    each.carry("sync", 0.5)
    each.start()
    time.sleep(0.02)
    turns.pool.idle, turns.rewards.idle = True, False
    each.note_waiting()
    journal.seconds_spent += 0.005
    turns.num_tokens += 100
    each.stop("collect")
    time.sleep(0.01)
    each.stop("learn")
    each.stop("checksum")
    found = each.finish()
    parts = [value for name, value in found.items() if name.startswith("time/") and name != "time/total"]
    assert sum(parts) == pytest.approx(found["time/total"], rel=0.2)
    assert found["time/sync"] == pytest.approx(0.5)  # published after the plan before this one
    assert found["time/journal"] == pytest.approx(0.005)
    assert found["time/learn"] >= 0.01
    assert found["tokens_per_s"] == pytest.approx(100 / found["time/total"])


def test_a_plan_begins_with_a_clean_slate() -> None:
    each, turns, journal = timer()
    journal.seconds_spent, turns.num_tokens, turns.sync_s = 9.0, 999, 9.0
    each.carry("sync", 1.0)
    each.start()
    first = each.finish()
    each.start()
    second = each.finish()
    assert (first["time/journal"], "tokens_per_s" in first) == (0.0, False)
    assert first["time/sync"] == pytest.approx(1.0)
    assert second["time/sync"] == 0.0
    assert all(value >= 0 for value in second.values())


def test_a_checkpoint_and_an_evaluation_stand_beside_the_whole() -> None:
    each, _, _ = timer()
    each.carry("checkpoint", 2.0)
    each.carry("eval", 5.0)
    each.carry("eval", 1.0)
    each.start()
    found = each.finish()
    assert (found["time/checkpoint"], found["time/eval"]) == (2.0, 6.0)
    assert found["time/total"] < 1.0
    each.start()
    assert (each.finish()["time/eval"], each.carried) == (0.0, {})
