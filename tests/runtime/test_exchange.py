"""Whose results are whose, who is waited for, and what is said when nothing happens."""

from collections.abc import Sequence
from typing import Any

import pytest

from cauce.errors import TrainingStopped
from cauce.rewards.reward import RewardResult
from cauce.runtime.pool import Lost
from cauce.runtime.reward_pool import ScoredJob, ScoreJob
from cauce.runtime.world import Call, Worker
from cauce.types import Completion, Outcome, Row
from tests.fakes import ScriptedRollout, request
from tests.runtime.rig import PoolRig

ONE = Outcome(status="scored", value=1.0, parts={}, detail="")


class Scorer:
    def score(self, *, texts: Sequence[str], **_: Any) -> RewardResult:
        return RewardResult(outcomes=[ONE] * len(texts), metrics={})

    def score_many(self, *, jobs: Sequence[dict[str, Any]]) -> list[RewardResult]:
        return [self.score(**job) for job in jobs]


class Learner:
    """A third kind of worker, with one verb."""

    def work(self) -> str:
        return "done"


class Desk:
    """Keeps the ids of what is handed to it."""

    def __init__(self) -> None:
        self.answers: list[int] = []
        self.lost: list[int] = []
        self.scored: list[int] = []
        self.progressed: list[int] = []

    def on_answers(self, completions: Sequence[Completion]) -> None:
        self.answers += [c.task for c in completions]

    def on_lost(self, lost: Sequence[Lost]) -> None:
        self.lost += [item.request.task for item in lost]

    def on_scored(self, scored: Sequence[ScoredJob]) -> None:
        self.scored += [item.job.key for item in scored]

    def on_progress(self, tasks: set[int]) -> None:
        self.progressed += sorted(tasks)


class Rig(PoolRig):
    def __init__(self, script: Sequence[str] = ()) -> None:
        make = lambda name: Scorer() if "reward" in name else ScriptedRollout(script)  # noqa: E731
        super().__init__(make, hang_s=1e9, timeout_s=1e9, stall_s=300)
        self.exchange.training, self.exchange.evaluation = self.training, self.evaluation = Desk(), Desk()


def job(key: int) -> ScoreJob:
    row = Row(id="train:0", prompt="p", columns={})
    return ScoreJob(key=key, row=row, texts=("a",), token_ids=((1,),), step=0, max_steps=1)


def test_results_go_to_the_desk_that_asked() -> None:
    rig = Rig(["wait"])
    for task in (3, -2):
        rig.pool.submit(request(task))
        rig.rewards.submit(job(task))
    for _ in range(3):
        rig.exchange.turn()
    assert (rig.training.answers, rig.evaluation.answers) == ([3, 3], [-2, -2])
    assert (rig.training.scored, rig.evaluation.scored) == ([3], [-2])
    assert (rig.training.progressed, rig.evaluation.progressed) == ([3], [-2])
    assert rig.exchange.num_tokens == 3 * 4
    assert rig.exchange.served == {"rollout-0": (0, "content-0")}


def test_losses_go_to_the_desk_that_asked_and_nobody_minds_a_desk_that_is_gone() -> None:
    rig = Rig(["die"])
    rig.pool.submit(request(3))
    rig.pool.submit(request(-2))
    rig.exchange.evaluation = None
    rig.exchange.turn()
    assert (rig.training.lost, rig.evaluation.lost) == ([3], [])


def test_a_callers_own_call_comes_back_when_it_is_done() -> None:
    rig = Rig()
    worker = Worker(name="learner-0", role="learner", handle=Learner())
    call = Call(worker=worker, ref=("work", {}), started=0.0)
    rig.workers.held.add("learner-0")
    rig.pool.submit(request(1))
    assert rig.exchange.turn(extra=[call]) == []
    assert rig.training.answers == [1, 1]  # rollouts go on meanwhile
    rig.workers.held.clear()
    assert rig.exchange.turn(extra=[call]) == [call]


def test_silence_is_told_once_with_names_and_then_ends_the_run() -> None:
    rig = Rig()
    rig.pool.submit(request(7))
    rig.rewards.submit(job(8))
    rig.workers.held |= {"rollout-0", "reward-0"}
    for seconds in (1, 61, 10):
        rig.clock.sleep(seconds)
        rig.exchange.turn()
    (text,) = rig.told
    assert "no word for 61 s" in text
    assert "rollout-0 generates task 7, 2 answers missing" in text
    assert "reward-0 scores task 8" in text
    rig.clock.sleep(300)
    with pytest.raises(TrainingStopped, match=r"nothing has happened for 37\d s; it waited for: rollout-0"):
        rig.exchange.turn()


def test_one_that_is_late_is_named_although_others_work() -> None:
    rig = Rig()
    rig.pool.submit(request(7))
    rig.workers.held.add("rollout-0")
    for second in range(80):
        rig.clock.sleep(1)
        rig.rewards.submit(job(second))
        rig.exchange.turn()
    (text,) = rig.told
    assert text.startswith("no word for 4")  # within a minute, and once
    assert "rollout-0 generates task 7" in text
    assert "reward" not in text


def test_a_learner_is_late_by_its_own_measure() -> None:
    """One verb of a large model takes long: what was usual so far is no news."""
    rig = Rig()
    worker = Worker(name="learner-0", role="learner", handle=Learner())

    def work(seconds: int) -> None:
        call = Call(worker=worker, ref=("work", {}), started=rig.clock.monotonic())
        rig.workers.held.add("learner-0")
        for _ in range(seconds):
            rig.clock.sleep(1)
            assert rig.exchange.turn(extra=[call]) == []
        rig.workers.held.clear()
        assert rig.exchange.turn(extra=[call]) == [call]

    work(100)
    assert rig.told == ["no word for 46 s; waiting for: learner-0 works"]
    work(250)
    assert len(rig.told) == 1
    work(650)
    assert rig.told[1:] == ["no word for 601 s; waiting for: learner-0 works"]


def test_any_news_ends_the_silence() -> None:
    rig = Rig()
    rig.pool.submit(request(7))
    rig.workers.held.add("rollout-0")
    rig.clock.sleep(250)
    rig.exchange.turn()
    rig.rewards.submit(job(8))
    rig.exchange.turn()  # a score
    rig.clock.sleep(250)
    rig.exchange.turn()
    assert len(rig.told) == 2  # each silence once
    rig.clock.sleep(60)
    with pytest.raises(TrainingStopped, match="310 s"):
        rig.exchange.turn()


def test_with_nobody_to_wait_for_time_passes_all_the_same() -> None:
    rig = Rig()
    before = rig.clock.monotonic()
    rig.exchange.turn()
    assert rig.clock.monotonic() > before
    rig.clock.sleep(400)
    with pytest.raises(TrainingStopped, match="nothing that is known"):
        rig.exchange.turn()


def test_a_jump_of_the_wall_clock_is_no_silence() -> None:
    rig = Rig()
    rig.pool.submit(request(7))
    rig.workers.held.add("rollout-0")
    rig.exchange.turn()
    rig.clock.wall += 1e6
    rig.exchange.turn()
    assert rig.told == []
