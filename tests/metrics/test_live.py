"""The views, as they reach a terminal, a pipe or a notebook."""

import io
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from cauce.command import command
from cauce.metrics.live import ASCII_BLOCKS, LiveView, PlainView, live_panel, make_view, sparkline
from cauce.metrics.notebook import NotebookView
from cauce.metrics.observer import NullObserver, Observers
from cauce.metrics.progress import Progress
from tests.metrics.run_info import plan_metrics, run_info, write_eval

SUMMARY = {
    "status": "finished",
    "plans": 40,
    "wall_s": 312.0,
    "tokens_per_s": 400.0,
    "peak_memory_mb": 4096.0,
}


def finished_run(run_dir: Path) -> Path:
    write_eval(run_dir, "before", [0.0] * 8)
    write_eval(run_dir, "after", [1.0] * 6 + [0.0] * 2)
    (run_dir / "model").mkdir()
    (run_dir / "report.html").touch()
    return run_dir


def watch(view: LiveView | PlainView | NotebookView, run_dir: Path) -> None:
    view.on_start(run_info(run_dir))
    view.on_phase("evaluate", 0, 200)
    view.on_eval(0, "test", 0.1)
    for plan in (1, 2):
        view.on_phase("generate", 37, 64)
        view.on_plan(plan, plan_metrics(plan))
    view.on_note("rollout actor 1 died: killed by signal 9")
    view.on_eval(2, "test", 0.6)
    view.on_end(SUMMARY)


def plain_text(run_dir: Path, *, width: int = 80) -> str:
    file = io.StringIO()
    watch(PlainView(Console(file=file, width=width), clock=lambda: 0.0), run_dir)
    return file.getvalue()


def test_without_a_terminal_each_plan_and_evaluation_is_one_line(tmp_path: Path) -> None:
    text = plain_text(finished_run(tmp_path))
    lines = text.splitlines()
    assert sum(line.startswith("plan 1/40  reward 0.110") for line in lines) == 1
    assert sum(line.startswith("plan 2/40  reward 0.120") for line in lines) == 1
    assert "evaluate (200) ..." in lines
    assert sum(line.startswith("held-out accuracy after plan 2: 0.600") for line in lines) == 1
    assert "rollout actor 1 died: killed by signal 9" in lines
    assert "\x1b" not in text


def test_the_end_compares_shows_transcripts_and_says_where_to_go(tmp_path: Path) -> None:
    text = plain_text(finished_run(tmp_path), width=100)
    end = text[text.index("finished") :]
    assert "40 of 40 plans in 5:12, 400 tokens/s, 4.0 GB" in end
    assert "0.000" in end
    assert "0.750" in end
    assert "0.409 - 0.929" in end  # Wilson of 6 of 8
    assert end.count("prompt") == 5
    assert "it is 0 (before)  [reward 0, truncated]" in end
    assert "it is 0 (after)  [reward 1, truncated]" in end
    assert "gold-0" in end
    # The first five are all right after training, so that the last place goes to a failure.
    assert "it is 6 (after)  [reward 0]" in end
    assert f"{command()} chat {tmp_path}".replace(" ", "") in end.replace(" ", "").replace("\n", "")
    assert "report.html" in end


def test_a_run_that_stopped_says_how_to_go_on(tmp_path: Path) -> None:
    file = io.StringIO()
    view = PlainView(Console(file=file, width=200))
    view.on_start(run_info(tmp_path))
    view.on_end({"status": "stopped", "plans": 0})
    assert f"{command()} resume {tmp_path}" in file.getvalue()
    assert "cauce chat" not in file.getvalue()


def test_the_panel_fits_80_columns_and_shows_what_a_newcomer_needs(tmp_path: Path) -> None:
    progress = Progress(run_info(tmp_path), started=0.0)
    progress.phase = ("generate", 37, 64)
    for plan in range(1, 13):
        progress.add_plan(plan, plan_metrics(plan), now=10.0 * plan)
    progress.add_eval(0, 0.1)
    progress.add_eval(10, 0.6)
    console = Console(file=io.StringIO(), width=80, record=True)
    console.print(live_panel(progress, now=120.0, width=80))
    lines = console.export_text().splitlines()
    assert max(len(line) for line in lines) == 80
    text = "\n".join(lines)
    for words in ("12 of 40", "4:40 left", "generate 37/64", "0.220", "0.600", "before 0.100", "400 tokens/s",
                  "generate 29%", "learn 49%", "eval 2%", "normal now:", "http://127.0.0.1:8265", "grpo"):  # fmt: skip
        assert words in text


