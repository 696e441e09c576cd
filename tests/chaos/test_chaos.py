"""`cauce chaos`: faults come when they are due, the verdict sees what it is there for, and a run survives."""

import json
import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cauce.chaos import run as chaos_run
from cauce.chaos.faults import KINDS, Schedule, parse_faults
from cauce.chaos.given import wall_of
from cauce.chaos.processes import find, strike, worker_name
from cauce.chaos.verdict import Fault, judge, read_record
from cauce.cli.main import main
from cauce.errors import RecipeError, TrainingStopped
from cauce.journal import Journal
from cauce.recipe.load import recipe_from_text
from cauce.runtime.process import process_state
from tests.journal.records import admit, make_answer, make_plan, make_ready, new_journal

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
    rates=st.dictionaries(st.sampled_from(sorted(KINDS)), st.floats(0.5, 10), min_size=1),
    seed=st.integers(0, 999),
)
def test_each_kind_comes_at_its_rate(rates: dict[str, float], seed: int) -> None:
    found = Counter(kind for kind, _ in moments(rates, seed, minutes=100))
    for kind, rate in rates.items():
        assert found[kind] == pytest.approx(rate * 100, rel=0.25, abs=3)


def moments(rates: dict[str, float], seed: int, *, minutes: float, every_s: float = 0.5) -> list[tuple[str, float]]:
    """Kind and second of all faults that come in so many minutes, of a run that is looked at so often."""
    schedule, found, second = Schedule(rates, seed), [], 0.0
    while second < 60 * minutes:
        for kind in schedule.due(second):
            schedule.done(kind, second)
            found.append((kind, second))
        second += every_s
    return found


def test_moments_come_by_seed() -> None:
    rates = {"rollout": 2.0, "driver": 1.0}
    assert moments(rates, 1, minutes=5) == moments(rates, 1, minutes=5) != moments(rates, 2, minutes=5)


def test_what_was_late_is_not_made_up_for() -> None:
    """Else a driver whose restart takes longer than its interval would be ended at each start."""
    schedule = Schedule({"driver": 6.0}, 0)
    schedule.done("driver", 100.0)
    assert schedule.due(104.0) == []
    assert schedule.due(116.0) == ["driver"]


# Processes


CHOOSE = random.Random(0)


@pytest.fixture
def titled() -> Iterator[Callable[[str], subprocess.Popen[bytes]]]:
    """Starts a process that is called so."""
    made = []

    def start(title: str) -> subprocess.Popen[bytes]:
        made.append(subprocess.Popen(["bash", "-c", f"exec -a '{title}' sleep 60"]))
        deadline = time.monotonic() + 10
        while title not in Path(f"/proc/{made[-1].pid}/cmdline").read_text() and time.monotonic() < deadline:
            time.sleep(0.01)
        return made[-1]

    yield start
    for child in made:
        child.kill()
        child.wait()


def test_workers_are_found_by_their_titles(titled: Callable[[str], subprocess.Popen[bytes]]) -> None:
    child = titled("ray::RolloutWorker.work")
    titled("ray::RolloutWorker.__init__")
    assert find(os.getpid(), "rollout", CHOOSE) == find(os.getpid(), "hang", CHOOSE) == child.pid
    assert find(os.getpid(), "learner", CHOOSE) is None
    assert find(os.getpid(), "driver", CHOOSE) == os.getpid()
    assert strike(child.pid, "hang")
    while process_state(child.pid) != "T":
        time.sleep(0.01)
    assert find(os.getpid(), "rollout", CHOOSE) is None  # one fault at a time
    assert strike(child.pid, "rollout")
    assert child.wait(10) == -signal.SIGKILL
    assert not strike(child.pid, "rollout")


def test_a_worker_has_the_name_of_its_log(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    for name, pid in (("rollout-0", 123), ("rollout-1", 45)):
        (tmp_path / "logs" / f"{name}.log").write_text(f"INFO cauce: process {pid} starts with 2 threads\n")
    assert worker_name(tmp_path, 45) == "rollout-1"
    assert worker_name(tmp_path, 12) == ""


# The verdict


META = {"recipe": "[model]\npath = 'none'\n[engine]\ndeterministic = true\n", "engine_dtype": "fp32"}


def finished(folder: Path) -> Path:
    """A run of two plans, of one task each, that trained both of its tasks."""
    meta = {"run_id": "test", "max_reuse": "1", "group_size": "2", **META}
    with Journal.create(folder, meta=meta) as journal:
        journal.event("started", {})
        admit(journal, 2)
        for plan in (1, 2):
            make_ready(journal, plan - 1, version=plan - 1)
            journal.write_plan(make_plan(plan, [plan - 1]))
            journal.mark_applied(plan, checksum=f"c{plan}", metrics={})
        journal.event("ended", {"status": "finished"})
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps({"plan": plan, "time/total": 2.0, "time/learn": 1.0}) + "\n" for plan in (1, 2))
    )
    (folder / "summary.json").write_text(json.dumps({"wall_s": 9.0}))
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
        ("lost", 1, "UPDATE sample SET offset = 1 WHERE task = 1 AND idx = 0"),
        ("lost", 1, "UPDATE task SET state = 'dropped', reason = 'poison' WHERE id = 1"),
        ("lost", 1, "UPDATE task SET state = 'dropped', reason = 'run_complete' WHERE id = 0"),
        ("plans_with_other_weights", 1, "UPDATE plan SET checksum = 'other' WHERE number = 1"),
        ("trained_twice", 1, "INSERT INTO plan_use VALUES (2, 1, 0)"),
        ("regenerated", 2, "INSERT INTO lease VALUES (0, 2, 'rollout-1', 0, '[0, 1]', 0.0, 'done')"),
    ],
)
def test_harm_is_seen(tmp_path: Path, name: str, number: int, damage: str) -> None:
    assert verdict(tmp_path, damage)[name] >= number


