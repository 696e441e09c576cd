"""Writes a recipe as TOML that load.py reads back to an equal recipe.

Every setting is written, also the defaults, so that the file says what ran. TOML has no null: an absent value
is the text "none" with a comment that says what stands in for it.
"""

import json
from datetime import date, datetime, time
from typing import Any

from cauce.errors import RecipeError
from cauce.recipe.fields import literal_words, none_meaning
from cauce.recipe.models import SECTIONS, Recipe


def dump_toml(recipe: Recipe) -> str:
    """The whole recipe as TOML text."""
    lines = [f"stage = {_value(recipe.stage, 'stage')}"]
    for section, model in SECTIONS.items():
        lines += ["", f"[{section}]"]
        values = dict(getattr(recipe, section))
        for name, field in model.model_fields.items():
            value = values[name]
            if value is not None:
                lines.append(f"{name} = {_value(value, f'{section}.{name}')}")
                continue
            # Where "none" is itself a choice, the empty text stands for an absent value.
            word = "" if "none" in literal_words(field.annotation) else "none"
            lines.append(f'{name} = "{word}"  # {none_meaning(field)}')
    return "\n".join(lines) + "\n"


def _value(value: Any, key: str) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(item, key) for item in value) + "]"
    if isinstance(value, dict):
        pairs = [f"{_text(str(name))} = {_value(item, f'{key}.{name}')}" for name, item in value.items()]
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    raise RecipeError(
        f"{key} = {value!r}: a {type(value).__name__} cannot be written to the run's recipe.toml; "
        "give text, numbers, true/false, lists or tables of these"
    )


def _text(value: str) -> str:
    # JSON's escapes are TOML's, but for DEL, which TOML wants escaped as well.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
