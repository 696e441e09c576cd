"""The processes of a run on this machine, found below its driver by the titles that Ray gives to workers."""

import os
import random
import signal
from pathlib import Path

from cauce.errors import ResourceError
from cauce.runtime.process import process_state, process_tree

TITLES = {
    "rollout": "ray::RolloutWorker",
    "hang": "ray::RolloutWorker",
    "reward": "ray::RewardWorker",
    "learner": "ray::LearnerWorker",
}
SIGNALS = {"hang": signal.SIGSTOP, "pause": signal.SIGTERM}  # the other kinds: SIGKILL


def require_proc() -> None:
    if not Path("/proc/self/cmdline").exists():
        raise ResourceError("chaos finds processes in /proc, which this system does not have; run it on Linux")


def find(driver: int, kind: str, choose: random.Random) -> int | None:
    """A process that a fault of this kind is for; None where there is none just now, since it is being replaced.

    One that is still being made, is stopped or has ended is none.
    """
    if kind not in TITLES:
        return driver
    found = [pid for pid in sorted(process_tree(driver)) if _is_worker(pid, TITLES[kind])]
    return choose.choice(found) if found else None


def strike(pid: int, kind: str) -> bool:
    """Sends the signal; False if the process has just ended by itself."""
    try:
        os.kill(pid, SIGNALS.get(kind, signal.SIGKILL))
    except ProcessLookupError:
        return False
    return True


def worker_name(run_dir: Path, pid: int) -> str:
    """What the run calls this process, by the logs of its workers; empty if none is its."""
    for log in sorted((run_dir / "logs").glob("*.log")):
        if f"process {pid} starts" in log.read_text(encoding="utf-8", errors="replace"):
            return log.stem
    return ""


def _is_worker(pid: int, title: str) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return False
    return words.startswith(title) and "__init__" not in words and process_state(pid) not in ("", "T", "Z")
