"""Settings given on the command line: `section.key=value`, `--section.key value` and `--section.key=value`.

A value is read as a TOML literal where it is one and as plain text otherwise, so that neither paths nor
functions need quotes. What the value must be is left to models.py, which keys exist to names.py.
"""

import tomllib
from collections.abc import Sequence
from typing import Any

from cauce.errors import RecipeError
from cauce.recipe.fields import choices
from cauce.recipe.models import SECTIONS
from cauce.recipe.names import unknown_key_text

Tables = dict[str, Any]

_USAGE = "write section.key=value, --section.key value or --section.key=value"


def split_overrides(arguments: Sequence[str]) -> list[tuple[str, str]]:
    """Pairs of key and raw value, in order."""
    pairs: list[tuple[str, str]] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        key, equals, value = argument.removeprefix("--").partition("=")
        if not equals and not argument.startswith("--"):
            raise RecipeError(f"{argument!r} is not a setting: {_USAGE}")
        if not equals:
            if rest and not rest[0].startswith("--"):
                value = rest.pop(0)
            else:
                raise RecipeError(f"--{key} has no value: {_USAGE}")
        pairs.append((_known_name(key.strip()), value.strip()))
    return pairs


def apply_pairs(tables: Tables, pairs: Sequence[tuple[str, str]]) -> Tables:
    """A copy of the nested tables of a recipe with the given settings put in; later ones win."""
    merged: Tables = {name: dict(value) if isinstance(value, dict) else value for name, value in tables.items()}
    for key, raw in pairs:
        if key == "stage":
            merged["stage"] = raw.strip("\"'")
            continue
        section, name, inner = _locate(key)
        target = merged.setdefault(section, {})
        if not isinstance(target, dict):
            raise RecipeError(f"{section} = {target!r}: must be a section, [{section}]")
        if inner:
            table = target.get(name, {})
            if not isinstance(table, dict):
                raise RecipeError(f"{section}.{name} = {table!r}: must be a table for {key} to be put in")
            target[name] = {**table, inner: parse_value(raw)}
        else:
            target[name] = _parse_for(key, raw)
    return merged


def parse_value(raw: str) -> Any:
    """The TOML literal, or the text itself; `[a, b]` without quotes is a list of texts."""
    try:
        table = tomllib.loads(f"value = {raw}\n")
    except tomllib.TOMLDecodeError:
        table = {}
    if set(table) == {"value"}:
        return table["value"]
    if raw.startswith("[") and raw.endswith("]"):
        return [parse_value(part.strip()) for part in raw[1:-1].split(",") if part.strip()]
    return raw


def _parse_for(key: str, raw: str) -> Any:
    """Like `parse_value`, but a number or a date typed where text is wanted stays text."""
    value = parse_value(raw)
    kinds = _kinds(key)
    if str in kinds and not isinstance(value, str | list):
        return raw
    if list[str] in kinds and isinstance(value, list):
        return [part if isinstance(part, str) else str(part) for part in value]
    if list[float] in kinds and not isinstance(value, list):
        return [value]
    return value


def _locate(key: str) -> tuple[str, str, str]:
    """Section, name and the key inside a setting that is a table, such as reward.kwargs.scale."""
    section, _, rest = key.partition(".")
    name, _, inner = rest.partition(".")
    known = SECTIONS[section].model_fields if section in SECTIONS else {}
    if name not in known or (inner and not _is_table(f"{section}.{name}")):
        raise RecipeError(unknown_key_text(key))
    return section, name, inner


def _is_table(key: str) -> bool:
    return any(str(kind).startswith("dict[") for kind in _kinds(key))


def _kinds(key: str) -> tuple[Any, ...]:
    section, _, name = key.partition(".")
    known = SECTIONS[section].model_fields if section in SECTIONS else {}
    return choices(known[name].annotation) if name in known else ()


def _known_name(key: str) -> str:
    """`--learner.mini-batches` means learner.mini_batches, as command lines have it; inner keys stay as
    typed."""
    parts = key.split(".", 2)
    return ".".join([part.replace("-", "_") for part in parts[:2]] + parts[2:])
