"""The rollout pool against scripted workers and a scripted clock."""

import pytest

from cauce.errors import VersionGoneError, WeightsError, WorkerError
from cauce.runtime.restarts import DEATHS_IN_A_ROW
from tests.fakes import ScriptedRollout, request
from tests.runtime.rig import PoolRig


class Rig(PoolRig):
    """A pool of `size` workers whose scripts are given by name."""

    def __init__(self, size: int, scripts: dict[str, list[str]] | None = None, default: str = "") -> None:
        self.made: dict[str, ScriptedRollout] = {}
        super().__init__(lambda name: self.make(name, scripts or {}, default), actors=size)
        self.pool.fill()

    def make(self, name: str, scripts: dict[str, list[str]], default: str) -> ScriptedRollout:
        self.made[name] = ScriptedRollout(scripts.get(name, [default] if default else []))
        return self.made[name]


def test_requests_spread_over_workers_and_every_answer_comes_back_once() -> None:
    rig = Rig(2)
    for task in range(4):
        rig.pool.submit(request(task))
    news = rig.generate()
    assert sorted((c.task, c.index) for c in news.completions) == [(t, i) for t in range(4) for i in (0, 1)]
    assert rig.pool.is_idle()
    assert rig.generate().completions == []


def test_a_death_reports_exactly_the_missing_answers_and_is_replaced() -> None:
    rig = Rig(1, {"rollout-0": ["die"]})
    rig.pool.submit(request(7, indices=(1, 3)))
    news = rig.generate()
    assert [(item.request.task, item.indices) for item in news.lost] == [(7, (1, 3))]
    assert "scripted death" in news.lost[0].cause
    assert rig.events[0][0] == "worker_died"
    rig.pool.submit(request(7, indices=news.lost[0].indices))
    assert {(c.task, c.index) for c in rig.generate().completions} == {(7, 1), (7, 3)}
    assert rig.workers.started == ["rollout-0", "rollout-1"]


def test_a_worker_that_is_silent_too_long_is_killed_and_its_work_is_lost() -> None:
    rig = Rig(1)
    rig.workers.held.add("rollout-0")
    rig.pool.submit(request(1))
    assert rig.generate().lost == []
    rig.clock.sleep(61.0)
    news = rig.generate()
    assert rig.workers.killed == ["rollout-0"]
    assert news.lost[0].indices == (0, 1)
    assert "no word for 60 s" in news.lost[0].cause


def test_a_jump_of_the_wall_clock_is_no_silence() -> None:
    rig = Rig(1)
    rig.workers.held.add("rollout-0")
    rig.pool.submit(request(1))
    rig.generate()
    for wall in (1e9, 0.0):
        rig.clock.wall = wall
        assert rig.generate().lost == []
    assert rig.workers.killed == []
    rig.clock.wall = 0.0
    rig.clock.passed += 61.0  # and time that passes is, whatever the wall clock says
    assert len(rig.generate().lost) == 1


def test_deaths_in_a_row_stop_the_run_with_the_last_cause() -> None:
    """H16."""
    rig = Rig(1, default="die")

    def die() -> None:
        rig.pool.submit(request(0))
        rig.clock.sleep(100.0)
        rig.generate()

    for _ in range(DEATHS_IN_A_ROW - 1):
        die()
    with pytest.raises(WorkerError, match=r"died or could not be started.*scripted death"):
        die()
    assert len(rig.workers.started) == DEATHS_IN_A_ROW


def test_the_second_death_in_a_row_asks_for_a_pause() -> None:
    rig = Rig(1, default="die")
    rig.pool.submit(request(0))
    rig.generate()
    rig.pool.submit(request(0))
    rig.generate()
    rig.pool.submit(request(0))
    assert rig.pool.calls() == []
    rig.clock.sleep(40.0)
    assert len(rig.pool.calls()) == 1


def test_a_lost_request_says_in_whose_company_it_was() -> None:
    rig = Rig(1, {"rollout-0": ["wait", "die"]})
    rig.pool.submit(request(1))
    rig.pool.submit(request(2))
    rig.generate()
    rig.pool.calls()
    rig.pool.submit(request(3))  # the call that dies is out already
    news = rig.pool.take(rig.workers.wait(rig.pool.calls(), timeout_s=1.0))
    assert {item.request.task: item.num_held for item in news.lost} == {1: 2, 2: 2, 3: 0}


def test_a_request_that_must_be_alone_waits_for_a_worker_and_keeps_others_away() -> None:
    rig = Rig(1, {"rollout-0": ["wait", "answer", "wait", "answer"]})
    rig.pool.submit(request(1))
    assert rig.generate().completions == []
    assert rig.pool.next_worker(alone=True) == "none"
    rig.pool.submit(request(2), alone=True)
    rig.pool.submit(request(3))
    assert {c.task for c in rig.generate().completions} == {1}
    rig.generate()
    assert rig.pool.waiting_for() == ["rollout-0 generates task 2, 2 answers missing"]
    assert {c.task for c in rig.generate().completions} == {2}
    assert {c.task for c in rig.generate().completions} == {3}
    assert rig.pool.is_idle()


