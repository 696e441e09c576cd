"""Runs that can be killed: each life of a run is a process of its own, forked from one warm process.

The warm process, Python's fork server, has imported everything and started no thread; a life takes half a second. What
lives in it is the real run of tests/local_session.py, without Ray.
"""

import json
import multiprocessing
import os
import sqlite3
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import transformers

from cauce.cli.main import main
from cauce.journal import schema
from cauce.recipe.models import LearnerSettings
from cauce.runtime.roles import LearnerWorker, RolloutWorker, WorkResult
from tests.algorithms.cases import algorithm
from tests.local_session import resume_locally, train_locally, use_local_session
from tests.tiny import tiny_model

ROWS = [{"prompt": f"say {i}", "answer": str(i)} for i in range(4)]  # an epoch is two plans
PLANS = 3
SHAPE: dict[str, Any] = {
    "rows": ROWS,
    "run__plans": PLANS,
    "learner__mini_batches": 2,
    "learner__token_budget": 40,  # a step has several micro-batches
    "checkpoint__every": 2,
    "checkpoint__keep": 1,
}
FORGOTTEN: dict[str, Callable[[Path], bool]] = {
    "payloads": lambda path: path.suffix == ".bin",
    "checkpoint files": lambda path: path.is_file() and ".tmp-" in str(path),
    "folders": Path.is_dir,
}


class Hesitant(RolloutWorker):
    """Hands its answers out three at a time, so that groups of four are recorded in parts."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._held: tuple[Any, ...] = ()

    def work(self, **kwargs: Any) -> WorkResult:
        result = super().work(**kwargs)
        answers = self._held + result.completions
        self._held = answers[3:]
        return replace(result, completions=answers[:3])


def warm_up() -> None:
    """Makes one worker of each kind, so that no life has to import or compile what they need."""
    transformers.utils.logging.disable_progress_bar()  # its bars start a thread, which a fork would not have
    with tempfile.TemporaryDirectory() as folder:
        model = str(tiny_model(Path(folder) / "model"))
        place = {"model_path": model, "weights_folder": folder}
        RolloutWorker(**place, dtype="fp32", slots=1, deterministic=True, compiled=True, lineage="0")
        settings = {"algorithm": algorithm(), "settings": LearnerSettings(dtype="fp32"), "temperature": 1.0}
        learner = LearnerWorker(**place, **settings, total_steps=1, seed=0, weights_keep=1, publish_dtype="fp32")
        learner.status()
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"{threads} threads: a fork takes only one of them along"


def train(model: str, run: str, settings: str = "{}", forgetting: str = "") -> None:
    """A run from its beginning, with other settings as JSON; `forgetting` takes the sync of something away."""
    if forgetting == "commits":
        connect = schema.connect_writer

        def connect_carelessly(run_dir: Path, **given: Any) -> sqlite3.Connection:
            connection = connect(run_dir, **given)
            connection.execute("PRAGMA synchronous = OFF")
            return connection

        schema.connect_writer = connect_carelessly
    elif forgetting:
        fsync, is_forgotten = os.fsync, FORGOTTEN[forgetting]

        def fsync_carelessly(descriptor: int) -> None:
            if not is_forgotten(Path(os.readlink(f"/proc/self/fd/{descriptor}"))):
                fsync(descriptor)

        os.fsync = fsync_carelessly
    train_locally(model, Path(run), **{**SHAPE, **json.loads(settings)})


def resume(run: str) -> None:
    assert resume_locally(Path(run), rows=ROWS)["status"] == "finished"


def command(*arguments: str) -> None:
    """A command line; the process ends with its exit code."""
    main(arguments)


@dataclass(frozen=True, kw_only=True)
class Life:
    """A process that may still run, and what it has said."""

    process: Any
    log: Path

    def end(self, *, within_s: float = 60.0) -> int:
        self.process.join(within_s)
        assert self.process.exitcode is not None, f"still running after {within_s} s:\n{self.log.read_text()[-4000:]}"
        return int(self.process.exitcode)


@dataclass(frozen=True, kw_only=True)
class Nursery:
    """Starts lives and waits for their ends."""

    folder: Path
    preload: Path | None  # the library of power.c

    def start(self, act: Callable[..., None], *args: str, environment: Mapping[str, str] | None = None) -> Life:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.crash.warm"])
        given = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        given |= {"LD_PRELOAD": str(self.preload)} if self.preload else {}
        log = Path(tempfile.mkstemp(prefix=f"{act.__name__}-", suffix=".log", dir=self.folder)[1])
        process = context.Process(target=_live, args=(act, args, dict(environment or {}), str(log)), daemon=True)
        with _environment(given):  # of the fork server, which the first life starts
            process.start()
        return Life(process=process, log=log)

    def live(self, act: Callable[..., None], *args: str, environment: Mapping[str, str] | None = None) -> int:
        """The exit code of a life; one that fails by an exception is an error with its text."""
        life = self.start(act, *args, environment=environment)
        code = life.end()
        assert code in (0, -9), f"{act.__name__}{args} ended with {code}:\n{life.log.read_text()[-4000:]}"
        return code


def _live(act: Callable[..., None], args: tuple[str, ...], environment: dict[str, str], log: str) -> None:
    output = os.open(log, os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(environment)
    use_local_session(pytest.MonkeyPatch()).rollout = Hesitant
    act(*args)
    sys.stdout.flush()


@contextmanager
def _environment(given: Mapping[str, str]) -> Any:
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
