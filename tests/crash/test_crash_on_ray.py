"""The same promises where workers are Ray actors: kill -9 of the driver, or of a worker, at a named point."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cauce import faults
from cauce.journal import Journal
from tests.crash.promises import assert_as_if_it_had_never_stopped, assert_nothing_lost, read_record

ROOT = Path(__file__).parents[2]

# In which process a point lies. A driver that dies is resumed; a worker that dies is replaced while the run goes on.
DRIVER = [("after_lease", 1), ("payload_torn", 9), ("answers_recorded", 1), ("after_planned", 2),
          ("before_applied", 2), ("after_applied", 2), ("after_publish", 2), ("checkpoint_recorded", 1)]  # fmt: skip
WORKERS = [("mid_decode", 2, "worker_died"), ("between_micro_batches", 3, "learner_died"),
           ("checkpoint_synced", 1, "learner_died"), ("checkpoint_renamed", 1, "learner_died")]  # fmt: skip

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def run_program(model: Path, run: Path, *, fault: str = "") -> int:
    """The exit code of a driver."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "TMPDIR": "/tmp"}
    environment |= {faults.VARIABLE: fault} if fault else {}
    command = [sys.executable, "-m", "tests.crash.program", str(model), str(run)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=280)
    said = done.stdout + done.stderr
    assert done.returncode in (0, -9), said[-6000:]
    if not fault:  # H3: a run that ends well says nothing of errors
        assert "ERROR" not in said
        assert "Traceback" not in said
    return done.returncode


@pytest.fixture(scope="module")
def straight_on_ray(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("straight") / "run"
    assert run_program(model, run) == 0
    return run


@pytest.mark.parametrize(("point", "hit"), DRIVER)
def test_a_driver_killed_at(model: Path, straight_on_ray: Path, tmp_path: Path, point: str, hit: int) -> None:
    run, marker = tmp_path / "run", tmp_path / "marker"
    code = run_program(model, run, fault=f"{point}:{hit}:{marker}")
    assert marker.exists()
    assert code == -9
    before = read_record(run)
    assert run_program(model, run) == 0
    assert_nothing_lost(before, run)
    assert_as_if_it_had_never_stopped(run, straight_on_ray)


@pytest.mark.parametrize(("point", "hit", "event"), WORKERS)
def test_a_worker_killed_at(
    model: Path, straight_on_ray: Path, tmp_path: Path, point: str, hit: int, event: str
) -> None:
    run, marker = tmp_path / "run", tmp_path / "marker"
    assert run_program(model, run, fault=f"{point}:{hit}:{marker}") == 0
    assert marker.exists()
    with Journal.read_only(run) as journal:
        assert len(journal.events(event)) == 1
    assert_nothing_lost(read_record(run), run)
    assert_as_if_it_had_never_stopped(run, straight_on_ray)
