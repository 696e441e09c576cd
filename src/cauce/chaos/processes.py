"""The processes of a run on this machine, found below its driver by the titles that Ray gives to workers."""

import os
import signal
from pathlib import Path

from cauce.errors import ResourceError
from cauce.runtime.process import process_tree

TITLES = {"rollout": "ray::RolloutWorker", "reward": "ray::RewardWorker", "learner": "ray::LearnerWorker"}
SIGNALS = {"hang": signal.SIGSTOP, "pause": signal.SIGTERM}  # the other kinds: SIGKILL


def require_proc() -> None:
    if not Path("/proc/self/cmdline").exists():
        raise ResourceError("chaos finds processes in /proc, which this system does not have; run it on Linux")


def find(driver: int, kind: str) -> int | None:
    """The process that a fault of this kind is for, the youngest of several; None where there is none just now."""
    if kind in ("driver", "pause"):
        return driver
    title = TITLES["rollout" if kind == "hang" else kind]
    found = [pid for pid in process_tree(driver) if _title(pid).startswith(title)]
    return max(found, default=None)


def strike(pid: int, kind: str) -> bool:
    """Sends the signal; False if the process has just ended by itself."""
    try:
        os.kill(pid, SIGNALS.get(kind, signal.SIGKILL))
    except ProcessLookupError:
        return False
    return True


def _title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""
