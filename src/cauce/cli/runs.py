"""`cauce runs`, `show` and `samples`: what runs there are, how one stands, what a policy answered.

All of it is read from the journal alone, beside a run that goes on as well, and without torch or Ray. Answers are
decoded by the run's own tokenizer file; `--ids` does without any.
"""

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from cauce.cli.train import RunName, run_folder
from cauce.errors import DataError, JournalError, RecipeError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from cauce.journal.browse import FoundSample
    from cauce.journal.overview import Overview
    from cauce.journal.queries import JournalReader

SHOWN = 8  # newest plans and events of `cauce show`
PIPE_WIDTH = 200  # where no terminal says how wide a table may be
COLOURS = {"running": "cyan", "finished": "green", "failed": "red", "killed": "red", "stopped": "yellow"}


def runs(
    folder: Annotated[Path, typer.Argument(metavar="[DIR]", help="A folder of runs.")] = Path("runs"),
) -> None:
    """List runs: state, plans, last reward and accuracy, when they last wrote something."""
    from cauce.journal.overview import find_runs, read_overview

    if not folder.is_dir():
        raise RecipeError(f"no folder {str(folder)!r}: runs go to runs/ unless run.dir says otherwise")
    table, unreadable = _table("run", "stage", "state", "plans", "reward", "accuracy", "last written"), []
    for run_dir in find_runs(folder):
        try:
            table.add_row(*_run_row(read_overview(run_dir), run_dir.relative_to(folder)))
        except JournalError as error:
            unreadable.append(str(error))
    if table.row_count:
        _console().print(table)
    elif not unreadable:
        typer.echo(f"no runs in {folder}")
    for line in unreadable:
        typer.secho(f"! {line}", fg=typer.colors.YELLOW, err=True)


def show(run: RunName) -> None:
    """Say how a run stands: tasks, drops by reason, leases, plans, checkpoints, events, lineage."""
    run_dir = run_folder(run)

    from cauce.journal import Journal
    from cauce.journal.overview import overview

    with Journal.read_only(run_dir) as journal:
        for line in _facts(journal, overview(journal)):
            typer.echo(line)
        for title, table in _tables(journal):
            typer.secho(f"\n{title}", bold=True)
            _console().print(table)


