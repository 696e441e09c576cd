"""Two drivers on one run folder: real processes and the real command line, without Ray."""

import json
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cauce.journal import Journal
from cauce.report.html import write_report
from tests.crash.lives import Life, Nursery, command
from tests.crash.promises import read_record
from tests.local_session import ROWS, SETTINGS, checksums

# Scores as tests.local_session.letters does; where HOLD names a folder, the third group waits there to be let go.
REWARD = """
import os, time
from pathlib import Path
calls = 0
def score(completions, **_):
    global calls
    calls += 1
    if calls == 3 and "HOLD" in os.environ:
        folder = Path(os.environ["HOLD"])
        (folder / "reached").touch()
        while not (folder / "go").exists():
            time.sleep(0.01)
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [sum(map(ord, text)) % 7 / 7 for text in texts]
"""


def arguments(model: Path, run: Path, **changes: str) -> list[str]:
    """Of `cauce train` for a tiny run; data and reward lie beside its folder."""
    (run.parent / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (run.parent / "score.py").write_text(REWARD)
    named = {key.replace("__", "."): value for key, value in changes.items()}
    given = {"model.path": model, "data.train": run.parent / "rows.jsonl", "reward.fn": f"{run.parent}/score.py:score"}
    pairs = {**SETTINGS, "checkpoint.every": 1, "run.dir": run.parent, "run.name": run.name, **given, **named}
    return ["train", "grpo", *(f"{key}={value}" for key, value in pairs.items())]


def wait_for(what: Callable[[], bool], *, within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def start_held(nursery: Nursery, model: Path, run: Path, **changes: str) -> Life:
    """A run that waits in its second plan, until RUN/../go is there."""
    life = nursery.start(command, *arguments(model, run, **changes), environment={"HOLD": str(run.parent)})
    wait_for(lambda: (run.parent / "reached").exists() or not life.process.is_alive())
    assert life.process.is_alive(), words_of(life)
    return life


def words_of(life: Life) -> str:
    return " ".join(life.log.read_text().split())


@pytest.fixture(scope="module")
def untouched(nursery: Nursery, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run with one driver."""
    run = tmp_path_factory.mktemp("untouched") / "run"
    assert nursery.start(command, *arguments(model, run)).end() == 0
    return run


def files_of(run: Path) -> dict[str, bytes]:
    """Everything that tools and people read of a run."""
    names = ("summary.json", "report.html", "metrics.jsonl", "recipe.toml", "model/model.safetensors")
    kept = {name: (run / name).read_bytes() for name in names}
    return kept | {f.name: (f / "model.safetensors").read_bytes() for f in (run / "checkpoints").iterdir()}


def test_a_takeover_ends_the_older_driver_at_its_next_transaction(
    nursery: Nursery, model: Path, untouched: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    older = start_held(nursery, model, run)
    before = read_record(run)
    refused = nursery.start(command, "resume", str(run))
    assert refused.end() == 3
    assert f"is owned by host {socket.gethostname()}, pid {older.process.pid}, which is alive" in words_of(refused)
    assert "--takeover" in words_of(refused)
    assert read_record(run) == before
    newer = nursery.start(command, "resume", str(run), "--takeover")
    assert newer.end() == 0, words_of(newer)
    assert checksums(run) == checksums(untouched)
    after, files = read_record(run), files_of(run)
    assert json.loads(files["summary.json"])["status"] == "finished"
    (tmp_path / "go").touch()
    assert older.end() == 3
    said = f"was taken over by host {socket.gethostname()}, pid {newer.process.pid} (owner epoch 2, ours is 1)"
    assert said in words_of(older)
    assert "cauce resume" not in words_of(older)
    assert read_record(run) == after
    assert files_of(run) == files  # the older one has left no trace
    with Journal.read_only(run) as journal:
        assert journal.meta["owner_epoch"] == "2"


def test_a_takeover_of_an_exclusive_journal_waits_for_its_owners_exit(
    nursery: Nursery, model: Path, untouched: Path, tmp_path: Path
) -> None:
    """journal.locking=exclusive: nobody else reads the record meanwhile, and all say so; then it recovers."""
    run = tmp_path / "run"
    older = start_held(nursery, model, run, journal__locking="exclusive")
    who = f"host {socket.gethostname()}, pid {older.process.pid}"
    assert not (run / "journal.db-shm").exists()
    for word, code in (("resume", 3), ("replay", 3), ("report", 0)):
        started = time.monotonic()
        other = nursery.start(command, word, str(run))
        assert other.end() == code, words_of(other)
        assert time.monotonic() - started < 8
        if code:
            assert f"is locked by {who}" in words_of(other)
            assert "metrics.jsonl" in words_of(other)
    assert f"is locked by {who}" in (run / "report.html").read_text()
    newer = nursery.start(command, "resume", str(run), "--takeover")
    wait_for(lambda: f"is locked by {who}" in words_of(newer) or not newer.process.is_alive())
    time.sleep(1.0)
    assert newer.process.is_alive()
    assert "The takeover waits for its exit" in words_of(newer)
    older.process.kill()
    assert older.end() == -9
    assert newer.end() == 0, words_of(newer)
    assert checksums(run) == checksums(untouched)
    assert "is locked by" not in write_report(run).read_text()
