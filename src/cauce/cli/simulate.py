"""`cauce simulate`: whole runs in virtual time, every delay and fault drawn from a seed (see cauce/simulate)."""

import time
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from cauce.simulate.run import Report

TAIL = 40  # lines of a failed trace
TELL_S = 5.0


def simulate(
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds to run.")] = 100,
    first: Annotated[int, typer.Option(min=0, help="The first of them.")] = 0,
    seed: Annotated[int | None, typer.Option(min=0, help="Run this seed alone.", show_default=False)] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes side by side.")] = 1,
    trace: Annotated[bool, typer.Option("--trace", help="With --seed: print everything that happens.")] = False,
) -> None:
    """Run trainer, pools and journal through drawn crashes, deaths and delays, and check what they leave.

    The first seed that breaks a promise ends it, with the command that replays it exactly.
    """
    from cauce.simulate.many import Tally, run_seeds
    from cauce.simulate.run import simulate as simulate_one

    if seed is not None:
        report = simulate_one(seed)
        if trace and not report.violation:
            typer.echo("\n".join(report.trace))
        end_if_broken(report, whole=trace)
        typer.echo(
            f"seed {seed}: {report.status} after {report.starts} starts and {report.faults.total()} faults; "
            f"trace {report.digest}"
        )
        return
    tally, told = Tally(), time.monotonic()
    for report in run_seeds(range(first, first + seeds), jobs=jobs):
        end_if_broken(report, whole=False)
        tally.add(report)
        if time.monotonic() - told > TELL_S:
            told = time.monotonic()
            typer.echo(f"{tally.seeds} of {seeds} seeds, {tally.starts} starts, {tally.faults.total()} faults")
    typer.echo(str(tally))


def end_if_broken(report: "Report", *, whole: bool) -> None:
    """Says what a seed has broken, shows its trace or the end of it, and how to replay it; exit code 1."""
    if not report.violation:
        return
    typer.echo("\n".join(report.trace if whole else report.trace[-TAIL:]))
    typer.echo("settings: " + " ".join(f"{key}={value}" for key, value in report.settings.items()))
    typer.secho(f"seed {report.seed}: {report.violation}", fg=typer.colors.RED)
    typer.echo(f"replay it: cauce simulate --seed {report.seed} --trace")
    raise typer.Exit(1)
