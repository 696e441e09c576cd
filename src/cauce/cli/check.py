"""`cauce check`: show what a run would do with these rows and this reward, before anything trains."""

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