@pytest.mark.parametrize("width", [60, 200])
def test_the_panel_survives_other_widths(tmp_path: Path, width: int) -> None:
    progress = Progress(run_info(tmp_path), started=0.0)
    progress.add_plan(1, plan_metrics(1), now=10.0)
    console = Console(file=io.StringIO(), width=width, record=True)
    console.print(live_panel(progress, now=10.0, width=width))
    assert max(len(line) for line in console.export_text().splitlines()) <= min(width, 100)


def test_live_view_draws_notes_above_and_gives_the_cursor_back(tmp_path: Path) -> None:
    file = io.StringIO()
    view = LiveView(Console(file=file, width=100, force_terminal=True, color_system=None), clock=lambda: 0.0)
    watch(view, finished_run(tmp_path))
    text = file.getvalue()
    assert "rollout actor 1 died" in text
    assert "cauce chat" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1
    assert text.index("\x1b[?25h") < text.index("cauce chat")


def test_a_process_that_ends_without_a_word_gives_the_cursor_back(tmp_path: Path) -> None:
    program = (
        "import pathlib, sys\n"
        "from rich.console import Console\n"
        "from cauce.metrics.live import LiveView\n"
        "from tests.metrics.run_info import run_info\n"
        "LiveView(Console(force_terminal=True)).on_start(run_info(pathlib.Path(sys.argv[1])))\n"
        "sys.exit(3)\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], cwd=root, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 3
    assert done.stdout.count("\x1b[?25l") == done.stdout.count("\x1b[?25h") == 1


def test_notebook_cell_is_the_same_panel_as_html_and_escapes_texts(tmp_path: Path) -> None:
    write_eval(tmp_path, "before", [0.0])
    write_eval(tmp_path, "after", [1.0], text="<script>alert({task})</script>")
    cells: list[str] = []

    class ListCell:
        def show(self, html: str) -> None:
            cells.append(html)

    watch(NotebookView(ListCell(), clock=lambda: 0.0), tmp_path)
    assert "2 of 40" in cells[-2]
    assert "tokens/s" in cells[-2]
    assert "accuracy" in cells[-1]
    assert "<script>" not in cells[-1]
    assert "&lt;script&gt;" in cells[-1]


def test_sparkline_spans_low_to_high_and_averages_what_does_not_fit() -> None:
    assert sparkline([0.0, 0.5, 1.0], ASCII_BLOCKS) == "_=#"
    assert sparkline([0.5], ASCII_BLOCKS) == "_"
    assert sparkline([0.0] * 50 + [1.0] * 50, ASCII_BLOCKS, width=4) == "__##"


def test_the_view_fits_where_it_runs() -> None:
    assert isinstance(make_view(console=Console(file=io.StringIO())), PlainView)
    terminal = Console(file=io.StringIO(), force_terminal=True)
    assert isinstance(make_view(console=terminal), LiveView)
    assert isinstance(make_view(live=False, console=terminal), PlainView)


def test_all_observers_are_told_in_order(tmp_path: Path) -> None:
    heard: list[tuple[str, object]] = []

    class Listener(NullObserver):
        def __init__(self, name: str) -> None:
            self.name = name

        def on_note(self, text: str) -> None:
            heard.append((self.name, text))

        def on_eval(self, plan: int, name: str, accuracy: float) -> None:
            heard.append((self.name, (plan, name, accuracy)))

    both = Observers([Listener("a"), Listener("b")])
    both.on_start(run_info(tmp_path))
    both.on_note("x")
    both.on_phase("generate", 1, 2)
    both.on_plan(1, {})
    both.on_eval(3, "test", 0.5)
    both.on_end({})
    assert heard == [("a", "x"), ("b", "x"), ("a", (3, "test", 0.5)), ("b", (3, "test", 0.5))]


def test_a_failure_is_named_at_the_end(tmp_path: Path) -> None:
    file = io.StringIO()
    view = PlainView(Console(file=file, width=200))
    view.on_start(run_info(tmp_path))
    view.on_end({"status": "failed", "plans": 3, "failure": "WorkerError: rollout 0 [died]"})
    assert "failed: 3 of 40 plans\nWorkerError: rollout 0 [died]\n" in file.getvalue()
