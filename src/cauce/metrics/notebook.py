"""The live view in a notebook: the same panel as in a terminal, as one HTML cell that is updated in place.

IPython is not a dependency of ours; this module is imported only where a kernel is already running.
"""

import io
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from rich.console import Console, RenderableType
from rich.text import Text

from cauce.metrics.ending import print_ending
from cauce.metrics.live import live_panel
from cauce.metrics.observer import NullObserver, RunInfo
from cauce.metrics.progress import Progress

COLUMNS = 90
MIN_SECONDS_BETWEEN = 0.5
CELL = '<pre style="font-family:monospace;line-height:1.25;white-space:pre;overflow-x:auto">{code}</pre>'


class Cell(Protocol):
    """Where HTML is shown; replaces what it showed before."""

    def show(self, html: str) -> None: ...


class IPythonCell:
    """The output of the running cell."""

    def __init__(self) -> None:
        # IPython is no dependency: present wherever this class is made, absent where types are checked.
        from IPython.display import display  # type: ignore[import-not-found, unused-ignore]

        self._handle = display({"text/html": ""}, raw=True, display_id=True)

    def show(self, html: str) -> None:
        self._handle.update({"text/html": html}, raw=True)


class NotebookView(NullObserver):
    """Draws the panel again when something happened, at most twice a second."""

    def __init__(self, cell: Cell | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._cell = cell
        self._clock = clock
        self._progress: Progress | None = None
        self._notes: list[str] = []
        self._drawn_at = float("-inf")

    def on_start(self, info: RunInfo) -> None:
        self._cell = self._cell or IPythonCell()
        self._progress = Progress(info, started=self._clock())
        self._draw()

    def on_note(self, text: str) -> None:
        self._notes = [*self._notes[-4:], text]
        self._draw()

    def on_phase(self, name: str, done: int, total: int) -> None:
        if self._progress is not None:
            self._progress.phase = (name, done, total)
            if self._clock() - self._drawn_at >= MIN_SECONDS_BETWEEN:
                self._draw()

    def on_plan(self, plan: int, metrics: Mapping[str, float]) -> None:
        if self._progress is not None:
            self._progress.add_plan(plan, metrics, now=self._clock())
            self._draw()

    def on_eval(self, plan: int, name: str, accuracy: float) -> None:
        if self._progress is not None:
            self._progress.add_eval(plan, accuracy)
            self._draw()

    def on_end(self, summary: Mapping[str, Any]) -> None:
        if self._progress is None:
            return
        self._progress.phase = (str(summary.get("status", "ended")), 0, 0)
        console = _recorder()
        self._print_state(console)
        print_ending(console, self._progress.info, summary)
        self._show(console)

    def _draw(self) -> None:
        if self._progress is None:
            return
        console = _recorder()
        self._print_state(console)
        self._show(console)

    def _print_state(self, console: Console) -> None:
        for note in self._notes:
            console.print(Text(note, style="dim"))
        if self._progress is not None:
            panel: RenderableType = live_panel(self._progress, now=self._clock(), width=COLUMNS)
            console.print(panel)

    def _show(self, console: Console) -> None:
        self._drawn_at = self._clock()
        if self._cell is not None:
            self._cell.show(console.export_html(inline_styles=True, code_format=CELL))


def _recorder() -> Console:
    return Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, force_jupyter=False)
