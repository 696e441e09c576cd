"""What a person sees when a run ends: before against after, five transcripts, and where to go from here."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from cauce.command import command
from cauce.metrics.observer import RunInfo
from cauce.metrics.progress import duration
from cauce.metrics.summary import EvalAnswer, EvalStats, eval_stats, gold_of, read_eval

NUM_TRANSCRIPTS = 5
MAX_CHARACTERS = 300  # of a prompt or an answer in a transcript


def print_ending(console: Console, info: RunInfo, summary: Mapping[str, Any]) -> None:
    """Prints the end of a run, as far as it got."""
    folder = info.run_dir / "eval"
    before, after = read_eval(folder / "before.jsonl"), read_eval(folder / "after.jsonl")
    console.print()
    console.print(_status_line(info, summary))
    stats = eval_stats(before), eval_stats(after)
    if any(stats):
        console.print(comparison_table(*stats))
    for pair in pick_transcripts(before, after, limit=NUM_TRANSCRIPTS):
        console.print(_transcript(*pair))
    console.print(_where_to_go(info, is_finished=summary.get("status") in ("finished", "fenced")))


def comparison_table(before: EvalStats | None, after: EvalStats | None) -> Table:
    """Held-out answers before and after training; a run that stopped early has only one side."""
    table = Table(box=box.SIMPLE_HEAD, title="held-out tasks, greedy answers", title_justify="left", title_style="bold")
    table.add_column("")
    for name in ("before", "after"):
        table.add_column(name, justify="right")
    sides = (before, after)
    table.add_row("tasks", *(str(side.count) if side else "-" for side in sides))
    table.add_row("accuracy", *(Text(f"{side.accuracy:.3f}", "bold") if side else "-" for side in sides))
    table.add_row("95 % interval", *(f"{side.low:.3f} - {side.high:.3f}" if side else "-" for side in sides))
    table.add_row("tokens per answer", *(f"{side.length_mean:.1f}" if side else "-" for side in sides))
    table.add_row("truncated", *(f"{100 * side.truncated_fraction:.1f} %" if side else "-" for side in sides))
    if any(side and side.unscored for side in sides):
        table.add_row("without a score", *(str(side.unscored) if side else "-" for side in sides))
    return table


def pick_transcripts(
    before: Sequence[EvalAnswer], after: Sequence[EvalAnswer], *, limit: int
) -> list[tuple[EvalAnswer, EvalAnswer]]:
    """Answers to the same task before and after: the first tasks in file order, not the best looking ones.

    One exception: where those are all right or all wrong, the first of the other kind takes the last
    place, so that people see both where both exist.
    """
    by_task = {answer.task: answer for answer in before}
    pairs = [(by_task[answer.task], answer) for answer in after if answer.task in by_task]
    picked = pairs[:limit]
    for is_wanted in (_is_success, _is_failure):
        if picked and not any(is_wanted(pair[1]) for pair in picked):
            found = next((pair for pair in pairs[limit:] if is_wanted(pair[1])), None)
            picked = [*picked[: limit - 1], found] if found else picked
    return picked


def _is_success(answer: EvalAnswer) -> bool:
    return answer.reward is not None and answer.reward > 0


def _is_failure(answer: EvalAnswer) -> bool:
    return not _is_success(answer)


def _transcript(before: EvalAnswer, after: EvalAnswer) -> Panel:
    table = Table.grid(padding=(0, 1))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("prompt", Text(_short(after.prompt)))
    for label, answer in (("before", before), ("after", after)):
        table.add_row(label, Text.assemble(_short(answer.completion) or "(empty)", "  ", _reward(answer)))
    gold = gold_of(after.row)
    if gold:
        table.add_row("gold", Text(_short(gold)))
    return Panel(table, box=box.ROUNDED, border_style="bright_black", title=f"task {after.task}", title_align="left")


def _reward(answer: EvalAnswer) -> tuple[str, str]:
    text = "no score" if answer.reward is None else f"reward {answer.reward:g}"
    if answer.finish_reason == "length":
        text += ", truncated"
    return f"[{text}]", "green" if _is_success(answer) else "red"


def _status_line(info: RunInfo, summary: Mapping[str, Any]) -> Text:
    status = str(summary.get("status", "ended"))
    text = Text.assemble((status, "bold green" if status == "finished" else "bold yellow"))
    text.append(f": {summary.get('plans', 0)} of {info.num_plans} plans")
    if summary.get("wall_s") is not None:
        text.append(f" in {duration(float(summary['wall_s']))}")
    if summary.get("tokens_per_s"):
        text.append(f", {summary['tokens_per_s']:.0f} tokens/s")
    if summary.get("peak_memory_mb"):
        text.append(f", {summary['peak_memory_mb'] / 1024:.1f} GB at most")
    if summary.get("advice"):
        text.append(f"\n{summary['advice']}")
    if summary.get("failure"):
        text.append(f"\n{summary['failure']}", "red")
    return text


def _where_to_go(info: RunInfo, *, is_finished: bool) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    report, model = info.run_dir / "report.html", info.run_dir / "model"
    if report.exists():
        table.add_row("report", Text(str(report)))
    if model.exists():
        table.add_row("model", Text(str(model)))
        table.add_row("talk to it", Text(f"{command()} chat {info.run_dir}", style="bold"))
    if not is_finished:
        table.add_row("go on with", Text(f"{command()} resume {info.run_dir}", style="bold"))
    return table


def _short(text: str) -> str:
    text = text.strip()
    return text if len(text) <= MAX_CHARACTERS else text[:MAX_CHARACTERS].rstrip() + " ..."
