"""`cauce train`, `resume`, `replay` and `fork`: start a run, go on with one, prove one, train one otherwise.

The work is done by `cauce.stages`; here are the arguments, the view that watches, the report at the end,
and what is said when a run stops early: with the journal nothing is lost, so the last line says how to go on.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from cauce.cli.exit_codes import FAILED, STOPPED
from cauce.command import command
from cauce.errors import RecipeError
from cauce.metrics.observer import NullObserver, Observer, Observers, RunInfo

Result = TypeVar("Result")

RecipeName = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE", help="A packaged recipe (see `cauce recipes`) or a TOML file.", show_default=False
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[section.key=value]...",
        help="Settings that replace the recipe's; --section.key value works too.",
        show_default=False,
    ),
]
RunName = Annotated[str, typer.Argument(metavar="RUN", help="The folder of a run.", show_default=False)]


def train(recipe: RecipeName, settings: Settings = None) -> None:
    """Train a model as a recipe says.

    For example: cauce train grpo model.path=MODEL data.train=rows.jsonl reward.fn=score.py:score
    """
    from cauce.recipe import load_recipe, recipe_name

    loaded = load_recipe(name_first(recipe, "RECIPE"), settings or [])

    def work(observer: Observer) -> dict[str, Any]:
        from cauce.stages import rl

        return rl.train(loaded, name=recipe_name(recipe), observer=observer)

    _end(watch(work, live=loaded.logging.live))


def resume(
    run: RunName,
    settings: Settings = None,
    takeover: Annotated[
        bool, typer.Option("--takeover", help="Take the run from an owner that is cut off or gone.")
    ] = False,
) -> None:
    """Go on with a run after any stop; settings may change what does not touch the learning."""
    run_dir = run_folder(run)

    from cauce.recipe import apply_overrides, load_resolved

    live = apply_overrides(load_resolved(run_dir), settings or []).logging.live

    def work(observer: Observer) -> dict[str, Any]:
        from cauce.stages import rl

        return rl.resume(run_dir, overrides=settings or [], observer=observer, takeover=takeover)

    _end(watch(work, live=live, again=f"{command()} resume {run_dir}"))


def replay(
    run: RunName,
    from_plan: Annotated[
        int | None, typer.Option("--from-plan", min=1, help="Begin at the newest checkpoint before this plan.")
    ] = None,
    until_plan: Annotated[int | None, typer.Option("--until-plan", min=1, help="End with this plan.")] = None,
) -> None:
    """Derive a run's weights again from its journal, and name the first plan that differs."""
    run_dir = run_folder(run)

    from cauce.stages import rl

    again = f"{command()} replay {run_dir}"
    result = watch(
        lambda observer: rl.replay(run_dir, from_plan=from_plan, until_plan=until_plan, observer=observer),
        live=False,
        again=again,
    )
    begin = f"checkpoint plan_{result.after:06d}" if result.after else "the initial weights"
    if result.divergent_plan is None:
        typer.echo(f"{result.plans} plans replayed from {begin}: the weights after each equal the record, bit for bit")
        return
    found = result.divergent_plan
    message = f"plan {found} is the first after {begin} whose weights differ from the record"
    typer.secho(message, fg=typer.colors.RED, err=True)
    if result.other_numerics:
        typer.echo(
            f"this machine computes otherwise than the record says: {'; '.join(result.other_numerics)}", err=True
        )
    if found < result.until:
        typer.echo(f"what came after it: {again} --from-plan {found + 1} begins at a later checkpoint, if one is kept")
    raise typer.Exit(FAILED)


def fork(
    run: RunName,
    at: Annotated[int, typer.Option("--at", min=0, help="The last plan that both share; 0: from the first weights.")],
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="section.key=value", help="A setting of the fork; may be given several times."),
    ] = None,
) -> None:
    """Train on from a recorded run with something changed, on the same samples, without generating.

    For example: cauce fork RUN --at 10 --set algorithm.name=dr_grpo --set learner.lr=1e-5
    """
    run_dir = run_folder(run)

    from cauce.recipe import apply_overrides, load_resolved

    live = apply_overrides(load_resolved(run_dir), changes or []).logging.live

    def work(observer: Observer) -> dict[str, Any]:
        from cauce.stages.fork import fork as stage

        return stage(run_dir, at=at, overrides=changes or [], observer=observer)

    summary = watch(work, live=live)
    _end(summary)
    typer.echo(f"the report of the fork shows both runs; so does that of the source: {command()} report {run_dir}")


def name_first(word: str, what: str) -> str:
    """Return the first word after a command, refusing a setting where a name belongs."""
    if word.startswith("-") or "=" in word:
        raise RecipeError(f"{what} comes first, then settings; seen in its place: {word!r}")
    return word


def run_folder(name: str) -> Path:
    """Return the folder of a run that exists, or say what is there instead."""
    folder = Path(name_first(name, "RUN"))
    if (folder / "journal.db").is_file():
        return folder
    if folder.is_dir():
        raise RecipeError(f"no run {name!r}: the folder holds no journal.db")
    raise RecipeError(f"no run {name!r}: no such folder (runs go to runs/ unless run.dir says otherwise)")


class _Ending(NullObserver):
    """Remembers the run's folder."""

    def __init__(self) -> None:
        self.run_dir: Path | None = None

    def on_start(self, info: RunInfo) -> None:
        self.run_dir = info.run_dir


def watch(work: Callable[[Observer], Result], *, live: bool, again: str = "") -> Result:
    """Do the work under a view; after Ctrl-C say how to go on, by the command `again` or by a resume."""
    from cauce.metrics.live import make_view
    from cauce.report.observer import ReportObserver

    ending = _Ending()
    try:
        # The report is written before the view, told after it, names its path.
        return work(Observers([ending, ReportObserver(), make_view(live=live)]))
    except (KeyboardInterrupt, SystemExit):  # SIGTERM while Ray starts comes as the latter
        if not again and ending.run_dir is not None:
            again = f"{command()} resume {ending.run_dir}"
        _say_stopped(again)
        raise typer.Exit(STOPPED) from None


def _end(summary: Mapping[str, Any]) -> None:
    """Leave with the exit code of a stop where the run, asked to stop, did so after its current plan."""
    if summary["status"] == "stopped":
        _say_stopped(f"{command()} resume {summary['run']}")
        raise typer.Exit(STOPPED)


def _say_stopped(again: str) -> None:
    message = f"stopped; nothing is lost. Go on with: {again}" if again else "stopped before the run began"
    typer.secho(message, fg=typer.colors.YELLOW, err=True)
