"""Facts about the machine that a figure belongs to, and the CPU time of processes. Standard library only.

CPU time is read from /proc and is 0 where there is none (macOS).
"""

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")  # what decides which dtype is fast


def describe() -> dict[str, Any]:
    """What a reader needs to compare figures."""
    facts = _cpuinfo()
    flags = facts.get("flags", "").split()
    return {
        "cpu": facts.get("model name", platform.processor() or platform.machine()),
        "cpus": num_cpus(),
        "instructions": [name for name in INSTRUCTIONS if name in flags],
        "memory_gb": round(_total_memory() / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("cauce", "torch", "transformers", "ray")},
    }


def num_cpus() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def tree_cpu_s(pid: int) -> float:
    """CPU seconds used so far by a process, its living descendants, and those of its children that have ended."""
    children: dict[int, list[int]] = {}
    ticks: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has just ended
        number = int(stat.parent.name)
        children.setdefault(int(fields[1]), []).append(number)
        ticks[number] = sum(int(field) for field in fields[11:15])  # user and system, its own and its ended children's
    total, queue = 0, [pid]
    while queue:
        current = queue.pop()
        total += ticks.get(current, 0)
        queue += children.get(current, [])
    return total / os.sysconf("SC_CLK_TCK")


def _cpuinfo() -> dict[str, str]:
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return {}
    pairs = (line.split(":", 1) for line in path.read_text().split("\n\n")[0].splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, value in pairs}


def _total_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
