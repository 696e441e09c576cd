"""`cauce plan` and `cauce check`: what a run would need, and what it would do with these rows and this reward, before
anything trains."""

import typer

from cauce.cli.train import RecipeName, Settings, name_first
from cauce.errors import RewardError


def check(recipe: RecipeName, settings: Settings = None) -> None:
    """Show rows, prompt, gold answer, scores, batches, memory and time of a recipe; train nothing."""
    from cauce.recipe import load_recipe

    loaded = load_recipe(name_first(recipe, "RECIPE"), settings or [])

    from cauce.stages import check as stage

    report = stage.check(loaded)
    typer.echo(stage.render(report))
    if report.reward_failure:
        raise RewardError(report.reward_failure)


def plan(recipe: RecipeName, settings: Settings = None) -> None:
    """Show batch sizes, processes, memory per role and what fits; read no rows and start nothing.

    Only model.path must be given, or nothing at all: memory is left out then.
    """
    from cauce.recipe import load_recipe

    unneeded = ("model.path", "data.train", "reward.fn")
    loaded = load_recipe(name_first(recipe, "RECIPE"), settings or [], given=unneeded)

    from cauce.stages import plan as stage

    typer.echo(stage.render(stage.plan(loaded)))
