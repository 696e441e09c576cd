"""What every worker process does at birth, and how processes of a run are measured. Linux and macOS; no Ray here."""

import ctypes
import faulthandler
import logging
import os
import signal
import sys
from pathlib import Path
from typing import IO

from cauce.runtime.machine import memory

SCARCE = 0.4  # of the memory there is: with less to be had, freed memory goes back to the system

_open_logs: list[IO[str]] = []  # faulthandler needs its file open for the life of the process


def enter_worker(*, log: Path, threads: int) -> None:
    """Sends logging to `log` and arms a stack dump on SIGUSR1 and on a fatal signal.

    Threads come from OMP_NUM_THREADS, which torch reads when it is imported; a process that has torch already, as a
    pre-started one may, is told. Torch is not imported for it: rewards do without.
    """
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(threads)
    log.parent.mkdir(parents=True, exist_ok=True)
    file = log.open("a", buffering=1)
    _open_logs.append(file)
    faulthandler.enable(file)
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
    handler = logging.StreamHandler(file)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger("cauce").addHandler(handler)
    logging.getLogger("cauce").setLevel(logging.INFO)
    logging.getLogger("cauce").info("process %d starts with %d threads", os.getpid(), threads)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(threads)


def give_back_memory(*, beyond_mb: float = 0.0) -> None:
    """Returns freed memory to the system if the allocator holds more than so much of it, or the system is short of it.

    Engine and learner take turns in a synchronous run, so each can do with little while the other works. But memory
    that is fetched again has to be cleared first, which costs a learner a third of its step.
    """
    if not hasattr(_libc, "malloc_trim"):
        return
    total, available = memory(Path("/"))
    if available < SCARCE * total or not hasattr(_libc, "mallinfo2") or _libc.mallinfo2().free / 2**20 > beyond_mb:
        _libc.malloc_trim(0)


class _MallocInfo(ctypes.Structure):
    """What glibc's mallinfo2 tells; of its ten numbers the ninth is the bytes that are free and kept."""

    _fields_ = [(f"_{i}", ctypes.c_size_t) for i in range(8)] + [("free", ctypes.c_size_t), ("_9", ctypes.c_size_t)]


_libc = ctypes.CDLL(None)
if hasattr(_libc, "mallinfo2"):
    _libc.mallinfo2.restype = _MallocInfo


def available_cpus() -> int:
    """CPUs this process may use: its affinity mask and, in a container, the quota of its control group."""
    affinity = getattr(os, "sched_getaffinity", None)
    count = len(affinity(0)) if affinity else os.cpu_count() or 1
    quota = Path("/sys/fs/cgroup/cpu.max")
    if quota.exists():
        limit, period = quota.read_text().split()
        if limit != "max":
            count = min(count, max(1, int(int(limit) / int(period))))
    return count


def resident_megabytes(pid: int) -> float:
    """Proportional set size of a process in MB: shared pages count once over all that map them; 0 if it is gone."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1024
    except (OSError, ValueError):
        return 0.0
    return 0.0


def process_state(pid: int) -> str:
    """One letter, as ps has it: R runs, S sleeps, T is stopped, Z has ended; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def process_tree(pid: int) -> list[int]:
    """`pid` and all its descendants, from /proc; only `pid` where there is no /proc."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
        except OSError:
            continue
        parent = int(text.rpartition(")")[2].split()[1])
        children.setdefault(parent, []).append(int(stat.parent.name))
    found, queue = [], [pid]
    while queue:
        current = queue.pop()
        found.append(current)
        queue += children.get(current, [])
    return found


def tree_megabytes(pid: int) -> float:
    """Memory of a process and all its descendants in MB (proportional set size)."""
    return sum(resident_megabytes(each) for each in process_tree(pid))
