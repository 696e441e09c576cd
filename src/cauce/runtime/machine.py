"""What of this machine the process may use: cores and memory as its control groups allow, not as they were sold.

Files are read under a root, so that a test can hand over a small system of its own. Nothing is imported that is not
light. CPUs for a run are counted in process.py.
"""

import os
from pathlib import Path


def cpu_quota(root: Path) -> float | None:
    """Return the smallest CPU quota of the control groups this process is in, in cores; None without one."""
    quotas = []
    for text in _cgroup_files(root, "cpu.max"):
        limit, _, period = text.partition(" ")
        if limit != "max" and period:
            quotas.append(int(limit) / int(period))
    return min(quotas, default=None)


def memory(root: Path) -> tuple[int, int]:
    """Return (total, available) bytes that this process may use: the machine's, cut by its control groups."""
    lines = dict(line.split(":", 1) for line in read_text(root / "proc/meminfo").splitlines() if ":" in line)
    if "MemTotal" in lines:
        total = int(lines["MemTotal"].split()[0]) * 1024
        available = int(lines.get("MemAvailable", lines["MemTotal"]).split()[0]) * 1024
    else:  # not Linux
        total = available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [int(text) for text in _cgroup_files(root, "memory.max") if text != "max"]
    limits += [int(text) for text in [read_text(root / "sys/fs/cgroup/memory/memory.limit_in_bytes")] if text]
    limit = min([total, *limits])
    used = [int(text) for text in _cgroup_files(root, "memory.current")]
    return limit, min(available, limit - min([*used, limit])) if limit < total and used else min(available, limit)


def _cgroup_files(root: Path, name: str) -> list[str]:
    """Return one control file's text in this process's group and in those above it, inner ones first."""
    group = next((line[3:] for line in read_text(root / "proc/self/cgroup").splitlines() if line[:3] == "0::"), "/")
    base = root / "sys/fs/cgroup"
    inner = base / group.strip("/")
    folders = [inner, *(parent for parent in inner.parents if parent == base or base in parent.parents)]
    return [text for text in (read_text(folder / name) for folder in folders) if text]


def read_text(path: Path) -> str:
    """Return the stripped text of a small system file; empty where it is missing or closed to us."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
