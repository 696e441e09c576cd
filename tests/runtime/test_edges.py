"""Edges that once went wrong: settings from Python, the split of a plan's time, names of logged numbers, versions."""

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import cauce
from cauce.errors import DataError, TrainingStopped
from cauce.metrics.names import is_known
from cauce.metrics.observer import NullObserver
from tests.local_session import ROWS, Watcher, letters, train_locally
from tests.runtime.test_plan_metrics import timer


def test_nothing_is_sampled_in_vain_between_two_publications(local, tiny, tmp_path):
    summary = train_locally(tiny, tmp_path / "r", run__plans=6, weights__every=2, buffer__max_staleness=1)
    assert "stale" not in summary["drops"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("learner.lr", np.float64(1e-3)),
        ("data.system", "a\nb"),
        ("data.system", "a\x7fb"),
        ("reward.kwargs", {"a b": 1, "x.y": 2}),
        ("reward.kwargs", {"n": np.float32(0.5)}),
    ],
)
def test_settings_are_python_values(tiny, key, value):
    recipe = cauce.Trainer(
        model=str(tiny), data=ROWS, reward=letters, settings={key: value}, observer=NullObserver()
    ).recipe
    section, name = key.split(".")
    assert getattr(getattr(recipe, section), name) == value


def test_a_number_that_the_reward_logs_has_a_known_name(local, tiny, tmp_path):
    def f(completions, log_metric=None, **_):
        log_metric("length", 3.0)
        return letters(completions)

    watcher = Watcher()
    train_locally(tiny, tmp_path / "r", reward=f, observer=watcher, run__plans=1)
    assert watcher.plans[1]["reward/f/length"] == 3.0
    assert [name for name in watcher.plans[1] if not is_known(name)] == []


def test_the_wait_that_brought_the_last_answers_was_for_answers():
    each, turns, _ = timer()
    each.start()
    turns.pool.idle, turns.rewards.idle = False, True  # generating ...
    time.sleep(0.03)
    turns.pool.idle, turns.rewards.idle = True, False  # ... until this turn took the last answers, and sent them on
    each.note_waiting()
    time.sleep(0.01)
    turns.rewards.idle = True
    each.note_waiting()
    each.stop("collect")
    found = each.finish()
    assert found["time/generate"] >= 0.03
    assert 0.01 <= found["time/reward"] < 0.03


def test_a_refused_step_moves_no_version(tiny):
    each = cauce.Learner(str(tiny), settings={"dtype": "fp32"})
    (r,) = cauce.Actor(str(tiny), dtype="fp32").generate(["hi"], num=4, max_tokens=5)
    masters = each._learner._weights.masters
    masters[next(iter(masters))].data.fill_(float("nan"))
    each.update([r.score([0.0, 1.0, 0.0, 1.0])])
    assert each.version == 0


@pytest.mark.timeout(20)
def test_only_prompts_that_the_engine_refuses_stop_the_run(local, tiny, tmp_path):
    class Refuses(local.rollout):
        def work(self, **kwargs):
            result = super().work(**kwargs)
            nothing: dict[str, Any] = {
                "token_ids": np.zeros(0, np.int32),
                "logps": np.zeros(0, np.float32),
                "versions": np.zeros(0, np.int32),
                "mask": np.zeros(0, np.uint8),
            }
            cut = (replace(c, finish_reason="aborted", **nothing) for c in result.completions)
            return replace(result, completions=tuple(cut))

    local.rollout = Refuses
    with pytest.raises((TrainingStopped, DataError)):
        train_locally(tiny, tmp_path / "r")
