"""Which settings exist, and what to say of one that does not: ours of another trainer's name, or the nearest.

Nothing here is an alias. A name from elsewhere often counts something else (train_batch_size counts prompts
in verl and completions in TRL), so the answer is an error that says what differs.
"""

import difflib
from collections.abc import Iterable
from typing import NamedTuple

from cauce.recipe.foreign import FOREIGN, Foreign
from cauce.recipe.models import SECTIONS

KNOWN_KEYS: tuple[str, ...] = (
    "stage",
    *(f"{section}.{name}" for section, model in SECTIONS.items() for name in model.model_fields),
)


class _Match(NamedTuple):
    tool: str
    name: str
    row: Foreign
    shared: int  # parts of the dotted name that are shared, from the end
    is_current: bool  # the whole of a name as it is written today


def nearest(word: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The known word most like this one, if any is like it."""
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return found[0] if found else None


def unknown_key_text(key: str) -> str:
    """What is wrong with a key that is not ours, and what to write instead."""
    if key in SECTIONS:
        example = f"{key}.{next(iter(SECTIONS[key].model_fields))}"
        return f"{key} is a section, not a setting; write its settings, such as {example}=..."
    foreign = _foreign_matches(key)
    if foreign and foreign[0].shared > 1:
        return _foreign_text(key, foreign)
    same_name = _known_with_name(_last(key))
    if same_name:
        return f"unknown setting {key}; did you mean {' or '.join(same_name)}?"
    if foreign:
        return _foreign_text(key, foreign)
    close = _close_known(key)
    if close:
        return f"unknown setting {key}; did you mean {close}?"
    close_foreign = nearest(_last(key), {_last(name) for name in _foreign_names()}, cutoff=0.8)
    if close_foreign:
        return _foreign_text(key, _foreign_matches(close_foreign))
    return f"unknown setting {key}; docs/recipe.md lists all, the sections are {', '.join(SECTIONS)}"


def _foreign_matches(key: str) -> list[_Match]:
    """The rows of the table whose names end as this key does, those that share most of it only."""
    wanted = key.split(".")
    matches: list[_Match] = []
    for tool, rows in FOREIGN.items():
        for row in rows:
            name = max(row.names, key=lambda name: _shared_end(wanted, name.split(".")))
            shared = _shared_end(wanted, name.split("."))
            if shared:
                matches.append(_Match(tool, name, row, shared, key == name))
    if not matches:
        return []
    most = max(match.shared for match in matches)
    best = [match for match in matches if match.shared == most]
    return sorted(best, key=lambda match: not match.is_current)


def _shared_end(left: list[str], right: list[str]) -> int:
    count = 0
    for one, other in zip(reversed(left), reversed(right), strict=False):
        if one != other:
            break
        count += 1
    return count


def _foreign_text(key: str, matches: list[_Match]) -> str:
    # The same name in several trainers is said once where all mean the same thing.
    by_meaning: dict[tuple[tuple[str, ...], str], list[str]] = {}
    for match in matches:
        by_meaning.setdefault((match.row.ours, match.row.note), []).append(f"{match.tool}'s {match.name}")
    lines: list[str] = []
    for (ours, note), names in by_meaning.items():
        if ours:
            meaning = f"is {_listed(ours)} here" + (f" ({note})" if note else "")
        else:
            meaning = f"has no counterpart here: {note}"
        lines.append(f"{', '.join(names)} {meaning}")
    if len(lines) == 1:
        return f"unknown setting {key}; {lines[0]}"
    return f"unknown setting {key}; it depends on where it is from:\n  " + "\n  ".join(lines)


def _listed(keys: tuple[str, ...]) -> str:
    return keys[0] if len(keys) == 1 else f"{', '.join(keys[:-1])} and {keys[-1]}"


def _known_with_name(name: str) -> list[str]:
    return [known for known in KNOWN_KEYS if _last(known) == name]


def _close_known(key: str) -> str | None:
    """Nearest by the last part first: in `learner.foo` the section alone is no likeness."""
    section, dot, name = key.rpartition(".")
    if dot and section in SECTIONS:
        within = nearest(name, SECTIONS[section].model_fields)
        if within:
            return f"{section}.{within}"
    by_name = nearest(name, [_last(known) for known in KNOWN_KEYS], cutoff=0.75)
    if by_name:
        candidates = _known_with_name(by_name)
        return nearest(key, candidates, cutoff=0.0)
    return None


def _foreign_names() -> list[str]:
    return [name for rows in FOREIGN.values() for row in rows for name in row.names]


def _last(key: str) -> str:
    return key.rpartition(".")[2]
