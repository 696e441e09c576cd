"""What stops a run, or is skipped in it: engines that disagree with the learner, non-finite numbers, no signal."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from cauce.errors import TrainingStopped, WeightsError
from cauce.journal import Journal
from cauce.runtime.roles import LearnerWorker, RolloutWorker, WorkResult
from cauce.stages import rl
from tests.local_session import Killed, LocalSession, Watcher, checksums, resume_locally, train_locally
from tests.runtime.plan_record import equal, plans, poisoned


class OtherLogps(RolloutWorker):
    """Records log-probabilities that are not those of what it sampled."""

    def work(self, **kwargs: Any) -> WorkResult:
        result = super().work(**kwargs)
        return replace(result, completions=tuple(replace(c, logps=c.logps - 0.01) for c in result.completions))


class OtherWeights(RolloutWorker):
    """Says that it serves a version, with other content."""

    def work(self, **kwargs: Any) -> WorkResult:
        return replace(super().work(**kwargs), checksum="0" * 32)


class StuckWeights(RolloutWorker):
    """Cannot read any version after the first."""

    def _pull(self, version: int) -> float:
        if version > 0:
            raise WeightsError(f"version {version} is torn")
        return super()._pull(version)


def test_a_sampler_that_disagrees_with_the_learner_stops_the_run(
    local: type[LocalSession], tiny: Path, tmp_path: Path
) -> None:
    """D1, C2: mean |log ratio| above 1e-4 on fresh tokens is a fault, not a matter of taste."""
    local.rollout = OtherLogps
    with pytest.raises(TrainingStopped, match=r"plan 1: sampler and learner disagree.*1\.00e-02 is above 1e-04"):
        train_locally(tiny, tmp_path / "run")


def test_other_weights_under_the_same_version_stop_the_run(
    local: type[LocalSession], tiny: Path, tmp_path: Path
) -> None:
    """D1, D3: the counter is right and the content is not."""
    local.rollout = OtherWeights
    with pytest.raises(WeightsError, match="rollout-0 serves version 0 with content 0000"):
        train_locally(tiny, tmp_path / "run")
    assert plans(tmp_path / "run") == []


def test_weights_that_do_not_arrive_stop_the_run_and_move_no_version(
    local: type[LocalSession], tiny: Path, tmp_path: Path
) -> None:
    """D3."""
    local.rollout = StuckWeights
    with pytest.raises(WeightsError, match="version 1 is torn"):
        train_locally(tiny, tmp_path / "run")
    with Journal.read_only(tmp_path / "run") as journal:
        recorded = [c for task in journal.tasks() for c in journal.answers(task)]
    assert {int(v) for c in recorded for v in c.versions} == {0}


def test_a_plan_of_non_finite_numbers_is_skipped_and_stays_skipped(
    local: type[LocalSession], tiny: Path, tmp_path: Path
) -> None:
    """G15: weights, moments and schedule are as if it had not been; a redo and a resume repeat the decision."""
    run, watcher = tmp_path / "run", Watcher(kill_after=3)
    local.learner = poisoned(2)
    shape = {"run__plans": 4, "learner__schedule": "linear", "checkpoint__every": 9}
    with pytest.raises(Killed):
        train_locally(tiny, run, observer=watcher, **shape)
    assert [record.state for record in plans(run)] == ["applied", "skipped", "applied"]
    assert watcher.plans[2]["optim/skipped"] == 1
    assert [watcher.plans[n]["optim/step"] for n in (1, 2, 3)] == [1, 1, 2]
    assert watcher.plans[3]["optim/lr"] == pytest.approx(1e-2 * 3 / 4)  # the second step, not the third
    local.learner = LearnerWorker  # nothing is wrong any more, and still plan 2 stays skipped
    assert resume_locally(run)["status"] == "finished"
    assert [record.state for record in plans(run)] == ["applied", "skipped", "applied", "applied"]
    result = rl.replay(run)
    assert (result.plans, result.divergent_plan) == (3, None)
    with Journal.read_only(run) as journal:
        assert journal.drops() == {"non_finite": 2}
    assert all(np.isfinite(tensor).all() for tensor in load_file(run / "model" / "model.safetensors").values())


def test_three_skipped_plans_in_a_row_stop_the_run_with_their_tasks(
    local: type[LocalSession], tiny: Path, tmp_path: Path
) -> None:
    """G15."""
    run = tmp_path / "run"
    local.learner = poisoned(1, 3, 4, 5)  # one alone does not
    with pytest.raises(TrainingStopped, match=r"3 plans in a row met a non-finite .* tasks \[8, 9\]"):
        train_locally(tiny, run, run__plans=9)
    assert [record.state for record in plans(run)] == ["skipped", "applied", "skipped", "skipped", "skipped"]


def test_ten_plans_without_signal_stop_the_run(local: type[LocalSession], tiny: Path, tmp_path: Path) -> None:
    """A12, F1: equal rewards change no weight, and a run of them does not end as finished."""
    run, watcher = tmp_path / "run", Watcher()
    with pytest.raises(TrainingStopped, match="10 plans in a row carried no signal"):
        train_locally(tiny, run, reward=equal, run__plans=12, observer=watcher)
    assert len(set(checksums(run))) == 1
    assert len(checksums(run)) == 10
    assert {m["reward/zero_variance_fraction"] for m in watcher.plans.values()} == {1.0}
    assert {m["learner/skipped_groups"] for m in watcher.plans.values()} == {2.0}
    assert watcher.ends[0]["status"] == "failed"


def test_equal_rewards_under_dynamic_sampling_stop_the_run(
    local: type[LocalSession], tiny: Path, tmp_path: Path
) -> None:
    with pytest.raises(TrainingStopped, match="20 no_signal"):
        train_locally(tiny, tmp_path / "run", reward=equal, algorithm__dynamic_sampling=True)
    assert plans(tmp_path / "run") == []


def test_when_every_answer_is_masked_there_is_no_step_and_the_run_stops(
    local: type[LocalSession], tiny: Path, tmp_path: Path
) -> None:
    """A4: all answers are cut off and mask_truncated is on: no optimizer step, no NaN, and each plan is counted."""
    run, watcher = tmp_path / "run", Watcher()
    with pytest.raises(TrainingStopped, match="10 plans in a row carried no signal"):
        train_locally(tiny, run, run__plans=12, rollout__max_tokens=1, algorithm__mask_truncated=True, observer=watcher)
    assert len(set(checksums(run))) == 1
    for metrics in watcher.plans.values():
        assert metrics["response/truncated_fraction"] == 1.0
        assert not {"optim/step", "loss/total"} & metrics.keys()
        assert all(np.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize("kl_in", ["reward", "loss"])
def test_a_reference_makes_no_signal_of_equal_rewards(
    local: type[LocalSession], tiny: Path, tmp_path: Path, kl_in: str
) -> None:
    """A12, A13: what a KL term does to the weights is not what the rewards say."""
    shape = {"algorithm__kl_coef": 0.1, "algorithm__kl_in": kl_in, "algorithm__advantage_scale": "none"}
    with pytest.raises(TrainingStopped, match="10 plans in a row carried no signal"):
        train_locally(tiny, tmp_path / "run", reward=equal, run__plans=12, **shape)
    assert len(checksums(tmp_path / "run")) == 10