def test_a_damaged_payload_is_lost(tmp_path: Path) -> None:
    run, peace = finished(tmp_path / "run"), finished(tmp_path / "peace")
    before = [read_record(run)]
    (payload,) = (run / "payloads").glob("*.bin")
    damaged = bytearray(payload.read_bytes())
    damaged[-3] ^= 1  # in the last record
    payload.write_bytes(damaged)
    found = judge(run, [], before, wall_s=1.0, undisturbed=peace, undisturbed_s=1.0)
    assert found["lost_by_kind"]["damaged_answers"] == 1


def test_a_task_that_lost_its_reward_by_deaths_is_lost(tmp_path: Path) -> None:
    damages = [
        "UPDATE task SET state = 'dropped', reason = 'unscorable' WHERE id = 1",
        "UPDATE sample SET status = 'failed', value = NULL WHERE task = 1",
    ]
    assert verdict(tmp_path, *damages)["lost"] == 1


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
        journal.set_meta("recipe", META["recipe"])
    (run / "metrics.jsonl").touch()
    found = judge(run, [], [], wall_s=1.0, undisturbed=finished(tmp_path / "peace"), undisturbed_s=1.0)
    assert found["regenerated"] == 0
    assert found["asked_for_again"] == 1


def test_a_fault_is_followed_to_its_end(tmp_path: Path) -> None:
    """Of the events that come after it, each is of the role that was struck."""
    events = [
        (90.0, "worker_died", {"worker": "rollout-0"}),  # before it
        (101.0, "worker_died", {"worker": "reward-0"}),
        (101.5, "worker_died", {"worker": "rollout-9"}),
        (102.0, "worker_died", {"worker": "rollout-1"}),
        (103.0, "worker_started", {"worker": "reward-1"}),
        (112.0, "worker_started", {"worker": "rollout-2"}),
        (120.0, "learner_died", {}),
        (131.0, "learner_ready", {"redo_s": 4.0}),
    ]
    damages = [f"INSERT INTO event (time, kind, detail) VALUES ({t}, '{k}', '{json.dumps(d)}')" for t, k, d in events]
    struck = [
        Fault(kind="rollout", worker="rollout-1", pid=1, time=100.0, plan=1),
        Fault(kind="learner", worker="learner-0", pid=2, time=119.0, plan=2),
    ]
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


def test_what_a_driver_did_not_live_to_see_is_not_given_to_its_successor(tmp_path: Path) -> None:
    events = [(110.0, "started", {}), (125.0, "learner_died", {}), (115.0, "learner_ready", {"redo_s": 1.0})]
    damages = [f"INSERT INTO event (time, kind, detail) VALUES ({t}, '{k}', '{json.dumps(d)}')" for t, k, d in events]
    struck = [
        Fault(kind="learner", worker="learner-0", pid=1, time=100.0, plan=1),
        Fault(kind="driver", worker="", pid=2, time=101.0, plan=1),
    ]
    learner, driver = verdict(tmp_path, *damages, faults=struck)["faults"]
    assert learner["noticed_s"] is None
    assert (driver["noticed_s"], driver["replaced_s"], driver["without_redo_s"]) == (9.0, 14.0, 13.0)


# Both lives, of a driver that is scripted


class FakeRun:
    """In place of `cauce`: each life of the driver is a line of shell; events are written as a run would."""

    def __init__(self, folder: Path, *lives: str) -> None:
        self.folder, self.lives, self.started = folder, list(lives), 0
        finished(folder)

    def start(self, command: list[str], log: Path) -> subprocess.Popen[bytes]:
        self.started += 1
        with Journal.open(self.folder) as journal:
            journal.event("learner_ready", {"redo_s": 0.0})
            if "plan" in self.lives[0]:
                admit(journal, 1)
                number = journal.last_plan + 1
                make_ready(journal, journal.next_task_id - 1, version=number - 1)
                journal.write_plan(make_plan(number, [journal.next_task_id - 1]))
                journal.mark_applied(number, checksum="c", metrics={})
        time.sleep(0.01)
        with log.open("wb") as file:
            return subprocess.Popen(["bash", "-c", self.lives.pop(0)], stdout=file, stderr=file)


