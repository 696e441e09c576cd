"""The packaged quickstart on the real model, killed with -9 at three random moments, against one that never was."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cauce.errors import JournalError
from cauce.journal import Journal
from cauce.runtime.flow import LEASE_S
from tests.crash.promises import Record, assert_as_if_it_had_never_stopped, assert_nothing_lost, read_record

SETTINGS = ["run.plans=6", "engine.deterministic=true", "checkpoint.every=2", "eval.tasks=8", "eval.at_start=false"]
LONGEST_S = 12.0  # of a life, from its first lease on: three of them end within the six plans
LIVES = 3


def start(folder: Path, name: str, *arguments: str) -> subprocess.Popen[bytes]:
    """A `cauce` command in `folder`/runs/..; what it says goes to a file, which its orphans may hold open."""
    command = [sys.executable, "-m", "cauce", *arguments]
    with (folder / f"{name}.log").open("wb") as log:
        return subprocess.Popen(command, cwd=folder, stdout=log, stderr=subprocess.STDOUT)


def finish(folder: Path, name: str, *arguments: str) -> None:
    assert start(folder, name, *arguments).wait(timeout=900) == 0, (folder / f"{name}.log").read_text()[-4000:]


def has_leased(run: Path, *, since: float) -> bool:
    try:
        with Journal.read_only(run) as journal:
            return any(lease.until > since + LEASE_S for lease in journal.leases())
    except JournalError:  # it has no tables yet
        return False


def live_and_die(folder: Path, life: int, seconds: float) -> Record:
    """One life of the run `killed`, ended some seconds after its first lease; what it leaves."""
    run = folder / "runs" / "killed"
    arguments = ("resume", str(run)) if life else ("train", "quickstart", "run.name=killed", *SETTINGS)
    began, deadline = time.time(), time.monotonic() + 300
    process = start(folder, f"life-{life}", *arguments)
    while not has_leased(run, since=began):
        assert process.poll() is None, (folder / f"life-{life}.log").read_text()[-4000:]
        assert time.monotonic() < deadline
        time.sleep(0.2)
    time.sleep(seconds)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    record = read_record(run)
    print(f"life {life} ended after {seconds:.1f} s: {len(record.answers)} answers, {len(record.plans)} plans")
    return record


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_killed_at_three_random_moments(tmp_path: Path) -> None:
    seed = int(os.environ.get("CAUCE_CRASH_SEED", time.time_ns() % 10**6))
    print(f"CAUCE_CRASH_SEED={seed}")  # shown where the test fails
    moments = random.Random(seed)
    records = [live_and_die(tmp_path, life, moments.uniform(0.5, LONGEST_S)) for life in range(LIVES)]
    runs = tmp_path / "runs"
    finish(tmp_path, "last", "resume", str(runs / "killed"))
    finish(tmp_path, "straight", "train", "quickstart", "run.name=straight", *SETTINGS)
    for before in records:
        assert_nothing_lost(before, runs / "killed")
    assert_as_if_it_had_never_stopped(runs / "killed", runs / "straight")
