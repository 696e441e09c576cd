"""The tables and lines of the report as HTML. Every text that comes from a run is escaped here."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

from cauce.journal.queries import EventRecord
from cauce.metrics.progress import duration
from cauce.metrics.summary import EvalStats, tokens_per_s
from cauce.report.family import Relative

MAX_EVENTS = 200
ENVIRONMENT = ("python", "platform", "machine", "cauce", "torch", "transformers", "ray", "cpus")
ROUTINE = ("started", "ended", "evaluated", "forked", "learner_ready")  # in every run, and no news by themselves
RESTARTS = ("started", "ended")
STATUSES = ("finished", "stopped", "failed")


def lead_line(summary: Mapping[str, Any]) -> str:
    """Status, algorithm and model below the title."""
    status = str(summary.get("status") or "no summary yet")
    kind = status if status in STATUSES else ""
    words = [str(summary[key]) for key in ("algorithm", "model") if summary.get(key)]
    text = f'<span class="status {kind}">{escape(status)}</span>'
    return f"{text} {escape(' on '.join(words))}" if words else text


def tiles(
    rows: Sequence[Mapping[str, Any]],
    summary: Mapping[str, Any],
    before: EvalStats | None,
    after: EvalStats | None,
    *,
    is_fork: bool = False,
) -> str:
    """The run in six numbers. The rewards of a fork are its source's, and no number of its own."""
    done = [row for row in rows if row["plan"] > 0]
    made = []
    if before and after:
        small = f"95 %: [{before.low:.2f}, {before.high:.2f}], [{after.low:.2f}, {after.high:.2f}]"
        made.append(_tile("held-out accuracy", f"{before.accuracy:.3f} &rarr; {after.accuracy:.3f}", small))
    elif before:
        made.append(
            _tile("held-out accuracy before", f"{before.accuracy:.3f}", f"{before.low:.2f} to {before.high:.2f}")
        )
    rewards = [row["reward/mean"] for row in done if row.get("reward/mean") is not None]
    if rewards and not is_fork:
        value = f"{rewards[0]:.3f} &rarr; {rewards[-1]:.3f}" if len(rewards) > 1 else f"{rewards[0]:.3f}"
        made.append(_tile("reward", value, "first and last plan" if len(rewards) > 1 else "of the only plan"))
    of = f"of {summary['num_plans']}" if summary.get("num_plans") else ""
    made.append(_tile("plans", str(len(done)), of))
    if summary.get("wall_s") is not None:
        made.append(_tile("time", duration(float(summary["wall_s"])), "from start to end"))
    speed = summary.get("tokens_per_s") or tokens_per_s(done)
    if speed:
        made.append(_tile("speed", f"{speed:.0f}", "sampled tokens per second"))
    if summary.get("peak_memory_mb"):
        made.append(_tile("peak memory", f"{float(summary['peak_memory_mb']) / 1024:.1f} GB", "all processes"))
    advice = f'<p class="advice">{escape(summary["advice"])}</p>' if summary.get("advice") else ""
    return f'<div class="tiles">{"".join(made)}</div>{advice}'


def comparison_table(before: EvalStats | None, after: EvalStats | None, *, is_fork: bool = False) -> str:
    """Held-out answers before against after."""
    sides = (before, after)
    if is_fork:
        return '<p class="empty">A fork generates nothing, so it has no evaluation. Ask its model.</p>'
    if not any(sides):
        return '<p class="empty">No evaluation: data.test is not set, or the run stopped before it.</p>'
    lines = [
        ("tasks", [str(side.count) if side else "-" for side in sides]),
        ("accuracy (mean reward)", [f"<b>{side.accuracy:.3f}</b>" if side else "-" for side in sides]),
        ("95 % interval", [f"{side.low:.3f} to {side.high:.3f}" if side else "-" for side in sides]),
        ("tokens per answer", [f"{side.length_mean:.1f}" if side else "-" for side in sides]),
        ("truncated answers", [f"{100 * side.truncated_fraction:.1f} %" if side else "-" for side in sides]),
    ]
    if any(side and side.unscored for side in sides):
        lines.append(("answers without a score", [str(side.unscored) if side else "-" for side in sides]))
    body = "".join(
        f"<tr><td>{name}</td>{''.join(f'<td class=number>{cell}</td>' for cell in cells)}</tr>" for name, cells in lines
    )
    head = "<tr><th></th><th class=number>before</th><th class=number>after</th></tr>"
    return f'<div class="card scroll"><table>{head}{body}</table></div>'


