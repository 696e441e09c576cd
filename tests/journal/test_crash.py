"""Real deaths: what was acknowledged is there after reopening, and nothing else is."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cauce.errors import JournalError
from cauce.journal import Journal
from tests.journal.records import (
    GROUP_SIZE,
    admit,
    assert_same_answer,
    make_answer,
    make_ready,
    new_journal,
)

# Leases the tasks and records answers, one commit each, saying so only after the commit; then dies as told.
VICTIM = """
import os, signal, sys
from tests.journal.records import make_answer
from cauce.journal import Journal

run_dir, how = sys.argv[1], sys.argv[2]
journal = Journal.open(run_dir)
tasks = journal.tasks()
for task in tasks:
    journal.lease(task, indices=(0, 1), worker="victim", version=0, until=1e12)
for task in tasks[:-1]:
    assert journal.record_answers([make_answer(task, 0)]) == [True]
    os.write(1, f"{task}\\n".encode())
last = make_answer(tasks[-1], 0)
if how == "inside":
    with journal.transaction():
        journal.record_answers([last])
        os._exit(3)
if how == "before-commit":
    # Called by SQLite as it starts the statement: the payload is synced, the commit has not begun.
    def kill_at_commit(statement):
        if statement == "COMMIT":
            os.kill(os.getpid(), signal.SIGKILL)
    journal._connection.set_trace_callback(kill_at_commit)
    journal.record_answers([last])
if how == "after-commit":
    journal.record_answers([last])
    os.write(1, f"{tasks[-1]}\\n".encode())
    os.kill(os.getpid(), signal.SIGKILL)
if how == "torn":
    from cauce.journal.payloads import encode_answer
    journal._payloads.append(encode_answer(last)[:-5])
    os.kill(os.getpid(), signal.SIGKILL)
"""


def run_victim(run_dir: Path, how: str) -> tuple[int, list[int]]:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", VICTIM, str(run_dir), how],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=root,
    )
    assert not done.stderr, done.stderr
    return done.returncode, [int(line) for line in done.stdout.split()]


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("inside", 3),
        ("before-commit", -signal.SIGKILL),
        ("after-commit", -signal.SIGKILL),
        ("torn", -signal.SIGKILL),
    ],
)
def test_every_acknowledged_answer_survives_and_no_other(tmp_path: Path, how: str, code: int) -> None:
    with new_journal(tmp_path) as journal:
        tasks = admit(journal, 4)
    returncode, acknowledged = run_victim(tmp_path, how)
    assert returncode == code
    assert acknowledged == (tasks if how == "after-commit" else tasks[:-1])
    payload = tmp_path / "payloads" / "000002-0001.bin"
    size_at_death = payload.stat().st_size
    with Journal.open(tmp_path) as journal:
        for task in tasks:
            expected = [make_answer(task, 0)] if task in acknowledged else []
            for found, answer in zip(journal.answers(task), expected, strict=True):
                assert_same_answer(found, answer)
            assert journal.missing(task, GROUP_SIZE) == ((1,) if expected else (0, 1))
        cut = [event.detail["bytes"] for event in journal.events("payload_tail_cut")]
        if how == "after-commit":
            assert cut == []
        else:
            assert cut == [{payload.name: size_at_death - payload.stat().st_size}]
            assert payload.stat().st_size < size_at_death
        # The work goes on where it stopped: the leases are released, only missing answers are asked for.
        assert [lease.worker for lease in journal.leases()] == ["victim"] * 4
        for lease in journal.leases():
            journal.release(lease.task, counts_as_death=False, reason="resume")
            missing = journal.missing(lease.task, GROUP_SIZE)
            attempt = journal.lease(lease.task, indices=missing, worker="w", version=0, until=1e12)
            answers = [make_answer(lease.task, index, attempt=attempt, salt=9) for index in missing]
            assert journal.record_answers(answers) == [True] * len(missing)
            attempts = [answer.attempt for answer in journal.answers(lease.task)]
            assert attempts == ([1, 2] if lease.task in acknowledged else [2, 2])


def test_damage_in_the_middle_is_named_when_it_is_read(tmp_path: Path) -> None:
    with new_journal(tmp_path) as journal:
        for task in admit(journal, 3):
            make_ready(journal, task)
        file, offset = journal._connection.execute("SELECT file, offset FROM sample WHERE task = 1").fetchone()
    path = tmp_path / "payloads" / file
    content = bytearray(path.read_bytes())
    content[offset + 30] ^= 1
    path.write_bytes(content)
    with Journal.open(tmp_path) as journal:
        journal.group(0)
        with pytest.raises(JournalError, match=rf"{file} at offset {offset}: CRC32 .* damaged, restore"):
            journal.group(1)


def test_a_damaged_last_record_stops_the_open(tmp_path: Path) -> None:
    """It was committed, so it is no torn tail: cutting it off would lose an acknowledged answer."""
    with new_journal(tmp_path) as journal:
        make_ready(journal, admit(journal, 1)[0])
    path = tmp_path / "payloads" / "000001-0001.bin"
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(JournalError, match=r"000001-0001\.bin at offset \d+: the file ends inside a record"):
        Journal.open(tmp_path)
    with Journal.read_only(tmp_path) as reader:
        assert reader.state(0) == "ready"


def test_a_crash_during_creation_leaves_a_folder_that_can_be_created_again(tmp_path: Path) -> None:
    code = f"""
