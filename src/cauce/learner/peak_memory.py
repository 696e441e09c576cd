"""The most memory that the process held during one optimizer step: what a token budget is chosen by.

On a CPU that is the kernel's high-water mark of resident memory, set back when a step begins; where the mark cannot be
set back (not Linux, or /proc closed to the process) it is the highest since the process began, which is never too low.
On a GPU it is what torch's allocator handed out at most. Left out: memory of other processes, which `memory_mb` has.
"""

import resource
import sys
from pathlib import Path

import torch

MIB = 2**20
PROC = Path("/proc/self")
RESET_PEAK = "5"  # of /proc/self/clear_refs: the high-water mark alone


class PeakMemory:
    """From `begin` to `end`; a second `begin` before the end belongs to the same step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._has_begun = False

    def begin(self) -> None:
        if self._has_begun:
            return
        self._has_begun = True
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            _reset_high_water()

    def end(self) -> float:
        """The most since `begin`, in MiB."""
        self._has_begun = False
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) / MIB
        return _high_water() / MIB


def _reset_high_water() -> bool:
    try:
        (PROC / "clear_refs").write_text(RESET_PEAK)
    except OSError:
        return False
    return True


def _high_water() -> int:
    try:
        lines = (PROC / "status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024
