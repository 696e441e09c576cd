"""RUN/report.html: the whole run on one page, without the network, to open from disk or to send.

Reads metrics.jsonl, summary.json, recipe.toml, eval/*.jsonl and the journal, each where it exists: a run that
stopped early has a report too. Tables are written in tables.py, escaped; figures and viewers are drawn in the
browser from one JSON block, by assets/report.js. plotly.js is inlined from the plotly package: 5 MB, most
of the page.
"""

import json
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from cauce.errors import DataError, JournalError
from cauce.metrics.summary import EvalAnswer, EvalStats, eval_stats, gold_of, read_eval
from cauce.metrics.writer import read_metrics
from cauce.report.family import family
from cauce.report.figures import Figure, learning_figure, metric_figures, reward_figure, time_figure
from cauce.report.samples import JournalView, ReportSample, load_journal
from cauce.report.tables import (
    comparison_table,
    environment_line,
    events_table,
    family_table,
    lead_line,
    recipe_block,
    tiles,
)

MAX_SAMPLES = 240
MAX_PAIRS = 100
BUTTONS = '<button type="button">Previous</button><button type="button">Next</button><span class="count"></span>'
NO_PLANS = '<p class="empty">No plan has been applied yet.</p>'
EMPTY_SAMPLES = '<p class="empty">No samples: the journal holds no applied plan yet.</p>'


def write_report(run_dir: Path) -> Path:
    """Writes RUN/report.html anew and returns its path."""
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise DataError(f"no run at {run_dir}: give the folder of a run, the one that holds metrics.jsonl")
    page = render(run_dir)
    target = run_dir / "report.html"
    beside = target.with_name("report.html.tmp")
    beside.write_text(page, encoding="utf-8")
    beside.replace(target)
    return target


def render(run_dir: Path) -> str:
    """The page as text."""
    from plotly.offline import get_plotlyjs

    rows = read_metrics(run_dir)
    summary = _read_summary(run_dir)
    journal, trouble = _read_journal(run_dir)
    before, after = read_eval(run_dir / "eval" / "before.jsonl"), read_eval(run_dir / "eval" / "after.jsonl")
    own, others = family(run_dir)
    is_fork = own.forked_at is not None
    figure = None if is_fork else learning_figure(rows, eval_points(run_dir, rows))
    learning = [figure] if figure else []
    curves = metric_figures(rows, name=own.name, others=others)
    ends = (journal.first_rewards, journal.last_rewards) if journal else ({}, {})
    costs = [figure for figure in [time_figure(rows), reward_figure(*ends)] if figure]
    stats = eval_stats(before), eval_stats(after)
    pairs = _pairs(before, after)
    sections = [
        tiles(rows, summary, *stats, is_fork=is_fork),
        _section("Original and forks", kin) if (kin := family_table(own, others)) else "",
        "" if is_fork else _section("Learning", _figures(learning) or NO_PLANS),
        _section("Before and after", comparison_table(*stats, is_fork=is_fork) + _pair_viewer(pairs)),
        _section("Samples", _sample_viewer(journal, trouble)),
        _section("Inside the learner", _figures(curves)) if curves else "",
        _section("Time and rewards", _figures(costs)) if costs else "",
        _section("Events", events_table(journal.events if journal else [], rows)),
        _section("Recipe", recipe_block(run_dir)),
    ]
    figures = [*learning, *curves, *costs]
    data = {
        "figures": [{"key": f.key, "traces": f.traces, "layout": f.layout} for f in figures],
        **_sample_data(journal.samples if journal else []),
        "pairs": pairs,
    }
    assets = files("cauce.report").joinpath("assets")
    return Template(assets.joinpath("report.html").read_text(encoding="utf-8")).substitute(
        title=escape(run_dir.resolve().name),
        lead=lead_line(summary),
        css=assets.joinpath("report.css").read_text(encoding="utf-8"),
        body="\n".join(section for section in sections if section),
        footer=environment_line(summary, journal.meta if journal else {}),
        data=script_json(data),
        plotly=get_plotlyjs(),
        script=assets.joinpath("report.js").read_text(encoding="utf-8"),
    )


