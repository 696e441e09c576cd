"""Looking for samples and for the state of a run, beside its owner and without disturbing it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cauce.errors import DataError, FencedError
from cauce.journal import Journal
from cauce.journal.browse import FoundSample, SampleFilter, find_samples, parse_plans, parse_reward
from cauce.journal.overview import find_runs, read_overview
from cauce.journal.owner import live_owner
from cauce.types import Outcome
from tests.journal.records import make_answer, make_plan, make_task, scored

META = {"run_id": "abc", "group_size": "2", "lineage": "0", "max_reuse": "2", "recipe": "[run]\nplans = 5\n"}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Four tasks of two answers: 0 and 1 trained, 1 twice; 2 dropped; 3 half scored. Rewards task + index / 2."""
    run_dir = tmp_path / "run"
    with Journal.create(run_dir, meta=META) as journal:
        journal.admit([make_task(number) for number in range(4)])
        for task in range(4):
            attempt = journal.lease(task, indices=(0, 1), worker="rollout-0", version=task, until=2e9)
            journal.record_answers([make_answer(task, i, attempt=attempt, version=task) for i in (0, 1)])
            journal.record_outcomes([(task, 0, scored(float(task)))])
            if task < 3:
                failed = Outcome(status="failed", value=None, parts={}, detail="ValueError: no")
                journal.record_outcomes([(task, 1, failed if task == 2 else scored(task + 0.5))])
        journal.drop(2, "unscorable", detail="1 of 2")
        for number, tasks in ((1, (0, 1)), (2, (1,))):
            for task in tasks:
                if journal.state(task) == "leased":
                    journal.mark_ready(task)
            journal.write_plan(make_plan(number, tasks))
            journal.mark_applied(number, checksum=f"{number}", metrics={"reward/mean": number / 4})
    return run_dir


def found(run: Path, **wanted: object) -> list[tuple[int, int]]:
    with Journal.read_only(run) as journal:
        return [(s.task, s.index) for s in find_samples(journal, SampleFilter(**wanted))]  # type: ignore[arg-type]


def test_samples_by_each_filter_and_by_several(run: Path) -> None:
    everything = [(task, index) for task in range(4) for index in (0, 1)]
    assert found(run) == everything
    assert found(run, task=2) == [(2, 0), (2, 1)]
    assert found(run, plans=(2, 2)) == [(1, 0), (1, 1)]
    assert found(run, plans=(1, 9)) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert found(run, status="failed") == [(2, 1)]
    assert found(run, status="unscored") == [(3, 1)]
    assert found(run, reward=parse_reward(">=1.5")) == [(1, 1), (2, 0), (3, 0)]
    assert found(run, reward=parse_reward("0")) == [(0, 0)]
    assert found(run, reward=parse_reward("!=0"), plans=(1, 1)) == [(0, 1), (1, 0), (1, 1)]
    assert found(run, limit=3) == everything[:3]
    assert found(run, limit=0) == everything
    assert found(run, task=9) == []
    with pytest.raises(DataError, match="'scores': write one of scored, abstained"):
        found(run, status="scores")


def sample(run: Path, task: int, index: int) -> FoundSample:
    with Journal.read_only(run) as journal:
        return next(s for s in find_samples(journal, SampleFilter(task=task)) if s.index == index)


def test_a_sample_is_everything_that_the_record_says(run: Path) -> None:
    one = sample(run, 1, 1)
    answer = make_answer(1, 1)
    assert one.arrays is not None
    assert one.arrays.token_ids.tolist() == answer.token_ids.tolist()
    assert one.logp_mean == pytest.approx(float(answer.logps.mean()))
    assert (one.plans, one.reward, one.parts) == ((1, 2), 1.5, {"score": 1.5})
    assert (one.row.prompt, one.task_state, one.versions) == ("What is 1 + 1?", "trained", (1, 1))
    failed = sample(run, 2, 1)
    assert (failed.status, failed.reward, failed.detail) == ("failed", None, "ValueError: no")
    assert (failed.task_state, failed.drop_reason, failed.plans) == ("dropped", "unscorable", ())


def test_a_payload_that_is_gone_leaves_the_rest(run: Path) -> None:
    for file in (run / "payloads").iterdir():
        file.unlink()
    assert sample(run, 1, 1).reward == 1.5
    assert sample(run, 1, 1).logp_mean is None


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("1", ("=", 1.0)),
        (">=1", (">=", 1.0)),
        ("< 0.5", ("<", 0.5)),
        ("==2e-1", ("=", 0.2)),
        ("!=-3", ("!=", -3.0)),
    ],
)
def test_comparisons_of_rewards(text: str, parsed: tuple[str, float]) -> None:
    assert parse_reward(text) == parsed


def test_what_is_no_comparison_and_no_plan_is_refused() -> None:
    for text in ("", "high", "=>1", "1..2", ">", "nan"):
        with pytest.raises(DataError, match="--reward"):
            parse_reward(text)
    assert (parse_plans("7"), parse_plans("3-9")) == ((7, 7), (3, 9))
    with pytest.raises(DataError, match="--plan '3-': write a number such as 7"):
        parse_plans("3-")


# The state of a run


def test_states_follow_the_owners_words(run: Path) -> None:
    one = read_overview(run)
    assert (one.state, one.plans, one.num_plans, one.reward, one.accuracy) == ("new", 2, 5, 0.5, None)
    with Journal.open(run) as journal:
        journal.event("started", {"host": "here", "pid": 1, "plan": 2})
        journal.event("evaluated", {"plan": 2, "set": "test", "accuracy": 0.25})
        alive = read_overview(run)
        assert (alive.state, alive.accuracy, alive.accuracy_plan) == ("running", 0.25, 2)
        assert alive.owner is not None
        assert alive.owner.pid == os.getpid()
        with pytest.raises(FencedError):  # asking has not dropped this process's lock
            Journal.open(run)
    assert read_overview(run).state == "killed"
    with Journal.open(run) as journal:
        journal.event("started", {"host": "here", "pid": 1, "plan": 2})
        journal.event("ended", {"status": "failed", "plan": 2, "failure": "RewardError: no"})
    assert (read_overview(run).state, read_overview(run).failure) == ("failed", "RewardError: no")


OWN = """
import sys
from cauce.journal import Journal
with Journal.open(sys.argv[1]) as journal:
    print("mine", flush=True)
    sys.stdin.readline()
    journal.event("still", {"mine": 1})
"""


def test_another_process_is_seen_and_not_disturbed(run: Path) -> None:
    assert live_owner(run) is None
    owner = subprocess.Popen(
        [sys.executable, "-c", OWN, str(run)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    assert owner.stdout.readline() == "mine\n"
    seen = live_owner(run)
    assert seen is not None
    assert seen.pid == owner.pid
    assert read_overview(run).state == "running"
    assert len(found(run)) == 8
    with pytest.raises(FencedError):
        Journal.open(run)
    owner.communicate("go on\n", timeout=60)
    assert owner.returncode == 0
    assert live_owner(run) is None
    with Journal.read_only(run) as journal:
        assert len(journal.events("still")) == 1


def test_runs_of_a_folder_are_found_by_their_journals(run: Path) -> None:
    (run.parent / "nothing").mkdir()
    (run.parent / "a file").write_text(json.dumps({}))
    assert find_runs(run.parent) == [run]
    assert find_runs(run) == [run]
    assert find_runs(run.parent / "nothing") == []
