"""`cauce recipes` and `cauce report`: what there is to start from, and what a run left behind."""

from importlib.resources import files

import typer

from cauce.cli.train import RunName, run_folder


def recipes() -> None:
    """List the recipes that come with the package."""
    from cauce.recipe import packaged_names

    names = packaged_names()
    width = max((len(name) for name in names), default=0)
    for name in names:
        text = files("cauce").joinpath("recipes", f"{name}.toml").read_text(encoding="utf-8")
        typer.echo(f"{name:{width}}  {first_comment(text)}")


def first_comment(text: str) -> str:
    """Return the first comment line of a TOML text, without its marker; empty where there is none."""
    for line in text.splitlines():
        if line.startswith("#"):
            return line.lstrip("#").strip()
    return ""


def report(run: RunName) -> None:
    """Write RUN/report.html again from the run's journal and metrics."""
    run_dir = run_folder(run)

    from cauce.report.html import write_report

    typer.echo(write_report(run_dir))
