"""Reward workers: one group at a time, a clock that starts with the work, and no number without a score."""

from collections.abc import Sequence
from typing import Any

import pytest

from cauce.errors import RewardError, WorkerError
from cauce.rewards.reward import RewardResult
from cauce.runtime.restarts import DEATHS_IN_A_ROW
from cauce.runtime.reward_pool import MAX_BUNDLE, ScoredJob, ScoreJob
from cauce.runtime.world import WorkerDied
from cauce.types import Outcome, Row
from tests.runtime.rig import PoolRig


class Scorer:
    """Scores 1 each; what it is told to raise for a row, it raises, as often as it is told to."""

    def __init__(self, raises: dict[str, list[Exception]]) -> None:
        self.raises = raises

    def score(self, *, rows: Sequence[Row], texts: Sequence[str], step: int, max_steps: int, **_: Any) -> RewardResult:
        if self.raises.get(rows[0].id):
            raise self.raises[rows[0].id].pop()
        assert len(rows) == len(texts)
        one = Outcome(status="scored", value=1.0, parts={}, detail="")
        return RewardResult(outcomes=[one] * len(texts), metrics={"progress": step / max_steps})

    def score_many(self, *, jobs: Sequence[dict[str, Any]]) -> list[RewardResult]:
        return [self.score(**job) for job in jobs]


class Rig(PoolRig):
    def __init__(self, size: int, raises: dict[str, list[Exception]] | None = None) -> None:
        super().__init__(lambda name: Scorer(raises or {}), scorers=size)

    def submit(self, *keys: int) -> None:
        for key in keys:
            row = Row(id=f"train:{key}", prompt="p", columns={})
            texts, ids = ("a", "b"), ((1,), (2, 3))
            self.rewards.submit(ScoreJob(key=key, row=row, texts=texts, token_ids=ids, step=1, max_steps=4))


def statuses(scored: Sequence[ScoredJob]) -> dict[int, set[str]]:
    return {item.job.key: {outcome.status for outcome in item.outcomes} for item in scored}


def test_a_queue_before_few_workers_goes_out_in_even_bundles() -> None:
    rig = Rig(2)
    rig.submit(0, 1, 2, 3, 4)
    assert [len(call.ref[1]["jobs"]) for call in rig.rewards.calls()] == [3, 2]
    assert rig.rewards.waiting_for() == ["reward-0 scores task 0, 1, 2", "reward-1 scores task 3, 4"]
    scored = rig.score()
    assert statuses(scored) == {key: {"scored"} for key in range(5)}
    assert [item.job.key for item in scored] == [0, 1, 2, 3, 4]
    assert rig.workers.started == ["reward-0", "reward-1"]
    assert rig.rewards.is_idle()


def test_a_bundle_has_a_bound() -> None:
    rig = Rig(1)
    rig.submit(*range(MAX_BUNDLE + 3))
    assert [len(rig.score()) for _ in range(2)] == [MAX_BUNDLE, 3]


def test_a_result_carries_its_job_one_outcome_an_answer_and_its_numbers() -> None:
    rig = Rig(1)
    rig.submit(5)
    (scored,) = rig.score()
    assert (scored.job.key, len(scored.outcomes), scored.metrics) == (5, 2, {"progress": 0.25})


def test_waiting_in_the_queue_costs_no_group_its_time() -> None:
    """E3, E4: the first is stuck; the second waits longer than the limit and is scored all the same."""
    rig = Rig(1)
    rig.workers.held.add("reward-0")
    rig.submit(0)
    assert rig.score() == []
    rig.submit(1)
    rig.clock.sleep(10.5)
    (stuck,) = rig.score()
    assert statuses([stuck]) == {0: {"timed_out"}}
    assert "reward.timeout_s=10" in stuck.outcomes[0].detail
    assert [outcome.value for outcome in stuck.outcomes] == [None, None]
    assert rig.workers.killed == ["reward-0"]
    assert statuses(rig.score()) == {1: {"scored"}}
    assert rig.workers.started == ["reward-0", "reward-1"]


def test_of_a_bundle_that_is_stuck_only_the_stuck_group_times_out() -> None:
    """E3: three in one call have three times the limit; then each is tried alone."""
    rig = Rig(1)
    rig.workers.held |= {"reward-0", "reward-2"}
    rig.submit(0, 1, 2)
    assert rig.score() == []
    rig.clock.sleep(29.0)
    assert rig.score() == []
    assert rig.workers.killed == []
    rig.clock.sleep(1.5)
    assert rig.score() == []
    assert rig.workers.killed == ["reward-0"]
    assert statuses(rig.score()) == {0: {"scored"}}
    rig.workers.held.add("reward-1")  # and now task 1 is stuck
    assert rig.score() == []
    rig.clock.sleep(10.5)
    assert statuses(rig.score()) == {1: {"timed_out"}}
    rig.workers.held.clear()
    assert statuses(rig.score()) == {2: {"scored"}}
    assert rig.rewards.is_idle()