def live_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, *lives: str, stop_s: float = 1e9) -> Any:
    fake, told = FakeRun(tmp_path / "run", *lives), []
    monkeypatch.setattr(chaos_run, "_start", fake.start)
    monkeypatch.setattr(chaos_run.time, "time", lambda now=time.time: now() - 1)  # events are never before a birth
    life = chaos_run.Life(run_dir=fake.folder)
    chaos_run.live(life, ["train"], Schedule({kind: 60.0}, 0), stop_s=stop_s, tell=told.append)
    return life, fake


def test_a_driver_that_is_killed_is_resumed_until_the_run_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    life, fake = live_through(tmp_path, monkeypatch, "driver", "sleep 60 # plan", "sleep 60 # plan", "exit 0")
    assert [fault.kind for fault in life.faults] == ["driver", "driver"]
    assert fake.started == 3
    assert len(life.before) == 2


def test_a_paused_driver_must_say_that_it_paused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paused = "trap 'exit 130' TERM; while true; do sleep 0.01; done # plan"
    life, _ = live_through(tmp_path, monkeypatch, "pause", paused, "exit 0")
    assert [fault.kind for fault in life.faults] == ["pause"]
    failed = "trap 'echo it broke; exit 1' TERM; while true; do sleep 0.01; done"
    with pytest.raises(TrainingStopped, match=r"exit code 1(.|\n)*it broke"):
        live_through(tmp_path / "again", monkeypatch, "pause", failed)


def test_a_signal_that_came_too_late_is_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = "trap 'exit 0' TERM; while true; do sleep 0.01; done"
    life, fake = live_through(tmp_path, monkeypatch, "pause", done)
    assert (life.faults, life.before, fake.started) == ([], [], 1)


def test_drivers_that_make_no_plan_before_they_are_ended_end_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chaos_run, "FRUITLESS_LIVES", 2)
    with pytest.raises(TrainingStopped, match="fewer driver faults"):
        live_through(tmp_path, monkeypatch, "driver", *["sleep 60"] * 5)


def test_after_its_minutes_a_run_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    life, fake = live_through(tmp_path, monkeypatch, "driver", "sleep 3", stop_s=0.0)
    assert (life.faults, fake.started) == ([], 1)


# A run that is given


def given_recipe() -> Any:
    return recipe_from_text(META["recipe"], source="test")


def test_a_given_run_says_how_long_it_took(tmp_path: Path) -> None:
    run = finished(tmp_path / "run")
    assert wall_of(run, given_recipe()) == 9.0
    made = {"runs": {"undisturbed": str(run)}, "wall_s": {"undisturbed": 12.0}}
    (tmp_path / "chaos.json").write_text(json.dumps(made))
    assert wall_of(run, given_recipe()) == 12.0


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("INSERT INTO event (time, kind, detail) VALUES (1, 'worker_died', '{}')", "1 starts, worker_died"),
        ("INSERT INTO event (time, kind, detail) VALUES (1, 'started', '{}')", "2 starts"),
        ("DELETE FROM event WHERE kind = 'ended'", "not finished"),
        ("UPDATE event SET detail = '{\"status\": \"failed\"}' WHERE kind = 'ended'", "but failed"),
        ("UPDATE meta SET value = value || '[learner]\nlr = 0.5' WHERE key = 'recipe'", r"\[learner\] differs"),
        ("INSERT INTO meta VALUES ('forked_from', 'x')", "it is a fork"),
    ],
)
def test_a_given_run_that_cannot_be_compared_with(tmp_path: Path, damage: str, words: str) -> None:
    run = finished(tmp_path / "run")
    with Journal.open(run) as journal:
        journal._connection.execute(damage)
    with pytest.raises(RecipeError, match=words):
        wall_of(run, given_recipe())


# The command


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({}, 0),
        ({"lost": 1}, 1),
        ({"trained_twice": 1}, 1),
        ({"regenerated": 1}, 1),
        ({"plans_with_other_weights": 1}, 1),
        ({"faults": [], "by_kind": {}}, 1),
    ],
)
def test_the_exit_code_is_the_verdict(
    changes: dict[str, Any],
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    struck = [Fault(kind="rollout", worker="rollout-0", pid=1, time=1.0, plan=1)]
    result = {**verdict(tmp_path, faults=struck), **changes}
    monkeypatch.setattr(chaos_run, "chaos", lambda *args, **kwargs: result)
    with pytest.raises(SystemExit) as ended:
        main(["chaos", "quickstart", "--faults", "rollout=1,driver=1", "--folder", str(tmp_path)])
    assert (ended.value.code or 0) == code
    assert "driver" in capsys.readouterr().out  # a kind that never came is shown too


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["quickstart", "--faults", "engine=1"], "no kind 'engine'"),
        (["quickstart", "run.name=mine"], "a folder of its own"),
        (["quickstart", "cluster.address=auto"], "leave it at local"),
        (["quickstart", "rollout.groupsize=3"], "rollout.group_size"),
        (["quickstart", "journal.locking=exclusive"], "journal.locking=shared"),
        (["quickstart", "--undisturbed", "nowhere"], "nowhere"),
    ],
)
def test_bad_input(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["chaos", *arguments])
    assert ended.value.code in (1, 2)
    assert words in capsys.readouterr().err
