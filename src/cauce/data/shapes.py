"""The shapes in which rows for reinforcement learning come, and the rules that tell them apart.

A rule looks at column names and at the first value of each that is not null. Exactly one rule must match; two
are an error that names both, and shapes of other stages (preference pairs, fine-tuning) are refused by name.
Everything can be set by hand: data.format, data.prompt_key, data.gold_key, data.columns. Reading is in
files.py, rows are made in source.py.
"""

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cauce.errors import DataError, RecipeError
from cauce.recipe.models import DataSettings
from cauce.types import Prompt

Columns = Mapping[str, Any]  # column name -> its first value that is not null

REFERENCE = "reference"  # the column made of the last turn of a conversation that ends in an answer

# Columns that hold a gold answer by common habit, for shapes that do not fix one.
GOLD_NAMES = ("answer", "solution", "ground_truth", "gold", "label", "target", "reference_answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How a prompt and a gold answer are found in a record. Keys may be dotted paths."""

    name: str
    rule: str  # why this shape, in words
    prompt_key: str
    gold_key: str  # empty: no gold answer is known


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rule:
    name: str
    says: str
    prompt_key: str
    gold_key: str  # "?" : the one column of GOLD_NAMES that is there
    matches: Callable[[Columns], bool]


def _is_verl(columns: Columns) -> bool:
    model = columns.get("reward_model")
    return "prompt" in columns and isinstance(model, Mapping) and "ground_truth" in model


def _is_gsm8k(columns: Columns) -> bool:
    answer = columns.get("answer")
    return "question" in columns and isinstance(answer, str) and "####" in answer.strip().rpartition("\n")[2]


RULES: tuple[_Rule, ...] = (
    _Rule(
        name="verl",
        says="columns prompt and reward_model.ground_truth",
        prompt_key="prompt",
        gold_key="reward_model.ground_truth",
        matches=_is_verl,
    ),
    _Rule(
        name="trl",
        says="column prompt (TRL prompt-only)",
        prompt_key="prompt",
        gold_key="?",
        matches=lambda columns: "prompt" in columns and not _is_verl(columns),
    ),
    _Rule(
        name="gsm8k",
        says="columns question and answer, the answer's last line being '#### N'",
        prompt_key="question",
        gold_key="answer",
        matches=_is_gsm8k,
    ),
    _Rule(
        name="question_answer",
        says="columns question and answer",
        prompt_key="question",
        gold_key="answer",
        matches=lambda columns: {"question", "answer"} <= set(columns) and not _is_gsm8k(columns),
    ),
    _Rule(
        name="problem_solution",
        says="columns problem and solution",
        prompt_key="problem",
        gold_key="solution",
        matches=lambda columns: {"problem", "solution"} <= set(columns),
    ),
    _Rule(
        name="openrlhf",
        says="column input (OpenRLHF)",
        prompt_key="input",
        gold_key="label",
        matches=lambda columns: "input" in columns and not {"output", "instruction"} & set(columns),
    ),
    _Rule(
        name="messages",
        says="column messages",
        prompt_key="messages",
        gold_key="?",
        matches=lambda columns: "messages" in columns,
    ),
)
FORMATS = ("auto", *(rule.name for rule in RULES))

# Shapes that belong to other stages, by the columns that give them away.
_REFUSED: tuple[tuple[frozenset[str], str], ...] = (
    (frozenset({"chosen", "rejected"}), "preference pairs (chosen, rejected)"),
    (frozenset({"preferred_output", "non_preferred_output"}), "preference pairs (preferred_output)"),
    (frozenset({"completions", "labels"}), "stepwise supervision (completions, labels)"),
    (frozenset({"prompt", "completion", "label"}), "unpaired preferences (prompt, completion, label)"),
    (frozenset({"prompt", "completion"}), "prompt-completion pairs for fine-tuning"),
    (frozenset({"conversations"}), "ShareGPT conversations for fine-tuning"),
    (frozenset({"instruction", "output"}), "Alpaca instructions for fine-tuning"),
    (frozenset({"input", "output"}), "input-output pairs for fine-tuning"),
)


def find_shape(records: Sequence[Mapping[str, Any]], settings: DataSettings, field: str) -> Shape:
    """The shape of records, set by hand or detected."""
    columns = _first_values(records)
    if settings.prompt_key:
        others = {name: value for name, value in columns.items() if name != settings.prompt_key}
        gold = settings.gold_key or _guess_gold(others)
        reason = f"data.prompt_key = {settings.prompt_key!r}" + ("" if settings.gold_key else _gold_note(gold, others))
        shape = Shape(name="by_hand", rule=reason, prompt_key=settings.prompt_key, gold_key=gold)
    else:
        visible = {name: columns[name] for name in columns if name not in settings.columns.values()}
        if settings.format != "auto":
            rule, reason = _named_rule(settings.format), f"data.format = {settings.format!r}"
        else:
            rule = _detect(visible, field)
            reason = rule.says
        has_answers = any(_ends_in_answer(record.get(rule.prompt_key)) for record in records)
        shape = _shape_of(rule, columns, reason, has_answers)
        if settings.gold_key:
            reason = f"{shape.rule}; data.gold_key = {settings.gold_key!r}"
            shape = replace(shape, gold_key=settings.gold_key, rule=reason)
    for key, name in ((shape.prompt_key, "prompt"), (shape.gold_key, "gold answer")):
        if key and key != REFERENCE and all(lookup(record, key) is None for record in records):
            raise DataError(
                f"{field}: shape {shape.name} has its {name} in column {key!r}, which no row has a value in "
                f"(columns: {', '.join(columns)}); see data.format, data.prompt_key and data.gold_key"
            )
    return shape


def lookup(record: Mapping[str, Any], key: str) -> Any:
    """The value of a column, or of a dotted path into nested ones; None where there is none."""
    if key in record:
        return record[key]
    head, _, rest = key.partition(".")
    inner = record.get(head)
    return lookup(inner, rest) if rest and isinstance(inner, Mapping) else None


def read_prompt(value: Any, place: str) -> Prompt:
    """A prompt as text or as messages; anything else is an error that names the row."""
    if isinstance(value, str) and value.strip():
        return value
    if isinstance(value, list) and value and all(isinstance(m, Mapping) and "role" in m for m in value):
        return [dict(message) for message in value]
    what = "null" if value is None else "empty" if value in ("", []) else repr(value)[:60]
    raise DataError(f"{place}: the prompt is {what}; it must be text, or a list of messages with role and content")


def read_gold(shape: Shape, columns: Mapping[str, Any]) -> Any:
    """The gold answer of a row; of raw GSM8K the number after `####`, without commas."""
    gold = lookup(columns, shape.gold_key) if shape.gold_key else None
    if shape.name == "gsm8k" and isinstance(gold, str) and "####" in gold:
        return gold.rpartition("####")[2].strip().replace(",", "")
    return gold


def _detect(columns: Columns, field: str) -> _Rule:
    found = [rule for rule in RULES if rule.matches(columns)]
    for giveaway, what in _REFUSED:
        if giveaway <= set(columns):
            raise DataError(
                f"{field}: these rows are {what}, and reinforcement learning needs prompts without answers. "
                "If one "
                'column is the prompt nevertheless, say so: data.prompt_key = "..."'
            )
    if len(found) > 1:
        raise DataError(
            f"{field}: two shapes match, {found[0].name} ({found[0].says}) and {found[1].name} "
            f"({found[1].says}). "
            f'Choose with data.format = "{found[0].name}" or "{found[1].name}"'
        )
    if not found:
        raise DataError(
            f"{field}: no known shape has the columns {', '.join(columns)}. Known: "
            + "; ".join(f"{rule.name}: {rule.says}" for rule in RULES)
            + '. Or name the prompt\'s column: data.prompt_key = "..."'
        )
    return found[0]


def _shape_of(rule: _Rule, columns: Columns, reason: str, has_answers: bool) -> Shape:
    gold = rule.gold_key
    if gold == "?":
        others = {name: value for name, value in columns.items() if name != rule.prompt_key}
        gold = _guess_gold(others)
        if rule.name == "messages" and not set(GOLD_NAMES) & set(columns) and has_answers:
            gold = REFERENCE
        reason += _gold_note(gold, others)
    elif rule.name == "problem_solution" and "answer" in columns:
        gold = "answer"
        reason += "; gold answer in column answer, the solution being worked out"
    elif rule.name == "openrlhf" and gold not in columns:
        gold = ""
        reason += _gold_note(gold, {name: value for name, value in columns.items() if name != rule.prompt_key})
    return Shape(name=rule.name, rule=reason, prompt_key=rule.prompt_key, gold_key=gold)


def _guess_gold(columns: Columns) -> str:
    found = [name for name in GOLD_NAMES if name in columns]
    return found[0] if len(found) == 1 else ""


def _ends_in_answer(messages: Any) -> bool:
    if not isinstance(messages, list) or not messages or not isinstance(messages[-1], Mapping):
        return False
    return messages[-1].get("role") == "assistant"


def _gold_note(gold: str, columns: Columns) -> str:
    """Which column holds the gold answer; where none is known, which there are to choose from."""
    if gold:
        return f"; gold answer in column {gold}"
    if not columns:
        return "; no gold answer: there is no other column"
    several = [name for name in GOLD_NAMES if name in columns]
    if several:
        return f"; no gold answer: {' and '.join(several)} could each be it, choose with data.gold_key={several[0]}"
    return f"; no gold answer recognised: if one of the columns {', '.join(columns)} is it, say data.gold_key=COLUMN"


def _named_rule(name: str) -> _Rule:
    for rule in RULES:
        if rule.name == name:
            return rule
    near = difflib.get_close_matches(name, FORMATS, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise RecipeError(f"data.format = {name!r} is unknown{hint}; choose one of {', '.join(FORMATS)}")


def _first_values(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """First value of every column that is not null: a column may be null for many rows before it begins."""
    found: dict[str, Any] = {}
    for record in records:
        if len(found) < len(record) or any(key not in found for key in record):
            for key, value in record.items():
                if value is not None:
                    found.setdefault(key, value)
    return found
