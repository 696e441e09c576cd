"""What the control plane does per turn, counted: it may depend on what happens, not on how many workers or past tasks
there are."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmarks.control_plane import LONG_RUN, run_shape
from benchmarks.engines import TimedWorkers

from cauce.journal import Journal
from cauce.metrics.observer import NullObserver
from cauce.runtime.trainer import PUBLISHED_KEPT
from cauce.simulate.clock import VirtualClock
from cauce.stages.run import Training
from tests.fakes import ScriptedRollout, request
from tests.journal.records import admit, make_plan, make_ready, new_journal
from tests.runtime.rig import PoolRig


class Counted(dict[Any, Any]):
    """Counts how often somebody goes through it."""

    walks = 0

    def __iter__(self) -> Any:
        Counted.walks += 1
        return super().__iter__()


@pytest.mark.parametrize("actors", [3, 300])
def test_a_turn_of_the_pool_visits_no_idle_worker(actors: int) -> None:
    rig = PoolRig(lambda name: ScriptedRollout([]), actors=actors)
    rig.pool.fill()
    rig.pool._members = members = Counted(rig.pool._members)
    Counted.walks = 0
    for task in range(20):
        rig.pool.submit(request(task))
        assert len(rig.pool.calls()) == 1
        assert len(rig.generate().completions) == 2
        assert rig.pool.is_idle()
    assert len(members) == actors
    assert Counted.walks == 0


@pytest.mark.parametrize("actors", [3, 300])
def test_the_least_loaded_worker_is_the_one_that_a_scan_finds(actors: int) -> None:
    rig = PoolRig(lambda name: ScriptedRollout([]), actors=actors)
    rig.pool.fill()
    for task in range(5 * actors):
        load = min(len(member.open) for member in rig.pool._members)
        chosen = rig.pool.next_worker()
        expected = next(m.worker.name for m in rig.pool._members if len(m.open) == load)
        assert chosen == expected
        assert rig.pool.submit(request(task, indices=tuple(range(1 + task % 3)))) == expected
        if task % 7 == 6:
            rig.pool.cancel(task - 3)
    assert len(rig.pool._loads) <= 4 * actors + 65


def steps_of(journal: Journal, ask: Any) -> int:
    """Instructions of SQLite's machine that a question takes."""
    steps = 0

    def count() -> None:
        nonlocal steps
        steps += 1

    journal._connection.set_progress_handler(count, 1)
    try:
        ask()
    finally:
        journal._connection.set_progress_handler(None, 0)
    return steps


def test_what_the_trainer_asks_at_every_turn_takes_no_longer_after_many_plans(tmp_path: Path) -> None:
    with new_journal(tmp_path / "run") as journal:
        found = []
        for plans in (3, 60):
            for number in range(journal.last_plan + 1, plans + 1):
                (task, dropped) = admit(journal, 2)
                make_ready(journal, task)
                journal.drop(dropped, "no_signal")
                journal.write_plan(make_plan(number, [task]))
                journal.mark_applied(number, checksum="0", metrics={})
            found.append([steps_of(journal, ask) for ask in (journal.occupancy, lambda: journal.last_decided)])
        assert min(found[0]) > 0
        assert found[0] == found[1]


def fail_midway(journal: Journal) -> None:
    with journal.transaction():
        admit(journal, 3)
        journal.drop(2, "stale")
        raise ZeroDivisionError


def test_kept_counts_are_those_of_the_rows_after_rollbacks_and_in_a_new_owner(tmp_path: Path) -> None:
    def recount(journal: Journal) -> tuple[dict[str, int], dict[str, int]]:
        states = dict(journal.select("SELECT state, COUNT(*) FROM task GROUP BY state"))
        query = "SELECT reason, COUNT(*) FROM task WHERE state = 'dropped' GROUP BY reason"
        return states, dict(journal.select(query))

    def kept(journal: Journal) -> tuple[dict[str, int], dict[str, int]]:
        return {state: num for state, num in journal.counts().items() if num}, journal.drops()

    with new_journal(tmp_path / "run") as journal:
        admit(journal, 6)
        make_ready(journal, 0)
        journal.drop(1, "no_signal")
        with pytest.raises(ZeroDivisionError):
            fail_midway(journal)
        assert kept(journal) == recount(journal) == ({"pending": 4, "ready": 1, "dropped": 1}, {"no_signal": 1})
        journal.drop(3, "stale")
        journal.write_plan(make_plan(1, [0]))
        journal.mark_skipped(1, reason="nan")
        assert journal.occupancy()["trained"] == 1
        assert kept(journal) == recount(journal)
    with Journal.open(tmp_path / "run") as journal:
        assert kept(journal) == recount(journal)
        assert journal.drops() == {"no_signal": 1, "stale": 1, "non_finite": 1}


def test_what_a_run_holds_is_bounded_over_plans(tmp_path: Path) -> None:
    """Containers of trainer, pool and flow, during a run of 270 plans."""
    sizes: dict[str, int] = {}
    shape = replace(LONG_RUN, actors=6, plans=270, checkpoint_every=100)

    def look(journal: Journal, workers: TimedWorkers, training: Training) -> None:
        for owner in (
            training.trainer,
            training.flow,
            training.buffer,
            training.session.pool,
            training.session.rewards,
        ):
            for name, value in vars(owner).items():
                if isinstance(value, dict | list | set):
                    sizes[name] = max(sizes.get(name, 0), len(value))
        workers.measured.turns.clear()

    run_shape(shape, tmp_path / "run", VirtualClock(), observer=NullObserver(), on_turn=look)
    assert sizes.pop("_published") == PUBLISHED_KEPT
    assert max(sizes.values()) <= 4 * 6 + 65, sizes
    assert {"_members", "_out", "_holders", "_open", "_until"} <= sizes.keys()
