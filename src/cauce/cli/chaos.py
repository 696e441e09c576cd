"""`cauce chaos`: a run whose processes are killed, beside the same run left in peace (see cauce/chaos)."""

import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cauce.cli.exit_codes import FAILED, STOPPED
from cauce.cli.train import RecipeName, Settings, name_first

# What must be 0, and what it means; None where it is not a promise of this recipe.
VERDICT = (
    ("lost", "tasks that faults have ended or left open, acknowledged answers and weights that are gone"),
    ("trained_twice", "tasks trained on more often than max_reuse allows"),
    ("regenerated", "acknowledged answers that were generated again"),
    ("plans_with_other_weights", "of a deterministic recipe"),
)

if TYPE_CHECKING:
    from rich.table import Table


def chaos(
    recipe: RecipeName,
    settings: Settings = None,
    faults: Annotated[
        str,
        typer.Option(
            help="Kinds and how many of each a minute: rollout, reward, learner, driver, hang, pause.",
            metavar="KIND=RATE,...",
        ),
    ] = "rollout=1",
    minutes: Annotated[
        float | None,
        typer.Option(min=0.1, help="Faults end after so many; by default with the run.", show_default=False),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the moments at which they come.")] = 0,
    undisturbed: Annotated[
        Path | None, typer.Option(help="A finished run of this recipe to compare with, in place of a new one.")
    ] = None,
    folder: Annotated[Path | None, typer.Option(help="Where both runs and chaos.json go.", show_default=False)] = None,
) -> None:
    """Run a recipe while its processes are killed; report what was lost, repeated and wasted.

    For example: cauce chaos quickstart --faults rollout=1,driver=0.2
    """
    from cauce.chaos import run as run_chaos
    from cauce.chaos.faults import parse_faults
    from cauce.recipe import recipe_name

    rates = parse_faults(faults)
    name = recipe_name(name_first(recipe, "RECIPE"))
    began = time.monotonic()
    where = folder or Path("runs") / f"chaos-{name}-{time.strftime('%Y%m%d-%H%M%S')}"

    def tell(text: str) -> None:
        minutes, seconds = divmod(int(time.monotonic() - began), 60)
        typer.echo(f"{minutes:3d}:{seconds:02d}  {text}")

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: the run under way is ended first
    try:
        result = run_chaos.chaos(
            recipe,
            settings or [],
            faults=rates,
            minutes=minutes,
            seed=seed,
            undisturbed=undisturbed,
            folder=where,
            tell=tell,
        )
    except KeyboardInterrupt:
        typer.secho(f"stopped; what there is lies in {where}", fg=typer.colors.YELLOW, err=True)
        raise typer.Exit(STOPPED) from None
    _show(result, asked=list(rates))
    typer.echo(f"all of it is in {where / 'chaos.json'}")
    if not result["faults"]:
        typer.secho("no fault came, so nothing is shown: ask for more a minute", fg=typer.colors.RED, err=True)
    if not result["faults"] or any(result[name] for name, _ in VERDICT):
        raise typer.Exit(FAILED)


def _show(result: dict[str, Any], *, asked: Sequence[str]) -> None:
    from rich.console import Console

    walls = result["wall_s"]
    for name, meaning in VERDICT:
        if result[name] is not None:
            colour = typer.colors.RED if result[name] else typer.colors.GREEN
            typer.secho(f"{name:24} {result[name]:6d}  {meaning}", fg=colour)
    for name, count in result["lost_by_kind"].items():
        if count:
            typer.secho(f"  {name:22} {count:6d}", fg=typer.colors.RED)
    typer.secho(
        f"{'effective':24} {result['effective']:6.1%}  {walls['undisturbed']:.0f} s in peace, "
        f"{walls['disturbed']:.0f} s with {len(result['faults'])} faults",
        bold=True,
    )
    Console().print(_fault_table({kind: result["by_kind"].get(kind, {"count": 0}) for kind in asked}))
    Console().print(_time_table(result["seconds"]))


def _fault_table(by_kind: dict[str, Any]) -> "Table":
    from rich.table import Table

    table = Table("fault", title="median (largest) seconds after the fault")
    for column in ("count", "noticed", "made good", "of that redo"):
        table.add_column(column, justify="right")
    for kind, facts in by_kind.items():
        times = (_times(facts.get(name)) for name in ("noticed_s", "replaced_s", "redo_s"))
        table.add_row(kind, str(facts["count"]), *times)
    return table


def _times(facts: dict[str, float] | None) -> str:
    return f"{facts['median']:.1f} ({facts['max']:.1f})" if facts else "-"


def _time_table(seconds: dict[str, dict[str, float]]) -> "Table":
    from rich.table import Table

    table = Table("seconds", title="where the time went")
    for column in ("in peace", "with faults", "more"):
        table.add_column(column, justify="right")
    quiet, loud = seconds["undisturbed"], seconds["disturbed"]
    for part in sorted(set(quiet) | set(loud), key=lambda part: -loud.get(part, 0.0)):
        pair = quiet.get(part, 0.0), loud.get(part, 0.0)
        table.add_row(part, *(f"{value:.1f}" for value in (*pair, pair[1] - pair[0])))
    return table
