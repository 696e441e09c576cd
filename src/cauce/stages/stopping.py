"""Ctrl-C and SIGTERM: the first lets the current plan end, so that the run stops with a checkpoint and resumes without
redoing anything; a second stops at once, which the journal makes safe as well."""

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any


class StopSwitch:
    """Holds the wish to stop. Installs its handlers only in the main thread, and puts the old ones back."""

    def __init__(self, on_note: Callable[[str], None]) -> None:
        self._on_note = on_note
        self._previous: dict[int, Any] = {}
        self.is_set = False

    def __enter__(self) -> "StopSwitch":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.is_set:
            raise KeyboardInterrupt
        self.is_set = True
        self._on_note("stopping after the current plan, with a checkpoint; once more stops at once")
