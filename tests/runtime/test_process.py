"""What a worker process does at birth, and how the processes of a run are counted and weighed; real processes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cauce.runtime.process import available_cpus, process_state, process_tree, resident_megabytes, tree_megabytes

PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; ballast = bytearray(60_000_000); time.sleep(60)"])
print(child.pid, flush=True)
time.sleep(60)
"""
WORKER = """
import logging, pathlib, sys, time
from cauce.runtime.process import enter_worker
enter_worker(log=pathlib.Path(sys.argv[1]), threads=1)
import torch
logging.getLogger("cauce.engine").info("it has %d threads", torch.get_num_threads())
print("ready", flush=True)
def asleep():
    time.sleep(60)
asleep()
"""


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.fixture
def parent() -> Iterator[tuple[int, int]]:
    process = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    child = int(said(process))
    yield process.pid, child
    for pid in (child, process.pid):
        os.kill(pid, signal.SIGKILL)
    process.wait()


def test_children_belong_to_a_run_and_weigh(parent: tuple[int, int]) -> None:
    pid, child = parent
    assert process_tree(pid) == [pid, child]
    assert {pid, child} < set(process_tree(os.getpid()))
    deadline = time.time() + 20
    while resident_megabytes(child) < 50 and time.time() < deadline:
        time.sleep(0.05)
    assert 50 < resident_megabytes(child) < 500
    assert tree_megabytes(pid) >= resident_megabytes(child)


def test_a_process_that_is_gone_weighs_nothing() -> None:
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    assert resident_megabytes(done.pid) == 0.0
    assert process_tree(done.pid) == [done.pid]


def test_the_state_of_a_process_is_told() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    os.kill(child.pid, signal.SIGSTOP)
    deadline = time.time() + 10
    while process_state(child.pid) != "T" and time.time() < deadline:
        time.sleep(0.01)
    assert process_state(child.pid) == "T"
    child.kill()
    child.wait()
    assert process_state(child.pid) == ""


def test_cpus_are_those_that_this_process_may_use() -> None:
    """H12."""
    assert 1 <= available_cpus() <= len(os.sched_getaffinity(0))


def test_a_worker_logs_counts_its_threads_and_shows_its_stack_when_asked(tmp_path: Path) -> None:
    """H2, H7: the log from which a death or a hang is explained."""
    log = tmp_path / "logs" / "learner-0.log"
    process = subprocess.Popen([sys.executable, "-c", WORKER, str(log)], stdout=subprocess.PIPE, text=True)
    try:
        assert said(process) == "ready"
        assert f"process {process.pid} starts with 1 threads" in log.read_text()
        assert "INFO cauce.engine: it has 1 threads" in log.read_text()
        deadline = time.time() + 10
        while "in asleep" not in log.read_text() and time.time() < deadline:
            process.send_signal(signal.SIGUSR1)  # again, where the first came before it fell asleep
            time.sleep(0.2)
        assert "in asleep" in log.read_text()
        assert process.poll() is None  # it lives on
    finally:
        process.kill()
        process.wait()


HOARDER = """
import ctypes, sys
from cauce.runtime import process
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.mallopt(-1, 2**30)  # M_TRIM_THRESHOLD, as workers have it: nothing goes back by itself
blocks = [ctypes.c_void_p(libc.malloc(100_000)) for _ in range(2000)]
for block in blocks:
    ctypes.memset(block, 1, 100_000)
last = libc.malloc(100)
for block in blocks:
    libc.free(block)
process.memory = lambda root: (100, int(sys.argv[1]))
before = process.resident_megabytes(process.os.getpid())
process.give_back_memory(beyond_mb=float(sys.argv[2]))
print(int(before - process.resident_megabytes(process.os.getpid())))
"""


@pytest.mark.parametrize(
    ("available", "beyond_mb", "goes_back"), [(39, 500, True), (41, 500, False), (41, 100, True), (41, 0, True)]
)
def test_freed_memory_goes_back_where_it_is_scarce_or_much(available: int, beyond_mb: int, goes_back: bool) -> None:
    command = [sys.executable, "-c", HOARDER, str(available), str(beyond_mb)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert (int(done.stdout) > 150) is goes_back