def script_json(value: Any) -> str:
    """JSON that cannot end the script element it stands in, whatever texts it holds."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def eval_points(
    run_dir: Path, rows: Sequence[Mapping[str, Any]]
) -> dict[str, list[tuple[int, float, EvalStats | None]]]:
    """Per evaluation set its points (plan, accuracy, numbers of the answers on disk)."""
    points: dict[str, list[tuple[int, float, EvalStats | None]]] = {}
    names = sorted({name for row in rows for name in row if name.startswith("eval/") and name.endswith("/accuracy")})
    last_plan = max((row["plan"] for row in rows), default=0)
    for name in names:
        label = name.split("/")[1]
        for row in rows:
            if row.get(name) is None:
                continue
            # The folder holds the answers of one set: with several, none of them can claim the intervals.
            stats = _stats_on_disk(run_dir, row["plan"], last_plan) if len(names) == 1 else None
            if stats is not None and abs(stats.accuracy - row[name]) > 1e-6:
                stats = None
            points.setdefault(label, []).append((row["plan"], row[name], stats))
    return points


def _stats_on_disk(run_dir: Path, plan: int, last_plan: int) -> EvalStats | None:
    names = ["before"] if plan == 0 else [f"plan_{plan:06d}", *(["after"] if plan == last_plan else [])]
    for name in names:
        stats = eval_stats(read_eval(run_dir / "eval" / f"{name}.jsonl"))
        if stats is not None:
            return stats
    return None


def _read_summary(run_dir: Path) -> dict[str, Any]:
    path = run_dir / "summary.json"
    if not path.exists():
        return {}
    summary: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return summary


def _read_journal(run_dir: Path) -> tuple[JournalView | None, str]:
    """The journal, or why it cannot be read: the rest of the page does not need it."""
    try:
        return load_journal(run_dir, MAX_SAMPLES), ""
    except JournalError as error:
        return None, str(error)


def _pairs(before: Sequence[EvalAnswer], after: Sequence[EvalAnswer]) -> list[dict[str, Any]]:
    by_task = {answer.task: answer for answer in before}
    return [
        {
            "task": answer.task,
            "prompt": answer.prompt,
            "gold": gold_of(answer.row),
            "before": _side(by_task[answer.task]),
            "after": _side(answer),
        }
        for answer in after
        if answer.task in by_task
    ][:MAX_PAIRS]


def _side(answer: EvalAnswer) -> dict[str, Any]:
    return {
        "text": answer.completion,
        "reward": answer.reward,
        "num_tokens": answer.num_tokens,
        "finish": answer.finish_reason,
    }


def _sample_data(samples: Sequence[ReportSample]) -> dict[str, Any]:
    """Samples for the viewer; the prompt of a group is stored once."""
    prompts = list(dict.fromkeys(sample.prompt_text for sample in samples))
    place = {prompt: i for i, prompt in enumerate(prompts)}
    shown = [
        {
            "plan": sample.plan,
            "task": sample.task,
            "index": sample.index,
            "prompt": place[sample.prompt_text],
            "tokens": sample.tokens,
            "logps": sample.logps,
            "reward": sample.reward,
            "status": sample.status,
            "finish": sample.finish_reason,
        }
        for sample in samples
    ]
    return {"prompts": prompts, "samples": shown}


def _section(title: str, body: str) -> str:
    anchor = title.lower().replace(" ", "-")
    return f'<section aria-labelledby="{anchor}"><h2 id="{anchor}">{title}</h2>\n{body}</section>'


def _figures(figures: Sequence[Figure]) -> str:
    if not figures:
        return ""
    cards = [
        f'<figure class="card{" wide" if figure.is_wide else ""}"><h3>{escape(figure.title)}</h3>'
        f'<div class="plot" id="plot-{figure.key}" role="img" aria-label="{escape(figure.title)}"></div>'
        f'<figcaption class="note">{escape(figure.note)}</figcaption></figure>'
        for figure in figures
    ]
    return f'<div class="figures">{"".join(cards)}</div>'


def _sample_viewer(journal: JournalView | None, trouble: str) -> str:
    if trouble:
        return f'<p class="empty">The journal could not be read: {escape(trouble)}</p>'
    if journal is None or not journal.samples:
        return EMPTY_SAMPLES
    unkept = (
        f'<p class="note">{journal.num_unkept} older groups are no longer kept (journal.keep).</p>'
        if journal.num_unkept
        else ""
    )
    return (
        '<div class="card" id="sample-viewer"><div class="controls">'
        "<label>plan<select></select></label><label>reward<select></select></label>"
        f"{BUTTONS}</div>"
        '<div class="item"></div><div class="legend"><span>unlikely</span><span class="ramp"></span>'
        "<span>certain</span></div></div>"
        '<p class="note">Whole groups from plans across the run, in order. The probability of a token is the '
        "one it was sampled with.</p>" + unkept
    )


def _pair_viewer(pairs: Sequence[Any]) -> str:
    if not pairs:
        return ""
    return (
        '<div class="card" id="pair-viewer"><div class="controls">'
        "<label>held-out tasks<select></select></label>"
        f"{BUTTONS}</div>"
        '<div class="item"></div></div>'
    )