def family_table(own: Relative, others: Sequence[Relative]) -> str:
    """A run beside the one it was forked from, and beside its forks; empty where it is alone."""
    if not others and own.forked_at is None:
        return ""
    members = sorted([own, *others], key=lambda member: member.forked_at is not None)
    body = "".join(_member_row(member, is_own=member is own) for member in members)
    head = "".join(
        f"<th{' class=number' if is_number else ''}>{name}</th>"
        for name, is_number in (
            ("run", False),
            ("shares plans", False),
            ("changed", False),
            ("own plans", True),
            ("effective sample size", True),
            ("entropy", True),
        )
    )
    source = "" if own.forked_at is None or len(others) else " The run it was forked from is not beside it any more."
    note = (
        "A fork trains on the recorded samples of its source, without generating: rewards and lengths are the "
        "source's. Its samples come from a policy that it leaves more with every plan; the truncated importance "
        "correction weighs them, and the effective sample size says how much of the last plan still counted. Near "
        "100 % a fork tells what the source would have become; far below it does not." + source
    )
    table = f'<div class="card scroll"><table class=kin><tr>{head}</tr>{body}</table></div>'
    return f'{table}<p class="note">{note}</p>'


def _member_row(member: Relative, *, is_own: bool) -> str:
    done = [row for row in member.rows if row["plan"] > 0]
    last = done[-1] if done else {}
    share, entropy = last.get("sampler/effective_sample_size"), last.get("policy/entropy")
    cells = [
        f"<td>{f'<b>{escape(member.name)}</b>' if is_own else escape(member.name)}</td>",
        f"<td>{'the source' if member.forked_at is None else f'up to {member.forked_at}'}</td>",
        f"<td>{escape(member.changes) or '-'}</td>",
        f"<td class=number>{len(done)}</td>",
        f"<td class=number>{'-' if share is None else f'{100 * share:.1f} %'}</td>",
        f"<td class=number>{'-' if entropy is None else f'{entropy:.3f}'}</td>",
    ]
    return f"<tr>{''.join(cells)}</tr>"


def events_table(events: Sequence[EventRecord], rows: Sequence[Mapping[str, Any]]) -> str:
    """Deaths, restarts, drops and the rest of what the journal noted, newest last."""
    skipped = [str(row["plan"]) for row in rows if row.get("optim/skipped")]
    text = f'<p class="note">Plans with skipped steps (non-finite numbers): {", ".join(skipped)}</p>' if skipped else ""
    starts = sum(event.kind == "started" for event in events)
    events = [event for event in events if event.kind not in ROUTINE or (starts > 1 and event.kind in RESTARTS)]
    if not events:
        return '<p class="empty">Nothing went wrong and nothing was restarted.</p>' + text if not skipped else text
    counts = ", ".join(f"{count} {kind}" for kind, count in Counter(event.kind for event in events).most_common())
    left_out = f"; the last {MAX_EVENTS} are shown" if len(events) > MAX_EVENTS else ""
    body = "".join(
        f"<tr><td class=time>{datetime.fromtimestamp(event.time, UTC):%Y-%m-%d %H:%M:%S}</td>"
        f"<td>{escape(event.kind)}</td><td>{escape(_detail(event.detail))}</td></tr>"
        for event in events[-MAX_EVENTS:]
    )
    table = f"<table><tr><th>time (UTC)</th><th>kind</th><th>detail</th></tr>{body}</table>"
    return f'<p class="note">{escape(counts)}{left_out}</p><div class="card scroll">{table}</div>{text}'


def recipe_block(run_dir: Path) -> str:
    """The resolved recipe, folded away."""
    path = run_dir / "recipe.toml"
    if not path.exists():
        return '<p class="empty">recipe.toml is missing.</p>'
    text = escape(path.read_text(encoding="utf-8"))
    pre = f'<pre class="text">{text}</pre>'
    return f'<details class="card"><summary>The resolved recipe</summary>{pre}</details>'


def environment_line(summary: Mapping[str, Any], meta: Mapping[str, str]) -> str:
    """Where the run ran, as it recorded it: not where the report is made."""
    known_facts = {name: summary[name] for name in ENVIRONMENT if name in summary}
    facts = {**_as_mapping(meta.get("fingerprint", "")), **known_facts}
    known = ", ".join(f"{name} {value}" for name, value in facts.items())
    return escape(f"Environment: {known}." if known else "The run recorded no environment.")


def _tile(name: str, value: str, small: str) -> str:
    return (
        f'<div class="tile"><div class="name">{name}</div><div class="value">{value}</div>'
        f'<div class="small">{escape(small)}</div></div>'
    )


def _detail(detail: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}: {value}" for name, value in detail.items())


def _as_mapping(value: Any) -> dict[str, Any]:
    """A mapping, or the JSON text of one."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return {}
    return dict(value) if isinstance(value, Mapping) else {}
