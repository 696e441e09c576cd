"""`cauce chaos`: faults come when they are due, the verdict sees what it is there for, and a run survives."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cauce.chaos.faults import KINDS, Schedule, parse_faults
from cauce.chaos.processes import find, strike
from cauce.chaos.verdict import Fault, judge, read_record
from cauce.cli.main import main
from cauce.errors import RecipeError
from cauce.journal import Journal
from tests.journal.records import admit, make_answer, make_plan, make_ready, new_journal

ROOT = Path(__file__).parents[2]

# Faults and when


def test_faults_are_read() -> None:
    assert parse_faults("rollout=1, driver=0.25,reward") == {"rollout": 1.0, "driver": 0.25, "reward": 1.0}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("engine=1", "no kind 'engine'"),
        ("", "no kind ''"),
        ("rollout=0", "above 0"),
        ("rollout=-1", "above 0"),
        ("rollout=often", "rollout=often"),
        ("rollout=nan", "above 0"),
        ("rollout=1e9", "at most 60"),
    ],
)
def test_faults_that_are_none(text: str, words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        parse_faults(text)


@given(
    rates=st.dictionaries(st.sampled_from(sorted(KINDS)), st.floats(0.1, 10), min_size=1),
    seed=st.integers(0, 999),
)
def test_each_kind_comes_at_its_rate(rates: dict[str, float], seed: int) -> None:
    schedule, found = Schedule(rates, seed), dict.fromkeys(rates, 0)
    minutes = 200 / min(rates.values())
    while (kind := schedule.due(60 * minutes)) is not None:
        found[kind] += 1
        schedule.done(kind)
    for kind, rate in rates.items():
        assert found[kind] == pytest.approx(rate * minutes, rel=0.15)


def test_moments_come_in_order_and_by_seed() -> None:
    def moments(seed: int) -> list[str]:
        schedule, found = Schedule({"rollout": 2.0, "driver": 1.0}, seed), []
        for tenth in range(3000):
            if kind := schedule.due(tenth / 10):
                schedule.done(kind)
                found.append(f"{kind} {tenth}")
        return found

    assert moments(1) == moments(1) != moments(2)
    assert len(moments(1)) == pytest.approx(15, abs=3)


# Processes


def test_workers_are_found_by_their_titles() -> None:
    child = subprocess.Popen(["bash", "-c", "exec -a ray::RolloutWorker.work sleep 60"])
    try:
        deadline = time.monotonic() + 10
        while find(os.getpid(), "rollout") is None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert find(os.getpid(), "rollout") == find(os.getpid(), "hang") == child.pid
        assert find(os.getpid(), "learner") is None
        assert find(os.getpid(), "driver") == os.getpid()
        assert strike(child.pid, "rollout")
        assert child.wait(10) == -signal.SIGKILL
        assert not strike(child.pid, "rollout")
    finally:
        child.kill()
        child.wait()


# The verdict


def finished(folder: Path) -> Path:
    """A run of two plans, of one task each, that trained both of its tasks."""
    with new_journal(folder) as journal:
        admit(journal, 2)
        for plan in (1, 2):
            make_ready(journal, plan - 1, version=plan - 1)
            journal.write_plan(make_plan(plan, [plan - 1]))
            journal.mark_applied(plan, checksum=f"c{plan}", metrics={})
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps({"plan": plan, "time/total": 2.0, "time/learn": 1.0}) + "\n" for plan in (1, 2))
    )
    return folder


def verdict(folder: Path, *damages: str, faults: list[Fault] | None = None) -> dict[str, Any]:
    """Of a run that was damaged after a fault, if any is given."""
    run, peace = finished(folder / "run"), finished(folder / "peace")
    before = [read_record(run)]
    with Journal.open(run) as journal:
        journal._connection.execute("PRAGMA foreign_keys = OFF")
        for damage in damages:
            journal._connection.execute(damage)
    return judge(run, faults or [], before, wall_s=10.0, undisturbed=peace, undisturbed_s=9.0)


def test_a_run_without_harm(tmp_path: Path) -> None:
    found = verdict(tmp_path)
    assert (found["lost"], found["trained_twice"], found["regenerated"]) == (0, 0, 0)
    assert found["effective"] == pytest.approx(0.9)
    assert found["plans_with_equal_weights"] == 2
    assert found["asked_for_again"] == 0
    assert found["seconds"]["disturbed"] == {"learn": 2.0, "outside": 6.0}


@pytest.mark.parametrize(
    ("name", "number", "damage"),
    [
        ("lost", 1, "UPDATE task SET state = 'pending' WHERE id = 1"),
        ("lost", 1, "DELETE FROM sample WHERE task = 0 AND idx = 1"),
        ("lost", 1, "UPDATE plan SET checksum = 'other' WHERE number = 1"),
        ("trained_twice", 1, "INSERT INTO plan_use VALUES (2, 1, 0)"),
        ("regenerated", 2, "INSERT INTO lease VALUES (0, 2, 'rollout-1', 0, '[0, 1]', 0.0, 'done')"),
    ],
)
def test_harm_is_seen(tmp_path: Path, name: str, number: int, damage: str) -> None:
    assert verdict(tmp_path, damage)[name] == number


def test_an_answer_that_was_under_way_may_be_asked_for_again(tmp_path: Path) -> None:
    """The death comes before anything of it is on record."""
    run = tmp_path / "run"
    with new_journal(run) as journal:
        admit(journal, 1)
        journal.lease(0, indices=[0, 1], worker="rollout-0", version=0, until=1e12)
        journal.record_answers([make_answer(0, 0)])
        journal.release(0, counts_as_death=True, reason="its worker died")
        journal.lease(0, indices=[1], worker="rollout-1", version=0, until=1e12)
        journal.record_answers([make_answer(0, 1, attempt=2)])
    found = judge(run, [], [], wall_s=1.0, undisturbed=finished(tmp_path / "peace"), undisturbed_s=1.0)
    assert found["regenerated"] == 0
    assert found["asked_for_again"] == 1


def test_a_fault_is_followed_to_its_end(tmp_path: Path) -> None:
    """Of the events that come after it, each is of the role that was struck."""
    events = [
        (90.0, "worker_died", {"worker": "rollout-0"}),  # before it
        (101.0, "worker_died", {"worker": "reward-0"}),
        (102.0, "worker_died", {"worker": "rollout-1"}),
        (103.0, "worker_started", {"worker": "reward-1"}),
        (112.0, "worker_started", {"worker": "rollout-2"}),
        (120.0, "learner_died", {}),
        (131.0, "learner_ready", {"redo_s": 4.0}),
    ]
    damages = [f"INSERT INTO event (time, kind, detail) VALUES ({t}, '{k}', '{json.dumps(d)}')" for t, k, d in events]
    struck = [Fault(kind="rollout", pid=1, time=100.0, plan=1), Fault(kind="learner", pid=2, time=119.0, plan=2)]
    found = verdict(tmp_path, *damages, faults=struck)
    rollout, learner = found["faults"]
    assert (rollout["noticed_s"], rollout["replaced_s"]) == (2.0, 12.0)
    assert (learner["noticed_s"], learner["replaced_s"]) == (1.0, 12.0)
    assert (learner["redo_s"], learner["without_redo_s"]) == (4.0, 8.0)
    assert found["by_kind"]["rollout"] == {
        "count": 1,
        "noticed_s": {"median": 2.0, "max": 2.0},
        "replaced_s": {"median": 12.0, "max": 12.0},
    }


# The command


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["quickstart", "--faults", "engine=1"], "no kind 'engine'"),
        (["quickstart", "run.name=mine"], "a folder of its own"),
        (["quickstart", "cluster.address=auto"], "leave it at local"),
        (["quickstart", "rollout.groupsize=3"], "rollout.group_size"),
        (["quickstart", "--undisturbed", "nowhere"], "nowhere"),
    ],
)
def test_bad_input(
    arguments: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["chaos", *arguments])
    assert ended.value.code in (1, 2)
    assert words in capsys.readouterr().err
