"""`cauce`: all commands in one list, and the one place where errors become words; which exit code each has is in
exit_codes.py. CAUCE_DEBUG=1 shows the traceback of an error that is otherwise one message.
"""

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from cauce import __version__
from cauce.cli import chaos, chat, check, doctor, inspect, model, runs, simulate, train
from cauce.cli.exit_codes import exit_code
from cauce.errors import CauceError

# `--section.key value` must reach the command as it was typed.
_SETTINGS = {"ignore_unknown_options": True}

app = typer.Typer(
    name="cauce",
    help="Train language models with reinforcement learning on the machine you have, and lose nothing.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"cauce {__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


app.command(context_settings=_SETTINGS, rich_help_panel="Train")(train.train)
app.command(context_settings=_SETTINGS, rich_help_panel="Train")(train.resume)
app.command(rich_help_panel="Train")(train.replay)
app.command(rich_help_panel="Train")(train.fork)
app.command(context_settings=_SETTINGS, rich_help_panel="Before a run")(check.plan)
app.command(context_settings=_SETTINGS, rich_help_panel="Before a run")(check.check)
app.command(rich_help_panel="Before a run")(inspect.recipes)
app.command(rich_help_panel="Before a run")(doctor.doctor)
app.add_typer(model.app, name="model", rich_help_panel="Before a run")
app.command(rich_help_panel="Runs")(runs.runs)
app.command(rich_help_panel="Runs")(runs.show)
app.command(rich_help_panel="Runs")(runs.samples)
app.command(rich_help_panel="Runs")(inspect.report)
app.command(rich_help_panel="Runs")(chat.chat)
app.command(context_settings=_SETTINGS, rich_help_panel="Proofs")(chaos.chaos)
app.command(rich_help_panel="Proofs")(simulate.simulate)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command line and leave the process with its exit code."""
    try:
        app(args=None if arguments is None else list(arguments), prog_name="cauce")
    except CauceError as error:
        if os.environ.get("CAUCE_DEBUG") == "1":
            raise
        typer.secho(f"error: {error}", fg=typer.colors.RED, err=True)
        sys.exit(exit_code(error))