def died(times: int) -> list[Exception]:
    return [WorkerDied("reward died: exit 137\nlast lines") for _ in range(times)]


@pytest.mark.parametrize("deaths", [1, 2])
def test_a_group_is_tried_again_on_new_workers(deaths: int) -> None:
    """E5: an idle worker that died, or one that was killed, costs no group."""
    rig = Rig(2, {"train:0": died(deaths)})
    rig.rewards.warm_up()
    rig.submit(0)
    assert [statuses(rig.score()) for _ in range(deaths + 1)] == [{}] * deaths + [{0: {"scored"}}]
    assert len(rig.workers.started) == 2 + deaths
    assert len(rig.rewards.members()) <= 2


def test_a_group_that_kills_three_workers_has_failed_and_others_go_on() -> None:
    """E5: a death is no score."""
    rig = Rig(1, {"train:0": died(3)})
    rig.submit(0)
    assert rig.score() == []
    rig.submit(1)
    assert rig.score() == []
    (failed,) = rig.score()
    assert statuses([failed]) == {0: {"failed"}}
    assert failed.outcomes[0].detail == "the reward ended its process 3 times; the last: reward died: exit 137"
    assert statuses(rig.score()) == {1: {"scored"}}
    assert rig.workers.started == [f"reward-{i}" for i in range(4)]


def test_of_a_bundle_whose_worker_dies_only_the_group_that_kills_fails() -> None:
    rig = Rig(1, {"train:1": died(4)})  # once in company, three times alone
    rig.submit(0, 1, 2)
    found: dict[int, set[str]] = {}
    while not rig.rewards.is_idle():
        found |= statuses(rig.score())
    assert found == {0: {"scored"}, 1: {"failed"}, 2: {"scored"}}


class Full(Rig):
    """For the workers named no node has room."""

    def __init__(self, size: int, *without_room: str, raises: dict[str, list[Exception]] | None = None) -> None:
        super().__init__(size, raises)
        make = self.workers.make

        def start(name: str) -> Any:
            if name in without_room:
                raise WorkerError(f"no node has room for {name}")
            return make(name)

        self.workers.make = start


def test_a_replacement_that_cannot_be_started_is_a_death_and_its_group_waits_for_the_next() -> None:
    rig = Full(1, "reward-1", "reward-2", raises={"train:0": died(1)})
    rig.rewards.warm_up()
    rig.submit(0)
    assert [rig.score() for _ in range(3)] == [[]] * 3
    assert rig.workers.started == ["reward-0", "reward-1", "reward-2"]
    assert rig.rewards.calls() == []  # in the pause that the second failed start asks for
    assert not rig.rewards.is_idle()
    rig.clock.sleep(100.0)
    assert statuses(rig.score()) == {0: {"scored"}}
    causes = [detail["cause"] for kind, detail in rig.events if kind == "worker_died"]
    assert [cause.splitlines()[0] for cause in causes] == [
        "reward died: exit 137",
        "no node has room for reward-1",
        "no node has room for reward-2",
    ]


def test_replacements_that_never_start_stop_the_run_with_the_last_cause() -> None:
    rig = Full(1, *(f"reward-{i}" for i in range(1, 20)), raises={"train:0": died(1)})
    rig.submit(0)
    rig.score()

    def go_on() -> None:
        for _ in range(DEATHS_IN_A_ROW):
            rig.clock.sleep(100.0)
            rig.score()

    with pytest.raises(WorkerError, match=r"6 reward workers in a row .* no node has room for reward-6"):
        go_on()


@pytest.mark.parametrize("warm", [True, False])
def test_a_first_worker_that_cannot_be_started_is_an_error_at_once(warm: bool) -> None:
    rig = Full(2, "reward-0")
    rig.submit(0)
    with pytest.raises(WorkerError, match=r"^no node has room"):
        rig.rewards.warm_up() if warm else rig.score()


def test_a_jump_of_the_wall_clock_ends_no_group() -> None:
    rig = Rig(1)
    rig.workers.held.add("reward-0")
    rig.submit(0)
    rig.score()
    rig.clock.wall += 1e6
    assert rig.score() == []
    assert rig.workers.killed == []


def test_a_fault_of_the_reward_itself_ends_the_run() -> None:
    rig = Rig(1, {"train:0": [RewardError("f returned 1 values for 2 completions")]})
    rig.submit(0)
    with pytest.raises(RewardError, match="1 values for 2"):
        rig.score()


def test_workers_are_warmed_up_named_while_they_work_and_all_ended() -> None:
    rig = Rig(2)
    rig.rewards.warm_up()
    assert rig.workers.started == ["reward-0", "reward-1"]
    rig.workers.held |= {"reward-0", "reward-1"}
    rig.submit(3)
    rig.score()
    assert [line.split(" scores ")[1] for line in rig.rewards.waiting_for()] == ["task 3"]
    assert len(rig.rewards.members()) == 2
    rig.rewards.shutdown()
    assert sorted(rig.workers.killed) == ["reward-0", "reward-1"]
    assert rig.rewards.members() == []
