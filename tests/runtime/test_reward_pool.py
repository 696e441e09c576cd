"""Reward workers: one group at a time, a clock that starts with the work, and no number without a score."""

from collections.abc import Sequence
from typing import Any

import pytest

from cauce.errors import RewardError
from cauce.rewards.reward import RewardResult
from cauce.runtime.reward_pool import RewardPool, ScoredJob, ScoreJob
from cauce.runtime.roles import RewardWorker
from cauce.runtime.world import WorkerDied
from cauce.types import Outcome, Row
from tests.fakes import ROOM, FakeClock, ScriptedWorkers


class Scorer:
    """Scores 1 each; what it is told to raise for a row, it raises."""

    def __init__(self, raises: dict[str, Exception]) -> None:
        self.raises = raises

    def score(self, *, rows: Sequence[Row], texts: Sequence[str], step: int, max_steps: int, **_: Any) -> RewardResult:
        if rows[0].id in self.raises:
            raise self.raises[rows[0].id]
        assert len(rows) == len(texts)
        one = Outcome(status="scored", value=1.0, parts={}, detail="")
        return RewardResult(outcomes=[one] * len(texts), metrics={"progress": step / max_steps})


class Rig:
    def __init__(self, size: int, raises: dict[str, Exception] | None = None) -> None:
        self.clock = FakeClock()
        self.workers = ScriptedWorkers(lambda name: Scorer(raises or {}))
        self.workers.now = self.clock.now
        self.pool = RewardPool(
            self.workers,
            start=lambda name: self.workers.start(RewardWorker, name=name, role="reward", resources=ROOM, kwargs={}),
            size=size,
            clock=self.clock,
            timeout_s=10,
        )

    def submit(self, *keys: int) -> None:
        for key in keys:
            row = Row(id=f"train:{key}", prompt="p", columns={})
            texts, ids = ("a", "b"), ((1,), (2, 3))
            self.pool.submit(ScoreJob(key=key, row=row, texts=texts, token_ids=ids, step=1, max_steps=4))

    def turn(self) -> list[ScoredJob]:
        return self.pool.take(self.workers.wait(self.pool.calls(), timeout_s=1.0))


def statuses(scored: Sequence[ScoredJob]) -> dict[int, set[str]]:
    return {item.job.key: {outcome.status for outcome in item.outcomes} for item in scored}


def test_a_queue_before_few_workers() -> None:
    rig = Rig(2)
    rig.submit(0, 1, 2, 3, 4)
    assert [statuses(rig.turn()) for _ in range(3)] == [
        {0: {"scored"}, 1: {"scored"}},
        {2: {"scored"}, 3: {"scored"}},
        {4: {"scored"}},
    ]
    assert rig.workers.started == ["reward-0", "reward-1"]
    assert rig.pool.is_idle()


def test_a_result_carries_its_job_one_outcome_an_answer_and_its_numbers() -> None:
    rig = Rig(1)
    rig.submit(5)
    (scored,) = rig.turn()
    assert (scored.job.key, len(scored.outcomes), scored.metrics) == (5, 2, {"progress": 0.25})


def test_waiting_in_the_queue_costs_no_group_its_time() -> None:
    """E3: the first is stuck; the second waits longer than the limit and is scored all the same."""
    rig = Rig(1)
    rig.workers.held.add("reward-0")
    rig.submit(0, 1)
    assert rig.turn() == []
    rig.clock.time += 10.5
    (stuck,) = rig.turn()
    assert statuses([stuck]) == {0: {"timed_out"}}
    assert "reward.timeout_s=10" in stuck.outcomes[0].detail
    assert [outcome.value for outcome in stuck.outcomes] == [None, None]
    assert rig.workers.killed == ["reward-0"]
    assert statuses(rig.turn()) == {1: {"scored"}}
    assert rig.workers.started == ["reward-0", "reward-1"]


def test_a_worker_that_dies_fails_its_group_and_is_replaced() -> None:
    """E5: a death is no score."""
    rig = Rig(1, {"train:0": WorkerDied("reward reward-0 died: exit 137\nlast lines")})
    rig.submit(0, 1)
    (failed,) = rig.turn()
    assert statuses([failed]) == {0: {"failed"}}
    assert failed.outcomes[0].detail == "reward reward-0 died: exit 137"
    assert statuses(rig.turn()) == {1: {"scored"}}
    assert rig.workers.started == ["reward-0", "reward-1"]


def test_a_fault_of_the_reward_itself_ends_the_run() -> None:
    rig = Rig(1, {"train:0": RewardError("f returned 1 values for 2 completions")})
    rig.submit(0)
    with pytest.raises(RewardError, match="1 values for 2"):
        rig.turn()


def test_workers_are_warmed_up_named_while_they_work_and_all_ended() -> None:
    rig = Rig(2)
    rig.pool.warm_up()
    assert rig.workers.started == ["reward-0", "reward-1"]
    rig.workers.held |= {"reward-0", "reward-1"}
    rig.submit(3)
    rig.turn()
    assert [line.split(" scores ")[1] for line in rig.pool.waiting_for()] == ["task 3"]
    assert len(rig.pool.members()) == 2
    rig.pool.shutdown()
    assert sorted(rig.workers.killed) == ["reward-0", "reward-1"]
    assert rig.pool.members() == []
