"""How a setting is declared: its default, its meaning in one line, and whether it may change when a run
resumes.

A *semantic* setting is part of what a run is; a resume with another value is refused. A *runtime* setting
only says where and how it runs. Also here: the base of every section, which reads the words that TOML has no
type for ("none" where a value may be absent, "2GB" for bytes). It leaves out everything that concerns two
settings at once (checks.py).
"""

import re
from collections.abc import Iterable, Mapping
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo

Change = Literal["runtime", "semantic"]

_BYTE_UNITS = {"": 1, "b": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_BYTE_UNITS |= {"ki": 1024, "mi": 1024**2, "gi": 1024**3, "ti": 1024**4}


def semantic(default: Any, text: str, *, none: str = "", **constraints: Any) -> Any:
    """A setting that belongs to what the run is. `none` says what an absent value means, where it may be
    absent."""
    return _declare(default, text, "semantic", none, constraints)


def runtime(default: Any, text: str, *, none: str = "", **constraints: Any) -> Any:
    """A setting that may change when the run resumes."""
    return _declare(default, text, "runtime", none, constraints)


def change_of(field: FieldInfo) -> Change:
    """Whether a setting is runtime or semantic."""
    extra = field.json_schema_extra
    assert isinstance(extra, dict)
    return "runtime" if extra["change"] == "runtime" else "semantic"


def none_meaning(field: FieldInfo) -> str:
    """What None stands for in a setting that may be absent."""
    extra = field.json_schema_extra
    assert isinstance(extra, dict)
    return str(extra["none"])


def choices(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, or the annotation alone; `Annotated` is looked through."""
    if get_origin(annotation) is Annotated:
        return choices(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return tuple(part for member in get_args(annotation) for part in choices(member))
    return (annotation,)


def is_optional(annotation: Any) -> bool:
    """Whether None is allowed."""
    return type(None) in choices(annotation)


def literal_words(annotation: Any) -> tuple[str, ...]:
    """The words that a setting accepts by name, such as "auto"."""
    return tuple(word for part in choices(annotation) if get_origin(part) is Literal for word in get_args(part))


def parse_bytes(value: object) -> object:
    """Bytes from a whole number or from text such as "2GB" (10^9) or "2GiB" (2^30); other values pass
    unchanged."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*(|b|[kmgt]i?)(?:b)?", value.strip().lower())
    return round(float(match[1]) * _BYTE_UNITS[match[2]]) if match else value


def parse_list(value: object) -> object:
    """One string stands for a list of one."""
    return [value] if isinstance(value, str) else value


Bytes = Annotated[int, Field(ge=1)]
BytesOrAuto = Annotated[Bytes | Literal["auto"], BeforeValidator(parse_bytes)]
CountOrAuto = Annotated[int, Field(ge=1)] | Literal["auto"]
CoresOrAuto = Annotated[float, Field(gt=0)] | Literal["auto"]
Strings = Annotated[list[str], BeforeValidator(parse_list)]


def expected(field: FieldInfo) -> str:
    """What a setting accepts, in words: 'a whole number of at least 1 or "auto"'."""
    kinds: list[str] = []
    for member in _members(field.annotation):
        kinds.extend(_member_text(member, field.metadata))
    if len(kinds) == 1:
        return kinds[0]
    return ", ".join(kinds[:-1]) + " or " + kinds[-1]


def _members(annotation: Any) -> tuple[Any, ...]:
    """Like `choices`, but an `Annotated` member keeps its ranges."""
    if get_origin(annotation) in (Union, UnionType):
        return tuple(part for member in get_args(annotation) for part in _members(member))
    return (annotation,)


def _member_text(member: Any, metadata: Iterable[Any]) -> list[str]:
    if get_origin(member) is Annotated:
        inner, *notes = get_args(member)
        ranges = [part for note in notes if isinstance(note, FieldInfo) for part in note.metadata]
        return [text for part in _members(inner) for text in _member_text(part, ranges)]
    if get_origin(member) is Literal:
        return [f'"{word}"' for word in get_args(member)]
    if member is type(None):
        return ['"none"']
    if member in (int, float):
        return [("a whole number" if member is int else "a number") + _range_text(metadata)]
    plain = {
        bool: "true or false",
        str: "text",
        list[str]: "a list of texts",
        list[float]: "a list of numbers",
    }
    return [plain.get(member, "a table")]


def _range_text(metadata: Iterable[Any]) -> str:
    bounds = {"ge": " of at least {}", "gt": " above {}", "le": " up to {}", "lt": " below {}"}
    return "".join(
        text.format(getattr(note, name)) for note in metadata for name, text in bounds.items() if hasattr(note, name)
    )


class Section(BaseModel):
    """Base of every section: frozen, unknown keys refused, no NaN or infinity."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _read_words(cls, data: Any) -> Any:
        """Turn "none" and "" into None where a value may be absent, and refuse true/false for numbers."""
        if not isinstance(data, Mapping):
            return data
        known = cls.model_fields
        return {key: _read_word(value, known[key]) if key in known else value for key, value in data.items()}


def _read_word(value: Any, field: FieldInfo) -> Any:
    if isinstance(value, bool) and is_number(field.annotation):
        return str(value).lower()  # pydantic would take true for 1; as a text it is refused with the rest
    if is_optional(field.annotation) and isinstance(value, str):
        word = value.strip().lower()
        if word == "" or (word == "none" and "none" not in literal_words(field.annotation)):
            return None
    return value


def is_number(annotation: Any) -> bool:
    """Whether a number is among what a setting accepts."""
    return any(part in (int, float) for part in choices(annotation))


def _declare(default: Any, text: str, change: Change, none: str, constraints: dict[str, Any]) -> Any:
    extra: dict[str, Any] = {"change": change, "none": none}
    return Field(default=default, description=text, json_schema_extra=extra, **constraints)
