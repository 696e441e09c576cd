"""Rows out of whatever holds them: files, built-in sets, hub ids (where `datasets` is installed), Python
iterables.

Every row gets Cauce's shape (types.Row); all columns but the prompt are kept and reach the reward. Where a
gold answer is known, it is also given as column `gold`, unless the data has a column of that name. Rows stay
in memory. The order in which they are admitted is in order.py, rendering in environments/.
"""

import hashlib
import importlib
import importlib.util
import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from cauce.data.addition import addition_rows
from cauce.data.files import Record, Records, read_files, read_iterable
from cauce.data.shapes import REFERENCE, Shape, find_shape, lookup, read_gold, read_prompt
from cauce.errors import DataError, RecipeError
from cauce.recipe.models import DataSettings
from cauce.types import Row

Split = Literal["train", "test"]
BUILTIN = {"addition/train": lambda: addition_rows("train"), "addition/test": lambda: addition_rows("test")}
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(?::[\w.-]+)?")

logger = logging.getLogger(__name__)


class RowSource:
    """Rows by index, with what was found out about them.

    `digest` identifies the content, `shape` and `rule` say how it was read, `warnings` what was odd about it.
    """

    def __init__(self, rows: list[Row], shape: Shape, warnings: Iterable[str] = ()) -> None:
        self._rows = rows
        self._shape = shape
        self.warnings = tuple(warnings)
        self.digest = _digest(rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        return self._rows[index]

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    @property
    def shape(self) -> str:
        """Name of the shape that the rows had."""
        return self._shape.name

    @property
    def rule(self) -> str:
        """Why that shape."""
        return self._shape.rule

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that reach the reward."""
        return tuple(self._rows[0].columns)

    def gold(self, row: Row) -> Any | None:
        """The gold answer of a row, where the shape or the recipe says which it is."""
        return read_gold(self._shape, row.columns)


def load_rows(spec: str | Iterable[Mapping[str, Any]], *, settings: DataSettings, split: Split) -> RowSource:
    """Read all rows of a recipe's data.train or data.test, or of an iterable of dicts."""
    field = f"data.{split}"
    if isinstance(spec, str):
        if not spec:
            raise RecipeError(f'{field} is empty: give a file, a glob or "builtin:addition/{split}"')
        if spec.startswith("builtin:"):
            return _load_builtin(spec, field)
        records = _read_hub(spec, split, field) if _is_hub_id(spec) else read_files(spec, field)
    else:
        records = read_iterable(spec, field)
    if not records.values:
        name = repr(spec) if isinstance(spec, str) else "the given rows"
        raise DataError(f"{field}: {name} has 0 rows{''.join(f'; {w}' for w in records.warnings)}")
    return _make_source(records, settings, split, field)


def _load_builtin(spec: str, field: str) -> RowSource:
    name = spec.removeprefix("builtin:")
    if name not in BUILTIN:
        known = ", ".join(f"builtin:{key}" for key in BUILTIN)
        raise DataError(f"{field} = {spec!r}: no such built-in set; there are {known}")
    shape = Shape(name="builtin", rule="a built-in set", prompt_key="prompt", gold_key="answer")
    return RowSource(BUILTIN[name](), shape)


def _make_source(records: Records, settings: DataSettings, split: Split, field: str) -> RowSource:
    warnings = list(records.warnings)
    values = _with_all_columns(records.values, settings.columns, field)
    warnings += _unify_scalars(values)
    shape = find_shape(values, settings, field)
    rows = [_make_row(value, shape, f"{split}:{i}", records.place(i)) for i, value in enumerate(values)]
    num_null = sum(read_gold(shape, row.columns) is None for row in rows) if shape.gold_key else 0
    if num_null:
        warnings.append(
            f"{field}: {num_null} of {len(rows)} rows have no gold answer (column {shape.gold_key} is null); "
            "they are kept, and the reward gets None"
        )
    for warning in warnings:
        logger.warning(warning)
    return RowSource(rows, shape, warnings)


def _make_row(record: Record, shape: Shape, row_id: str, place: str) -> Row:
    columns = {name: value for name, value in record.items() if name != "prompt"}
    prompt = read_prompt(lookup(record, shape.prompt_key), place)
    if shape.name == "messages":
        columns[REFERENCE] = columns.get(REFERENCE)
        if isinstance(prompt, list) and prompt[-1]["role"] == "assistant":
            # The answer in the data is what the policy must find by itself.
            columns[REFERENCE] = prompt[-1].get("content")
            prompt = prompt[:-1]
            if not prompt:
                raise DataError(f"{place}: the conversation has an assistant turn and no prompt before it")
    if shape.gold_key and "gold" not in columns:
        columns["gold"] = read_gold(shape, columns)
    return Row(id=row_id, prompt=prompt, columns=columns)


def _with_all_columns(values: list[Record], renames: Mapping[str, str], field: str) -> list[Record]:
    """Every record with every column (None where it has none), and with the columns of data.columns added."""
    names = list(dict.fromkeys(name for value in values for name in value))
    for ours, theirs in renames.items():
        if all(lookup(value, theirs) is None for value in values):
            raise DataError(
                f"data.columns.{ours} = {theirs!r}: no row of {field} has a value there; columns: {', '.join(names)}"
            )
    return [
        {name: value.get(name) for name in names} | {ours: lookup(value, t) for ours, t in renames.items()}
        for value in values
    ]


def _unify_scalars(values: list[Record]) -> list[str]:
    """Turn numbers into text, in place, wherever a column holds text in other rows; says which columns."""
    kinds: dict[str, set[bool]] = {}
    for value in values:
        _note_kinds(value, "", kinds)
    mixed = {path for path, found in kinds.items() if len(found) == 2}
    if not mixed:
        return []
    for i, value in enumerate(values):
        values[i] = _as_text(value, "", mixed)
    return [f"column {path} holds numbers and text; its numbers became text" for path in sorted(mixed)]


def _note_kinds(record: Mapping[str, Any], prefix: str, kinds: dict[str, set[bool]]) -> None:
    for name, value in record.items():
        if isinstance(value, Mapping):
            _note_kinds(value, f"{prefix}{name}.", kinds)
        elif isinstance(value, str | int | float):
            kinds.setdefault(prefix + name, set()).add(isinstance(value, str))


def _as_text(record: Mapping[str, Any], prefix: str, mixed: set[str]) -> Record:
    changed: Record = {}
    for name, value in record.items():
        if isinstance(value, Mapping):
            changed[name] = _as_text(value, f"{prefix}{name}.", mixed)
        else:
            is_number = isinstance(value, int | float) and prefix + name in mixed
            changed[name] = str(value) if is_number else value
    return changed


def _is_hub_id(spec: str) -> bool:
    path = Path(spec).expanduser()
    return not path.exists() and not path.suffix and _HUB_ID.fullmatch(spec) is not None


def _read_hub(spec: str, split: Split, field: str) -> Records:
    """Rows of a hub data set, `owner/name` or `owner/name:config`, split of the same name."""
    if importlib.util.find_spec("datasets") is None:
        raise DataError(
            f"{field} = {spec!r}: there is no such file, and a hub id needs the package datasets, which is "
            "not installed (pip install datasets). Or give a .jsonl, .json, .parquet or .csv file"
        )
    name, _, config = spec.partition(":")
    datasets = importlib.import_module("datasets")
    return read_iterable(datasets.load_dataset(name, config or None, split=split), field)


def _digest(rows: list[Row]) -> str:
    """Identifies prompts and columns, whatever file or container they came in."""
    digest = hashlib.sha256()
    for row in rows:
        text = json.dumps([row.prompt, row.columns], sort_keys=True, ensure_ascii=False, default=str)
        digest.update(text.encode("utf-8", errors="surrogatepass") + b"\n")
    return digest.hexdigest()