def samples(
    run: RunName,
    task: Annotated[int | None, typer.Option("--task", help="Of this task (its admission number).")] = None,
    reward: Annotated[str | None, typer.Option("--reward", help="Of this reward: 0, '>=1', '<0.5', '!=0'.")] = None,
    plan: Annotated[
        str | None, typer.Option("--plan", help="Trained on by this plan, or by plans such as 3-9.")
    ] = None,
    status: Annotated[
        str | None, typer.Option("--status", help="scored, abstained, failed, timed_out or unscored.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=0, help="At most so many; 0: all.")] = 20,
    form: Annotated[Literal["table", "jsonl"], typer.Option("--format", help="How they are written.")] = "table",
    ids: Annotated[bool, typer.Option("--ids", help="Token ids in place of texts; needs no tokenizer.")] = False,
) -> None:
    """Look for answers across all plans of a run, with their rewards and log-probabilities."""
    run_dir = run_folder(run)

    from cauce.journal import Journal
    from cauce.journal.browse import SampleFilter, find_samples, parse_plans, parse_reward

    wanted = SampleFilter(
        task=task,
        plans=None if plan is None else parse_plans(plan),
        reward=None if reward is None else parse_reward(reward),
        status=status,
        limit=limit,
    )
    decode = None if ids else _decoder(run_dir)
    with Journal.read_only(run_dir) as journal:
        records = (_record(sample, decode) for sample in find_samples(journal, wanted))
        if form == "jsonl":
            for record in records:
                typer.echo(json.dumps(record, ensure_ascii=False))
            return
        _print_samples(records, limit)


def _run_row(run: "Overview", name: Path) -> list[str]:
    accuracy = "-" if run.accuracy is None else f"{run.accuracy:.3f} (plan {run.accuracy_plan})"
    stage = " ".join(word for word in (run.stage, run.algorithm, "fork" if run.source else "") if word)
    return [
        str(name) if name.name else run.run_dir.name,
        stage,
        f"[{COLOURS.get(run.state, 'default')}]{run.state}[/]",
        f"{run.plans} of {run.num_plans}",
        "-" if run.reward is None else f"{run.reward:.3f}",
        accuracy,
        _when(run.changed),
    ]


def _facts(journal: "JournalReader", run: "Overview") -> list[str]:
    meta = journal.meta
    states = journal.select("SELECT state, COUNT(*) FROM plan GROUP BY state ORDER BY state")
    answers = journal.select(
        "SELECT COALESCE(status, 'unscored'), COUNT(*), SUM(num_tokens) FROM sample GROUP BY 1 ORDER BY 2 DESC"
    )
    owner = f", by process {run.owner.pid} on {run.owner.host}" if run.owner else ""
    facts = {
        "run": f"{run.run_dir}  (id {run.run_id})",
        "what": f"{run.stage} {run.algorithm} on {run.model}",
        "fork": run.source and f"of {run.source}; changed: {meta.get('fork_changes') or 'nothing'}",
        "state": f"{run.state}{owner}, last written {_when(run.changed)}",
        "failure": run.failure,
        "lineage": f"{meta.get('lineage', '0')}, owner epoch {meta['owner_epoch']}, format {meta['format_version']}",
        "numbers": _numerics(meta.get("fingerprint", "")),
        "tasks": _counted(journal.counts()),
        "dropped": _counted(journal.drops()),
        "answers": _counted({status: count for status, count, _ in answers})
        + (f"; {sum(tokens for *_, tokens in answers):,} tokens" if answers else ""),
        "plans": f"{run.plans} of {run.num_plans} decided" + (f": {_counted(dict(states))}" if states else ""),
        "accuracy": "" if run.accuracy is None else f"{run.accuracy:.3f} after plan {run.accuracy_plan}",
        "saved": ", ".join(record.path.name for record in journal.checkpoints()),
    }
    return [f"{name:9} {value}" for name, value in facts.items() if value]


def _tables(journal: "JournalReader") -> "list[tuple[str, Table]]":
    tables = []
    if leases := journal.leases():
        table = _table("task", "answers", "attempt", "worker", "version", "ends in")
        for lease in leases:
            left = f"{lease.until - time.time():.0f} s"
            indices = ", ".join(map(str, lease.indices))
            table.add_row(str(lease.task), indices, str(lease.attempt), lease.worker, str(lease.version), left)
        tables.append(("Leases", table))
    last = journal.last_plan
    if plans := journal.plans(from_number=max(1, last - SHOWN + 1)):
        table = _table("plan", "state", "tasks", "optimizer steps", "reward", "grad norm", "weights")
        for record in plans:
            table.add_row(
                str(record.plan.number),
                record.state + (f": {record.reason}" if record.reason else ""),
                str(len(record.plan.tasks)),
                str(len(record.plan.mini_batches)),
                *(_number(record.metrics.get(name)) for name in ("reward/mean", "optim/grad_norm")),
                record.checksum or "-",
            )
        tables.append((f"Plans (the last {len(plans)} of {last})", table))
    if events := journal.events():
        table = _table("when", "kind", "detail")
        for event in events[-SHOWN:]:
            detail = ", ".join(f"{name}: {_plain(value)}" for name, value in event.detail.items() if value != "")
            table.add_row(_when(event.time), event.kind, _escape(detail))
        kinds = [event.kind for event in events]
        counts = _counted({kind: kinds.count(kind) for kind in dict.fromkeys(kinds)})
        tables.append((f"Events ({counts})", table))
    return tables


def _record(sample: "FoundSample", decode: Callable[[list[int]], str] | None) -> dict[str, Any]:
    """A sample as one JSON object; texts, or token ids where there is no decoder."""
    token_ids = None if sample.arrays is None else sample.arrays.token_ids.tolist()
    answer = {"token_ids": token_ids} if decode is None else {"answer": token_ids and decode(token_ids)}
    return {
        "task": sample.task,
        "index": sample.index,
        "plans": list(sample.plans),
        "row": sample.row.id,
        "state": sample.task_state + (f" ({sample.drop_reason})" if sample.drop_reason else ""),
        "status": sample.status,
        "reward": sample.reward,
        "parts": sample.parts,
        "detail": sample.detail,
        "logp_mean": sample.logp_mean,
        "num_tokens": sample.num_tokens,
        "versions": list(sample.versions),
        "attempt": sample.attempt,
        "finish_reason": sample.finish_reason,
        "prompt": sample.row.prompt,
        **answer,
    }


def _print_samples(records: Iterable[Mapping[str, Any]], limit: int) -> None:
    table = _table("plan", "task", "n", "reward", "logp", "tokens", "version", "end", "prompt", "answer")
    for column in table.columns[-2:]:
        column.no_wrap, column.overflow, column.ratio = True, "ellipsis", 1
    table.expand = True
    for record in records:
        versions = dict.fromkeys(record["versions"])
        table.add_row(
            ", ".join(map(str, record["plans"])) or "-",
            str(record["task"]),
            str(record["index"]),
            record["status"] if record["reward"] is None else f"{record['reward']:g}",
            _number(record["logp_mean"]),
            str(record["num_tokens"]),
            "-".join(map(str, versions)),
            record["finish_reason"],
            _escape(_one_line(_prompt_text(record["prompt"]))),
            _escape(_one_line(_answer_text(record))),
        )
    if not table.row_count:
        typer.echo("no sample matches")
        return
    _console().print(table)
    if table.row_count == limit:
        typer.echo(f"the first {limit}; --limit 0 shows all, --format jsonl whole texts")


def _decoder(run_dir: Path) -> Callable[[list[int]], str]:
    from cauce.report.samples import decoder_of

    decode = decoder_of(run_dir)
    if decode is None:
        raise DataError(f"{run_dir}: no tokenizer of this run can be loaded; --ids shows token ids")
    return decode


def _numerics(text: str) -> str:
    found: dict[str, str] = json.loads(text) if text else {}
    return ", ".join(f"{name} {value}" for name, value in found.items() if value)


def _counted(counts: Mapping[Any, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in counts.items() if count)


def _prompt_text(prompt: str | Sequence[Mapping[str, Any]]) -> str:
    return prompt if isinstance(prompt, str) else " | ".join(str(message.get("content", "")) for message in prompt)


def _answer_text(record: Mapping[str, Any]) -> str:
    found = record["answer"] if "answer" in record else record["token_ids"]
    return "(no longer kept)" if found is None else str(found)


def _one_line(text: str) -> str:
    """Fit for a terminal: what a model says may hold control characters."""
    line = text.strip().replace("\n", "\u21b5")
    return "".join(letter if letter.isprintable() else "\u00b7" for letter in line)


def _plain(value: Any) -> Any:
    return f"{value:.4g}" if isinstance(value, float) else value


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _when(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def _table(*columns: str) -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    numbers = {"reward", "logp", "tokens", "task", "n", "grad norm", "optimizer steps", "attempt", "version"}
    for name in columns:
        table.add_column(name, justify="right" if name in numbers else "left", overflow="fold")
    return table


def _console() -> "Console":
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PIPE_WIDTH)
