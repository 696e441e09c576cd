"""The recipe of a run: its settings, where they are read from, and what of them makes no sense."""

from cauce.recipe.checks import batch_arithmetic, check_complete, check_recipe, recipe_warnings
from cauce.recipe.load import (
    Difference,
    apply_overrides,
    dump_toml,
    load_recipe,
    load_resolved,
    packaged_names,
    recipe_name,
    semantic_differences,
)
from cauce.recipe.models import Recipe

__all__ = [
    "Difference",
    "Recipe",
    "apply_overrides",
    "batch_arithmetic",
    "check_complete",
    "check_recipe",
    "dump_toml",
    "load_recipe",
    "load_resolved",
    "packaged_names",
    "recipe_name",
    "recipe_warnings",
    "semantic_differences",
]
