"""How runs end: never as finished without an update, never without their last evaluation and checkpoint, never in an
endless search for something to train on."""

import signal
from pathlib import Path
from typing import Any

import pytest

from cauce.errors import TrainingStopped
from cauce.journal import Journal
from cauce.journal.overview import read_overview
from cauce.runtime.roles import WorkResult
from tests.local_session import ROWS, Killed, LocalSession, Watcher, checksums, resume_locally, train_locally
from tests.runtime.plan_record import equal, poisoned


def test_a_short_run_without_signal_is_not_finished(local: type[LocalSession], tiny: Path, tmp_path: Path) -> None:
    """F1: three plans of equal rewards took steps of nothing; the run says so instead of calling itself done."""
    watcher = Watcher()
    with pytest.raises(TrainingStopped):
        train_locally(tiny, tmp_path / "run", reward=equal, observer=watcher)
    assert len(set(checksums(tmp_path / "run"))) == 1
    assert watcher.ends[0]["status"] == "failed"


def test_a_short_run_of_skipped_plans_is_not_finished(local: type[LocalSession], tiny: Path, tmp_path: Path) -> None:
    """F1, G15."""
    watcher = Watcher()
    local.learner = poisoned(1, 2)
    with pytest.raises(TrainingStopped):
        train_locally(tiny, tmp_path / "run", run__plans=2, observer=watcher)
    assert watcher.ends[0]["status"] == "failed"


@pytest.mark.timeout(30)
def test_an_error_in_every_engine_ends_the_run_with_it(local: type[LocalSession], tiny: Path, tmp_path: Path) -> None:
    """H16: the trainer does not wait on a buffer that nothing will fill."""

    class Raising(local.rollout):  # type: ignore[name-defined]
        def work(self, **kwargs: Any) -> WorkResult:
            raise ValueError("the cache has no slot 65")

    local.rollout = Raising
    watcher = Watcher()
    with pytest.raises(ValueError, match="the cache has no slot 65"):
        train_locally(tiny, tmp_path / "run", rollout__actors=2, observer=watcher)
    assert watcher.ends[0]["status"] == "failed"
    assert "the cache has no slot 65" in watcher.ends[0]["failure"]
    assert read_overview(tmp_path / "run").failure == "ValueError: the cache has no slot 65"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_reward_that_abstains_from_everything_stops_the_run(
    local: type[LocalSession], tiny: Path, tmp_path: Path, dynamic: bool
) -> None:
    """E8, F1: None is no failure, so no rate of failures ends this; the drops do."""

    def silent(completions: list[Any], **_: Any) -> list[None]:
        return [None] * len(completions)

    with pytest.raises(TrainingStopped, match="unscorable"):
        train_locally(tiny, tmp_path / "run", reward=silent, algorithm__dynamic_sampling=dynamic)
    with Journal.read_only(tmp_path / "run") as journal:
        assert journal.plans() == []


def test_killed_after_its_last_plan_a_run_is_evaluated_and_saved_on_resume(
    local: type[LocalSession], tiny: Path, tmp_path: Path
) -> None:
    run, watcher = tmp_path / "run", Watcher()
    with pytest.raises(Killed):
        train_locally(tiny, run, observer=Watcher(kill_after=3), test_rows=ROWS[:4])
    summary = resume_locally(run, observer=watcher, test_rows=ROWS[:4])
    assert [plan for plan, _ in watcher.evals] == [3]
    assert summary["eval_after"] == watcher.evals[0][1]
    with Journal.read_only(run) as journal:
        assert [c.plan for c in journal.checkpoints()] == [3]


def test_an_evaluation_is_of_the_weights_of_its_plan(local: type[LocalSession], tiny: Path, tmp_path: Path) -> None:
    """J12: also where new weights are published every second plan only."""
    seen: list[int] = []

    class Listening(local.rollout):  # type: ignore[name-defined]
        def work(self, **kwargs: Any) -> WorkResult:
            result: WorkResult = super().work(**kwargs)
            seen.extend(result.version for c in result.completions if c.task < 0)
            return result

    local.rollout = Listening
    shape = {"weights__every": 2, "buffer__max_staleness": 1, "eval__every": 1}
    train_locally(tiny, tmp_path / "run", test_rows=ROWS[:1], **shape)
    assert seen == [1, 2, 3]


def test_a_stop_before_any_plan_had_signal_is_a_stop(local: type[LocalSession], tiny: Path, tmp_path: Path) -> None:
    class Stopper(Watcher):
        def on_plan(self, plan: int, metrics: dict[str, float]) -> None:
            signal.raise_signal(signal.SIGINT)

    summary = train_locally(
        tiny, tmp_path / "run", reward=lambda completions, **_: [0.0] * len(completions), observer=Stopper()
    )
    assert (summary["status"], summary["plans"]) == ("stopped", 1)


def test_a_stop_before_the_first_plan_is_a_stop(local: type[LocalSession], tiny: Path, tmp_path: Path) -> None:
    class Stopper(Watcher):
        def on_eval(self, plan: int, name: str, accuracy: float) -> None:
            signal.raise_signal(signal.SIGINT)

    run = tmp_path / "run"
    summary = train_locally(tiny, run, eval__at_start=True, test_rows=ROWS[:2], observer=Stopper())
    assert (summary["status"], summary["plans"]) == ("stopped", 0)
    assert resume_locally(run, test_rows=ROWS[:2])["status"] == "finished"
