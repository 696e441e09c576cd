"""One owner per run: refused beside a live one, fenced off by a takeover, free after any end."""

import os
import socket
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from cauce.errors import FencedError, JournalError
from cauce.journal import Journal
from cauce.journal.owner import current_owner, refuse_older
from tests.journal.records import admit, make_task, new_journal

# Owns the run until its standard input closes; then tries to write once more.
OWNER = """
import sys
from cauce.errors import FencedError
from cauce.journal import Journal
journal = Journal.open(sys.argv[1])
print("owned", flush=True)
sys.stdin.readline()
try:
    journal.event("late", {})
    print("wrote")
except FencedError as error:
    print("fenced:", error)
"""


def start_owner(run_dir: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(run_dir)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "owned\n"
    return process


def test_a_second_owner_is_refused_with_host_and_pid(tmp_path: Path) -> None:
    new_journal(tmp_path).close()
    with start_owner(tmp_path) as owner:
        for _ in range(2):  # a refusal must not loosen the lock
            with pytest.raises(FencedError, match=f"host {socket.gethostname()}, pid {owner.pid},.*takeover"):
                Journal.open(tmp_path)
        with Journal.read_only(tmp_path) as reader:
            assert reader.meta["owner_epoch"] == "2"
        out, _ = owner.communicate("go\n", timeout=30)
    assert out == "wrote\n"
    Journal.open(tmp_path).close()  # it has gone, without closing its journal


def test_a_killed_owner_leaves_the_run_free(tmp_path: Path) -> None:
    new_journal(tmp_path).close()
    with start_owner(tmp_path) as owner:
        owner.kill()
    with Journal.open(tmp_path) as journal:
        assert journal.owner.epoch == 3
        assert journal.owner.pid == os.getpid()


def test_a_takeover_fences_the_older_owner_off(tmp_path: Path) -> None:
    new_journal(tmp_path).close()
    with start_owner(tmp_path) as owner, Journal.open(tmp_path, takeover=True) as journal:
        admit(journal, 1)
        out, _ = owner.communicate("go\n", timeout=30)
        assert out.startswith("fenced:")
        assert f"taken over by host {socket.gethostname()}, pid {os.getpid()}" in out
        assert "owner epoch 3, ours is 2" in out
        # The older one has gone and taken its lock with it; ours holds.
        code = f"from cauce.journal import Journal; Journal.open({str(tmp_path)!r})"
        third = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
        assert f"pid {os.getpid()}, which is alive" in third.stderr
        assert journal.events("late") == []
        admit(journal, 1)


def test_a_fenced_owner_writes_nothing_more_even_when_asked_again(tmp_path: Path) -> None:
    older = new_journal(tmp_path)
    admit(older, 1)
    with Journal.open(tmp_path, takeover=True) as newer:
        for _ in range(2):
            with pytest.raises(FencedError, match="was taken over"):
                older.admit([make_task(1)])
        with pytest.raises(FencedError), older.transaction():
            pass
        older.close()
        assert newer.next_task_id == 1
        admit(newer, 1)
        with pytest.raises(FencedError, match="already open in this process"):
            Journal.open(tmp_path)
    assert sorted(p.name for p in (tmp_path / "payloads").iterdir()) == ["000001-0001.bin", "000002-0001.bin"]


def test_a_second_journal_of_this_process_is_refused_until_the_first_is_closed(tmp_path: Path) -> None:
    first = new_journal(tmp_path)
    with pytest.raises(FencedError, match="close the earlier Trainer or Journal first"):
        Journal.open(tmp_path)
    first.close()
    Journal.open(tmp_path).close()


def test_a_takeover_of_a_newer_format_leaves_its_owner_alone(tmp_path: Path) -> None:
    with new_journal(tmp_path) as journal:
        connection = sqlite3.connect(tmp_path / "journal.db")
        connection.execute("UPDATE meta SET value = '99' WHERE key = 'format_version'")
        connection.commit()
        connection.close()
        with pytest.raises(JournalError, match="has format 99"):
            Journal.open(tmp_path, takeover=True)
        admit(journal, 1)
        with pytest.raises(FencedError, match="already open in this process"):
            new_journal(tmp_path)


def test_a_forked_child_cannot_write(tmp_path: Path) -> None:
    with new_journal(tmp_path) as journal:
        pid = os.fork()
        if pid == 0:
            try:
                journal.event("child", {})
            except JournalError as error:
                os._exit(7 if "is used in its child" in str(error) else 8)
            os._exit(9)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        journal.event("parent", {})
        assert [event.kind for event in journal.events()] == ["parent"]


def test_asking_who_owns_a_run_does_not_give_it_up(tmp_path: Path) -> None:
    """Closing any descriptor of the lock file would: the owner's own readers must not open it."""
    with new_journal(tmp_path) as journal:
        assert current_owner(tmp_path) == journal.owner
        Journal.read_only(tmp_path).close()
        refuse_older(tmp_path, epoch=1)
        with pytest.raises(FencedError, match="owner epoch 1, ours is 0"):
            refuse_older(tmp_path, epoch=0)
        code = f"from cauce.journal import Journal; Journal.open({str(tmp_path)!r})"
        other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
        assert f"pid {os.getpid()}, which is alive" in other.stderr
    assert current_owner(tmp_path) == journal.owner  # the last one, read from the file
    assert current_owner(tmp_path / "nothing") is None