def test_a_request_without_a_worker_can_be_cancelled() -> None:
    rig = Rig(1, default="die")
    for _ in range(2):
        rig.pool.submit(request(0))
        rig.generate()
    rig.pool.submit(request(5))  # during the pause
    rig.pool.cancel(5)
    assert rig.pool.is_idle()


def test_a_replacement_that_cannot_be_started_is_one_more_death() -> None:
    rig = Rig(2, {"rollout-0": ["die"]})
    fails = ["WorkerError"] * 2

    def make(name: str) -> ScriptedRollout:
        if fails:
            raise WorkerError(f"no node has room for {fails.pop()}")
        return rig.make(name, {}, "")

    rig.workers.make = make
    rig.pool.submit(request(0))
    rig.generate()
    assert len(rig.pool.members()) == 1
    rig.pool.calls()
    assert len(rig.pool.members()) == 1  # in its pause
    assert [kind for kind, _ in rig.events] == ["worker_died"] * 2
    for _ in range(3):
        rig.clock.sleep(100.0)
        rig.pool.calls()
    assert len(rig.pool.members()) == 2


def test_replacements_that_never_start_stop_the_run() -> None:
    rig = Rig(2, {"rollout-0": ["die"]})

    def make(name: str) -> ScriptedRollout:
        raise WorkerError("no node has room")

    rig.workers.make = make
    rig.pool.submit(request(0))
    rig.generate()

    def go_on() -> None:
        for _ in range(DEATHS_IN_A_ROW):
            rig.clock.sleep(100.0)
            rig.pool.calls()

    with pytest.raises(WorkerError, match=r"6 rollout workers in a row died or could not.*no node has room"):
        go_on()


def test_a_first_worker_that_cannot_be_started_is_an_error_at_once() -> None:
    class NoRoom(Rig):
        def make(self, name: str, scripts: dict[str, list[str]], default: str) -> ScriptedRollout:
            if name == "rollout-1":
                raise WorkerError("no node has room")
            return super().make(name, scripts, default)

    with pytest.raises(WorkerError, match=r"^no node has room"):
        NoRoom(2)


def test_the_version_to_serve_travels_with_the_next_call() -> None:
    rig = Rig(1)
    rig.pool.submit(request(0))
    rig.generate()
    rig.pool.serve(3)
    rig.pool.submit(request(1))
    assert all(int(v) == 3 for c in rig.generate().completions for v in c.versions)
    assert rig.made["rollout-0"].versions == [0, 3]


def test_a_cancelled_task_brings_no_answers() -> None:
    rig = Rig(1, {"rollout-0": ["wait"]})
    rig.pool.submit(request(5))
    rig.generate()
    rig.pool.cancel(5)
    news = rig.generate()
    assert news.completions == []
    assert rig.made["rollout-0"].cancelled == [5]


class LateRollout(ScriptedRollout):
    """Comes to its first call so late that the version is gone."""

    error: type[WeightsError] = VersionGoneError

    def work(self, **kwargs):
        if kwargs["version"] == 1:
            raise self.error("version 1 is not there; there are [2]")
        return super().work(**kwargs)


def test_an_actor_that_is_late_for_a_version_gets_the_one_of_now() -> None:
    rig = Rig(1)
    rig.workers.make = lambda name: LateRollout()
    rig.pool.shutdown()
    rig.pool.serve(1)
    for task in (0, 1):
        rig.pool.submit(request(task))
    rig.pool.fill()
    calls = rig.pool.calls()
    rig.pool.serve(2)
    rig.pool.cancel(1)
    news = rig.pool.take(calls)
    assert (news.completions, news.lost) == ([], [])
    assert {(c.task, c.index) for c in rig.generate().completions} == {(0, 0), (0, 1)}
    assert rig.pool.is_idle()


class TornRollout(LateRollout):
    error = WeightsError


def test_weights_that_are_not_what_was_published_are_an_error_however_late() -> None:
    rig = Rig(1)
    rig.workers.make = lambda name: TornRollout()
    rig.pool.shutdown()
    rig.pool.serve(1)
    rig.pool.submit(request(0))
    calls = rig.pool.calls()
    rig.pool.serve(2)
    with pytest.raises(WeightsError):
        rig.pool.take(calls)


def test_a_version_of_now_that_cannot_be_read_is_an_error() -> None:
    rig = Rig(1)
    rig.workers.make = lambda name: LateRollout()
    rig.pool.shutdown()
    rig.pool.serve(1)
    rig.pool.submit(request(0))
    with pytest.raises(WeightsError, match="version 1 is not there"):
        rig.generate()
