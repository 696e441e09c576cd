"""From a name or a file and the settings of a command line to a checked recipe, and back from a run's folder.

    text -> tables -> overrides -> names are known -> values are of the right kind -> checks -> Recipe

It opens no model and no data. Every fault is a RecipeError that names the setting, its value and what to
write.
"""

import tomllib
from collections.abc import Collection, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from cauce.errors import RecipeError
from cauce.recipe.checks import check_complete, check_recipe, log_warnings
from cauce.recipe.dump import dump_toml
from cauce.recipe.fields import change_of, expected
from cauce.recipe.models import SECTIONS, Recipe
from cauce.recipe.names import nearest, unknown_key_text
from cauce.recipe.overrides import Tables, apply_pairs, split_overrides

__all__ = [
    "Difference",
    "apply_overrides",
    "differences",
    "dump_toml",
    "load_recipe",
    "load_resolved",
    "packaged_names",
    "recipe_from_tables",
    "recipe_from_text",
    "recipe_name",
    "semantic_differences",
]

RESOLVED_NAME = "recipe.toml"


class Difference(NamedTuple):
    """A setting that two recipes do not share."""

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.key}: {self.old!r} -> {self.new!r}"


def load_recipe(name_or_path: str | None, overrides: Sequence[str] = (), *, given: Collection[str] = ()) -> Recipe:
    """Load a packaged recipe by name, or a file, with settings put on top.

    Args:
        name_or_path: None starts from the defaults.
        given: keys that the caller supplies as Python objects ("data.train", "reward.fn"); they may be empty.
    """
    tables = {} if name_or_path is None else _read(name_or_path)
    recipe = recipe_from_tables(apply_pairs(tables, split_overrides(overrides)), source=name_or_path or "")
    check_complete(recipe, name=name_or_path or "grpo", given=given)
    check_recipe(recipe)
    log_warnings(recipe)
    return recipe


def apply_overrides(recipe: Recipe, overrides: Sequence[str]) -> Recipe:
    """The recipe with settings changed, checked again."""
    changed = recipe_from_tables(apply_pairs(recipe.model_dump(), split_overrides(overrides)))
    check_recipe(changed)
    log_warnings(changed)
    return changed


def load_resolved(run_dir: str | Path) -> Recipe:
    """The recipe that a run was started with."""
    path = Path(run_dir) / RESOLVED_NAME
    if not path.is_file():
        raise RecipeError(f"{run_dir} is not a run's folder: it has no {RESOLVED_NAME}")
    return recipe_from_tables(_parse(path.read_bytes(), str(path)), source=str(path))


def recipe_from_text(text: str, *, source: str) -> Recipe:
    """The recipe that `dump_toml` has written."""
    return recipe_from_tables(_parse(text.encode("utf-8"), source), source=source)


def differences(old: Recipe, new: Recipe) -> list[Difference]:
    """Every setting that two recipes do not share."""
    found = [] if old.stage == new.stage else [Difference("stage", old.stage, new.stage)]
    for section, model in SECTIONS.items():
        before, after = dict(getattr(old, section)), dict(getattr(new, section))
        found += [
            Difference(f"{section}.{name}", before[name], after[name])
            for name in model.model_fields
            if before[name] != after[name]
        ]
    return found


def semantic_differences(old: Recipe, new: Recipe) -> list[Difference]:
    """The settings that make `new` another run than `old`; empty where `new` may resume it."""
    return [difference for difference in differences(old, new) if is_semantic(difference.key)]


def is_semantic(key: str) -> bool:
    """Whether a setting belongs to what a run is, so that no resume may change it."""
    section, _, name = key.partition(".")
    return key == "stage" or change_of(SECTIONS[section].model_fields[name]) == "semantic"


def recipe_name(name_or_path: str | None) -> str:
    """What runs of this recipe are called by default."""
    return Path(name_or_path).stem if name_or_path else "run"


def packaged_names() -> list[str]:
    """The recipes that come with the package."""
    folder = resources.files("cauce") / "recipes"
    return sorted(item.name.removesuffix(".toml") for item in folder.iterdir() if item.name.endswith(".toml"))


def recipe_from_tables(tables: Tables, *, source: str = "") -> Recipe:
    """Nested tables, as TOML gives them, to a recipe whose settings each are of the right kind."""
    _refuse_unknown(tables, source)
    try:
        return Recipe.model_validate(tables)
    except ValidationError as error:
        raise RecipeError(_where(source) + _fault_text(error)) from None


def _read(name_or_path: str) -> Tables:
    path = Path(name_or_path)
    looks_like_path = path.suffix == ".toml" or len(path.parts) > 1
    if not looks_like_path and name_or_path in packaged_names():
        packaged = resources.files("cauce") / "recipes" / f"{name_or_path}.toml"
        return _parse(packaged.read_bytes(), name_or_path)
    if path.is_file():
        return _parse(path.read_bytes(), name_or_path)
    if path.is_dir():
        raise RecipeError(f"recipe {name_or_path!r} is a folder; give a .toml file in it")
    close = nearest(name_or_path, packaged_names())
    hint = f"; did you mean {close!r}?" if close and not looks_like_path else ""
    raise RecipeError(
        f"recipe {name_or_path!r} is neither a file nor one of the packaged recipes "
        f"({', '.join(packaged_names())}){hint}"
    )


def _parse(content: bytes, source: str) -> Tables:
    try:
        return tomllib.loads(content.decode("utf-8-sig"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RecipeError(f'{source} is not a TOML file: {error}; texts need quotes, as in path = "my/model"') from None


def _refuse_unknown(tables: Tables, source: str) -> None:
    texts: list[str] = []
    for name, value in tables.items():
        if name == "stage":
            continue
        if name not in SECTIONS:
            texts += [unknown_key_text(key) for key in _leaves(name, value)]
        elif not isinstance(value, dict):
            texts.append(f"{name} = {value!r}: {name} is a section; write its settings under [{name}]")
        else:
            known = SECTIONS[name].model_fields
            texts += [
                unknown_key_text(leaf)
                for key in value
                if key not in known
                for leaf in _leaves(f"{name}.{key}", value[key])
            ]
    if texts:
        raise RecipeError(_where(source) + "\n".join(texts))


def _leaves(key: str, value: Any) -> list[str]:
    if isinstance(value, dict) and value:
        return [leaf for name, inner in value.items() for leaf in _leaves(f"{key}.{name}", inner)]
    return [key]


def _fault_text(error: ValidationError) -> str:
    """One line per setting of the wrong kind: key, value, what it must be, and the default as an example."""
    lines: dict[str, str] = {}
    for fault in error.errors(include_url=False):
        if fault["loc"][0] == "stage":
            lines["stage"] = f"stage = {fault['input']!r}: must be text, such as stage=rl"
            continue
        section, name = str(fault["loc"][0]), str(fault["loc"][1])
        model = SECTIONS[section]
        key, field = f"{section}.{name}", model.model_fields[name]
        example = f" (default {field.default!r})" if field.default not in ("", [], {}, None) else ""
        lines.setdefault(key, f"{key} = {fault['input']!r}: must be {expected(field)}{example}. {field.description}.")
    return "\n".join(lines.values())


def _where(source: str) -> str:
    return f"{source}: " if source else ""
