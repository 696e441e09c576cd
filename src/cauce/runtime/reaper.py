"""Ends what a driver leaves behind when it is killed: run as `python -m cauce.runtime.reaper PID`.

Ray's own processes notice the death of a driver in seconds, except two agents that talk to a control store that is gone
for about a minute. The reaper holds the other end of a pipe: while the driver lives it notes the driver's descendants
once a second; when the pipe closes without a farewell, it waits a little and kills those of them that still live.
Linux only, since it reads /proc.
"""

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

from cauce.runtime.process import process_tree

FAREWELL = b"bye"
LOOK_EVERY_S = 1.0
GRACE_S = 5.0


class Reaper:
    """The driver's side: started with a local Ray, and told when that ends well."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "cauce.runtime.reaper", str(os.getpid())]
        # A session of its own, so that Ctrl-C in the terminal reaches the driver and not the one that watches it.
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    def dismiss(self) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(FAREWELL)
            self._process.stdin.close()
        except BrokenPipeError:
            pass  # it is gone already
        self._process.wait()


def watch(driver: int, pipe: IO[bytes]) -> int:
    """Waits for the pipe to close; returns how many processes had to be killed."""
    family: dict[int, str] = {}
    while not select.select([pipe], [], [], LOOK_EVERY_S)[0]:
        family = _descendants(driver) | {pid: born for pid, born in family.items() if _born(pid) == born}
    if pipe.read(len(FAREWELL)) == FAREWELL:
        return 0
    time.sleep(GRACE_S)
    left = [pid for pid, born in family.items() if _born(pid) == born]
    for pid in left:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return len(left)


def _descendants(driver: int) -> dict[int, str]:
    """Process id -> start time, which tells a process from a later one of the same id."""
    return {pid: _born(pid) for pid in process_tree(driver) if pid not in (driver, os.getpid())}


def _born(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


if __name__ == "__main__":
    watch(int(sys.argv[1]), sys.stdin.buffer)
