"""The views of a running run: a live panel in a terminal, a live cell in a notebook, plain lines elsewhere.

`make_view` chooses. A view draws `Progress` and nothing else; what is shown at the end is in ending.py.
Drawing happens in rich's own thread twice a second, so that a long phase shows its progress and its clock.
"""

import atexit
import sys
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from cauce.metrics.ending import print_ending
from cauce.metrics.observer import NullObserver, Observer, RunInfo
from cauce.metrics.progress import Progress, duration, plan_line

BLOCKS = "".join(chr(0x2581 + i) for i in range(8))  # from a low bar to a full one
ASCII_BLOCKS = "_.-~=+*#"
COLOURS = {
    "generate": "cyan",
    "reward": "magenta",
    "learn": "green",
    "sync": "yellow",
    "record": "red",
    "checkpoint": "bright_yellow",
    "eval": "blue",
    "idle": "bright_black",
}
REFRESH_PER_S = 2.0
MAX_WIDTH = 100  # a wider panel is harder to read
BAR_WIDTH = 60


def make_view(*, live: bool = True, console: Console | None = None) -> Observer:
    """The view for where this process runs: a notebook, a terminal, or neither (as where `live` is false)."""
    console = console or Console()
    if live and not console.is_terminal and _in_notebook():
        from cauce.metrics.notebook import NotebookView

        return NotebookView()
    return LiveView(console) if live and console.is_terminal else PlainView(console)


class PlainView(NullObserver):
    """A line per plan and per evaluation, and a line when a phase begins; for logs and pipes."""

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._progress: Progress | None = None
        self._phase_name = ""
        self._normal = ""

    def on_start(self, info: RunInfo) -> None:
        self._progress = Progress(info, started=self._clock())
        self._say(f"cauce {info.recipe_name}: {info.algorithm} on {info.model}, {info.num_plans} plans")
        self._say(f"run {info.run_dir}  ray {info.cluster}" + (f"  {info.dashboard}" if info.dashboard else ""))

    def on_note(self, text: str) -> None:
        self._say(text)

    def on_phase(self, name: str, done: int, total: int) -> None:
        # Only before the first plan and for evaluations: afterwards the plan's own line tells enough.
        is_new = name != self._phase_name
        self._phase_name = name
        if is_new and (self._progress is None or not self._progress.plan or name.startswith("eval")):
            self._say(f"{name} ..." if total <= 1 else f"{name} ({total}) ...")

    def on_plan(self, plan: int, metrics: Mapping[str, float]) -> None:
        if self._progress is None:
            return
        self._progress.add_plan(plan, metrics, now=self._clock())
        self._say(plan_line(self._progress, now=self._clock()))
        if self._progress.normal() != self._normal:
            self._normal = self._progress.normal()
            self._say(f"  ({self._normal})")

    def on_eval(self, plan: int, name: str, accuracy: float) -> None:
        if self._progress is None:
            return
        self._progress.add_eval(plan, accuracy)
        self._say(f"held-out accuracy after plan {plan}: {accuracy:.3f}{_interval(self._progress)} ({name})")

    def on_end(self, summary: Mapping[str, Any]) -> None:
        if self._progress is not None:
            print_ending(self._console, self._progress.info, summary)

    def _say(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)


class LiveView(NullObserver):
    """A panel that stays at the bottom of the terminal while the run goes on; notes scroll above it."""

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._progress: Progress | None = None
        self._live: Live | None = None

    def on_start(self, info: RunInfo) -> None:
        self._progress = Progress(info, started=self._clock())
        self._live = Live(
            console=self._console,
            get_renderable=self.render,
            refresh_per_second=REFRESH_PER_S,
            transient=False,
        )
        self._live.start()
        # A run that ends without on_end (a second Ctrl-C) must not leave the terminal without its cursor.
        atexit.register(self._live.stop)

    def on_note(self, text: str) -> None:
        self._console.print(Text(text, style="dim"))

    def on_phase(self, name: str, done: int, total: int) -> None:
        if self._progress is not None:
            self._progress.phase = (name, done, total)

    def on_plan(self, plan: int, metrics: Mapping[str, float]) -> None:
        if self._progress is not None:
            self._progress.add_plan(plan, metrics, now=self._clock())

    def on_eval(self, plan: int, name: str, accuracy: float) -> None:
        if self._progress is not None:
            self._progress.add_eval(plan, accuracy)

    def on_end(self, summary: Mapping[str, Any]) -> None:
        if self._progress is not None:
            self._progress.phase = (str(summary.get("status", "ended")), 0, 0)
        if self._live is not None:
            self._live.stop()
            atexit.unregister(self._live.stop)
            self._live = None
        if self._progress is not None:
            print_ending(self._console, self._progress.info, summary)

    def render(self) -> RenderableType:
        """The panel as of now."""
        if self._progress is None:
            return Text("")
        return live_panel(self._progress, now=self._clock(), width=self._console.width, blocks=_blocks(self._console))


