"""Whole runs in virtual time: many seeds hold every promise, a seed replays exactly, and faults put in are found."""

import subprocess
import sys
from pathlib import Path

import pytest
import typer

from cauce.cli.main import main
from cauce.cli.simulate import end_if_broken
from cauce.journal import Journal
from cauce.simulate.invariants import Witness, check_record
from cauce.simulate.many import Tally, run_seeds
from cauce.simulate.run import Cast, Report, simulate
from cauce.simulate.script import RATES, Violation
from tests.journal.records import admit, make_plan, make_ready, new_journal
from tests.simulate.mutants import CASTS, MENDED

SEEDS = 500
# For a process of its own.
DIGESTS = "from cauce.simulate.run import simulate\nfor seed in {seeds}: print(simulate(seed).digest)"


def test_every_promise_holds_in_500_seeds() -> None:
    tally = Tally()
    for report in run_seeds(range(SEEDS), jobs=2):
        assert not report.violation, "\n".join([*report.trace[-60:], f"seed {report.seed}: {report.violation}"])
        tally.add(report)
    assert tally.seeds == SEEDS
    assert tally.starts > 1.5 * SEEDS
    assert tally.compared > SEEDS / 4
    assert tally.statuses["finished"] > 0.95 * SEEDS  # the data of a few seeds leave nothing to train on
    rare = {"moved", "learner_hang", "learner_lost"}
    assert set(RATES) - set(tally.faults) <= rare
    print(tally)


def test_a_seed_gives_the_same_trace_in_any_process() -> None:
    """No hash order, no process id, no machine time in any decision."""
    seeds = [3, 9, 17, 21]
    here = [simulate(seed).digest for seed in seeds]
    assert [simulate(seed).digest for seed in seeds] == here
    done = subprocess.run(
        [sys.executable, "-c", DIGESTS.format(seeds=seeds)],
        env={"PYTHONHASHSEED": "1", "PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.split() == here


def test_seeds_differ() -> None:
    reports = [simulate(seed) for seed in range(6)]
    assert len({report.digest for report in reports}) == 6
    assert len({str(report.settings) for report in reports}) == 6


def first_broken(cast: Cast, *, within: int) -> Report:
    for seed in range(within):
        report = simulate(seed, cast)
        if report.violation:
            return report
    raise AssertionError(f"{within} seeds have not found it")


# Each fault with the words of the violation that it leads to: another one would be the test's own.
FOUND = {
    "forgets a lost index": "nothing has happened for",
    "asks for all answers again": "which are recorded already",
    "accuses every task of a death": "was dropped as poison, and that is not so",
    "publishes before it records": "publish of version 1, and the newest plan on record is 0",
    "plans in order of arrival": "with faults plan",
    "admits one task too many": "does not fit: the buffer holds",
    "leaves a plan open": "nothing has happened for",
    "plans stale groups": "a plan uses a group that is too stale",
    "acknowledges before the commit": "was taken and is not on record",
    "resumes with part of the state": "the last weights have taken the steps",
}


@pytest.mark.parametrize("fault", CASTS)
def test_a_fault_that_is_put_in_is_found(fault: str) -> None:
    report = first_broken(CASTS[fault], within=60)
    assert FOUND[fault] in report.violation
    assert not simulate(report.seed).violation


@pytest.mark.parametrize(
    ("fault", "seed", "words"),
    [
        ("a learner's death in a rebuild", 17, "learner learner-1 died"),
        ("an actor late for its version", 3177, "version 0 is not in RUN"),
        ("a full disk at the start", 30, "disk is full"),
        ("long prompts at an epoch's end", 6439, "every one of the 4 prompts"),
    ],
)
def test_faults_that_were_found_stay_mended(fault: str, seed: int, words: str) -> None:
    """Each by the seed that shows it: with the fault put back it breaks a promise, without it none."""
    broken = simulate(seed, MENDED[fault])
    assert words in broken.violation
    mended = simulate(seed)
    assert not mended.violation
    assert mended.status == "finished"


# The invariants see what they are there for


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("UPDATE task SET id = 9 WHERE id = 3", "admission numbers have a gap"),
        ("UPDATE plan SET number = 5 WHERE number = 2", "plan numbers have a gap"),
        ("UPDATE plan SET state = 'planned', checksum = NULL WHERE number = 1", "open plan is followed"),
        ("INSERT INTO plan_use VALUES (2, 1, 0)", "used too often"),
        ("UPDATE sample SET min_version = -1 WHERE task = 0", "too stale"),
        ("UPDATE sample SET max_version = 1 WHERE task = 0", "newer than the plan"),
        ("DELETE FROM sample WHERE task = 0 AND idx = 1", "incomplete"),
        ("UPDATE task SET state = 'leased' WHERE id = 2", "leases and states disagree"),
        ("UPDATE lease SET attempt = 2, indices = '[1]' WHERE task = 0", "asked for again"),
        ("UPDATE task SET state = 'trained' WHERE id = 2", "in no applied plan"),
        ("UPDATE plan SET mini_batches = '[[1, 0]]' WHERE number = 2", "mini-batches are"),
    ],
)
def test_a_damaged_record_is_seen(tmp_path: Path, damage: str, words: str) -> None:
    settings = {"buffer.max_reuse": 1, "buffer.max_staleness": 0, "rollout.group_size": 2}
    with new_journal(tmp_path / "run") as journal:
        admit(journal, 4)
        for plan in (1, 2):
            make_ready(journal, plan - 1, version=plan - 1)
            journal.write_plan(make_plan(plan, [plan - 1]))
            journal.mark_applied(plan, checksum="c", metrics={})
        witness = Witness(tmp_path / "run" / "journal.db")
        witness.begin()
        check_record(witness, settings)
        _damage(journal, damage)
        with pytest.raises(Violation, match=words):
            check_record(witness, settings)
        witness.close()


def _damage(journal: Journal, statement: str) -> None:
    connection = journal._connection
    connection.execute("PRAGMA foreign_keys = OFF")
    connection.execute(statement)


# The command


def test_the_command_runs_seeds_and_one_seed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["simulate", "--seeds", "3", "--first", "5"])
    assert not ended.value.code
    assert "3 seeds clean" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["simulate", "--seed", "5", "--trace"])
    out = capsys.readouterr().out
    assert "rollout-0 starts" in out
    assert simulate(5).digest in out


def test_the_command_says_how_to_replay_a_broken_seed(capsys: pytest.CaptureFixture[str]) -> None:
    report = first_broken(CASTS["publishes before it records"], within=3)
    with pytest.raises(typer.Exit):
        end_if_broken(report, whole=False)
    out = capsys.readouterr().out
    assert f"cauce simulate --seed {report.seed} --trace" in out
    assert "publish of version 1, and the newest plan on record is 0" in out
    assert "run.plans=" in out