import os
from cauce.journal import schema, Journal
connection = schema.connect_writer(__import__("pathlib").Path({str(tmp_path)!r}))
connection.execute("BEGIN IMMEDIATE")
connection.execute("CREATE TABLE meta (key TEXT)")
os._exit(0)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
    assert (tmp_path / "journal.db").exists()
    with pytest.raises(JournalError, match="is not a journal, or is damaged"):
        Journal.open(tmp_path)
    with new_journal(tmp_path) as journal:
        admit(journal, 1)


# A file-size limit is how a full disk looks to a process: writes come back short, then fail.
FULL = """
import resource, signal, sys
from tests.journal.records import admit, make_answer
from cauce.errors import JournalError
from cauce.journal import Journal

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
journal = Journal.open(sys.argv[1])
limit = int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
stored = 0
try:
    while stored < 100_000:
        admit(journal, 20)
        stored += 20
except JournalError as error:
    print(stored, error)
    try:
        journal.event("again", {})
    except JournalError as second:
        print("still", second)
"""


def test_a_full_disk_stops_the_run_and_it_resumes_when_there_is_room(tmp_path: Path) -> None:
    new_journal(tmp_path).close()
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path), str(64 * 1024)],
        capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    stored = int(first.split()[0])
    assert stored > 0
    assert "could not be written" in first
    assert "`cauce resume`" in first
    assert second == "still" + first[len(str(stored)) :]
    with Journal.open(tmp_path) as journal:
        assert journal.next_task_id == stored
        assert [journal.task(i).row.id for i in journal.tasks()] == [f"train:{i}" for i in range(stored)]
        admit(journal, 20)


def test_payloads_are_synced_before_the_rows_that_point_at_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No kill can show this, since the page cache outlives a process; so the order of calls is recorded."""
    order: list[str] = []
    fsync = os.fsync

    def recording_fsync(descriptor: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name
        order.append(f"sync {name} at {os.fstat(descriptor).st_size}" if name.endswith(".bin") else f"sync {name}")
        fsync(descriptor)

    def record_end(statement: str) -> None:
        if statement == "COMMIT":
            order.append(statement)

    with new_journal(tmp_path) as journal:
        payloads = tmp_path / "payloads" / "000001-0001.bin"
        monkeypatch.setattr(os, "fsync", recording_fsync)
        journal._connection.set_trace_callback(record_end)
        admit(journal, 1)
        first = payloads.stat().st_size
        assert order == ["sync payloads", f"sync {payloads.name} at {first}", "COMMIT"]
        order.clear()
        make_ready(journal, 0)
        assert order == [f"sync {payloads.name} at {payloads.stat().st_size}", "COMMIT"]
        assert payloads.stat().st_size > first
        order.clear()
        journal.event("no payload", {})
        assert order == ["COMMIT"]
        assert journal._connection.execute("PRAGMA synchronous").fetchone()[0] == 2  # FULL
        assert journal._connection.execute("PRAGMA journal_mode").fetchone()[0] == "wal"