def live_panel(progress: Progress, *, now: float, width: int, blocks: str = BLOCKS) -> Panel:
    """What the terminal and the notebook show of a run."""
    info = progress.info
    return Panel(
        Group(
            _header(info),
            Text(""),
            _position(progress, now),
            Text(""),
            _numbers(progress, blocks),
            *_time_bar(progress, blocks),
            Text(""),
            Text(f"normal now: {progress.normal()}", style="italic dim"),
        ),
        title=f"[bold]cauce[/] {escape(info.recipe_name)}",
        title_align="left",
        border_style="blue",
        width=min(width, MAX_WIDTH),
    )


def _header(info: RunInfo) -> Table:
    table = _grid()
    table.add_row("model", Text.assemble(info.model, ("   algorithm ", "dim"), info.algorithm))
    table.add_row("run", Text(str(info.run_dir), overflow="fold"))
    table.add_row("ray", Text(info.cluster))
    if info.dashboard:
        table.add_row("dashboard", Text.assemble((info.dashboard, "underline")))
    return table


def _position(progress: Progress, now: float) -> Table:
    info = progress.info
    left = progress.seconds_left(now)
    clock = f"{duration(now - progress.started)} so far"
    if left is not None and progress.plan < info.num_plans:
        clock += f", {duration(left)} left"
    table = _grid()
    where = Table.grid(padding=(0, 1), expand=True)
    where.add_column(no_wrap=True)
    where.add_column(ratio=1)
    where.add_column(no_wrap=True, justify="right")
    where.add_row(
        Text(f"{progress.plan} of {info.num_plans}", style="bold"),
        ProgressBar(
            total=max(info.num_plans, 1),
            completed=progress.plan,
            complete_style="blue",
            finished_style="green",
        ),
        Text(clock),
    )
    table.add_row("plan", where)
    name, done, total = progress.phase
    counted = f"{name} {done}/{total}" if total > 1 else name
    table.add_row("now", Text(counted or "starting", style="cyan"))
    return table


def _numbers(progress: Progress, blocks: str) -> Table:
    table = _grid()
    metrics = progress.metrics
    if progress.reward:
        value = Text.assemble((f"{progress.reward[-1]:6.3f}", "bold"), f"  {sparkline(progress.reward, blocks)}")
        table.add_row("reward", value)
    if progress.accuracy:
        values = [accuracy for _, accuracy in progress.accuracy]
        first_plan, first = progress.accuracy[0]
        text = Text.assemble(
            (f"{values[-1]:6.3f}", "bold green"), f"  {sparkline(values, blocks)}", _interval(progress)
        )
        if len(values) > 1:
            text.append(f"  {'before' if first_plan == 0 else f'plan {first_plan}'} {first:.3f}", "dim")
        table.add_row("held out", text)
    if progress.plan:
        details = [
            _format(metrics, "loss/policy", "loss", ".4f"),
            _format(metrics, "optim/grad_norm", "grad norm", ".2f"),
            _format(metrics, "policy/entropy", "entropy", ".2f"),
            _format(metrics, "response/length_mean", "length", ".1f"),
        ]
        table.add_row("learner", Text("   ".join(detail for detail in details if detail)))
        speed = [_format(metrics, "tokens_per_s", "", ".0f", " tokens/s")]
        per_plan = progress.seconds_per_plan()
        speed.append(f"{per_plan:.1f} s a plan" if per_plan else "")
        table.add_row("speed", Text("   ".join(item for item in speed if item)))
    return table


def _time_bar(progress: Progress, blocks: str) -> list[RenderableType]:
    """Where the time goes, as one bar and its legend."""
    shares = progress.time_shares()
    if not shares:
        return []
    block = chr(0x2588) if blocks == BLOCKS else "#"
    bar, legend = Text(), Text()
    for part, share in shares:
        bar.append(block * round(BAR_WIDTH * share), COLOURS[part])
        if share:
            legend.append(f"{part} {100 * share:.0f}%  ", COLOURS[part])
    table = _grid()
    table.add_row("time", bar)
    table.add_row("", legend)
    return [table]


def sparkline(values: list[float], blocks: str = BLOCKS, *, width: int = 30) -> str:
    """The newest values as bars; where there are more than fit, each bar is the mean of its neighbours."""
    if len(values) > width:
        edges = [i * len(values) // width for i in range(width + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    return "".join(blocks[min(int((value - low) / span * len(blocks)), len(blocks) - 1)] for value in values)


def _interval(progress: Progress) -> str:
    stats = progress.stats
    return f"  ({stats.low:.2f}-{stats.high:.2f})" if stats else ""


def _format(metrics: Mapping[str, float], name: str, label: str, form: str, unit: str = "") -> str:
    value = metrics.get(name)
    return f"{label} {value:z{form}}{unit}".strip() if value is not None else ""


def _grid() -> Table:
    table = Table.grid(padding=(0, 1), expand=True)
    table.add_column(style="dim", width=9, no_wrap=True)
    table.add_column(ratio=1)
    return table


def _blocks(console: Console) -> str:
    return BLOCKS if console.encoding.lower().startswith("utf") else ASCII_BLOCKS


def _in_notebook() -> bool:
    """Whether this process is an IPython kernel; asks only for what is already imported."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and type(ipython.get_ipython()).__name__ == "ZMQInteractiveShell"
