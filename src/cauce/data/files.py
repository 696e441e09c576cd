"""Reading records out of files: .jsonl, .json, .csv and .parquet, one file, a folder or a glob.

A record is a plain dict of plain Python values; NumPy inside is converted all the way down. Every record
remembers its file and line, so that errors can name them. What the columns mean is settled in shapes.py.
"""

import csv
import glob
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cauce.errors import DataError

Record = dict[str, Any]
_Numbered = Iterator[tuple[int, Record]]


@dataclass(frozen=True, slots=True)
class Records:
    """Records in order, with the place of each and what there was to warn of."""

    values: list[Record]
    places: list[tuple[str, int]]  # file and line, or the argument and the position in it
    warnings: list[str]

    def place(self, index: int) -> str:
        """Where record `index` stands, for error messages."""
        name, number = self.places[index]
        return f"{name}, line {number}" if name.endswith((".jsonl", ".csv")) else f"{name}, row {number}"


def read_files(spec: str, field: str) -> Records:
    """All records of a path, folder or glob, files in the order of their names.

    Args:
        field: the setting that `spec` came from, for error messages.
    """
    records = Records([], [], [])
    for path in _find(spec, field):
        if path.stat().st_size == 0:
            records.warnings.append(f"{path} is empty and was skipped")
            continue
        try:
            for number, record in _READERS[path.suffix](path):
                records.values.append({str(key): plain(value) for key, value in record.items()})
                records.places.append((str(path), number))
        except UnicodeDecodeError as error:
            raise DataError(f"{path}: not UTF-8 text (byte {error.start}: {error.reason}); save it as UTF-8") from error
        except (OSError, csv.Error) as error:
            raise DataError(f"{path}: cannot be read ({error})") from error
    return records


def read_iterable(rows: Iterable[Any], field: str) -> Records:
    """Records handed over in Python; a datasets.Dataset is such an iterable."""
    if isinstance(rows, Mapping):
        raise DataError(
            f"{field} is a mapping with the keys {', '.join(map(str, rows))}: give one of its parts, for "
            "example "
            f'rows["{next(iter(rows), "train")}"]'
        )
    records = Records([], [], [])
    for number, record in enumerate(rows):
        if not isinstance(record, Mapping):
            raise DataError(
                f"{field}: element {number} is {type(record).__name__}, not a dict; give an iterable of "
                "dicts (of a pandas frame: frame.to_dict('records'))"
            )
        records.values.append({str(key): plain(value) for key, value in record.items()})
        records.places.append((field, number))
    return records


def plain(value: Any) -> Any:
    """A value without NumPy in it, at any depth; parquet readers hand nested lists over as arrays."""
    if isinstance(value, str | int | float) and not isinstance(value, np.generic):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return value


def _find(spec: str, field: str) -> list[Path]:
    path = Path(spec).expanduser()
    if path.is_file():
        if path.suffix not in _READERS:
            raise DataError(
                f"{field} = {spec!r}: files of kind {path.suffix or '(none)'} are not read; use {', '.join(_READERS)}"
            )
        return [path]
    if path.is_dir():
        found = sorted(p for p in path.iterdir() if p.is_file() and p.suffix in _READERS)
    else:
        found = sorted(Path(p) for p in glob.glob(str(path), recursive=True))
        found = [p for p in found if p.is_file() and p.suffix in _READERS]
    if not found:
        raise DataError(
            f"{field} = {spec!r}: no such file, and no {', '.join(_READERS)} files match it (looked in {Path.cwd()})"
        )
    return found


def _read_jsonl(path: Path) -> _Numbered:
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line.strip())
            except json.JSONDecodeError as error:
                where = "where the line ends" if error.pos >= len(line.strip()) else f"at column {error.colno}"
                raise DataError(f"{path}, line {number}: not JSON ({error.msg} {where})") from error
            yield number, _checked(record, f"{path}, line {number}")


def _read_json(path: Path) -> _Numbered:
    text = path.read_text(encoding="utf-8-sig")
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg.startswith("Extra data"):  # one object a line under the name .json is common
            yield from _read_jsonl(path)
            return
        raise DataError(f"{path}, line {error.lineno}: not JSON ({error.msg} at column {error.colno})") from error
    if isinstance(content, dict):
        lists = [value for value in content.values() if isinstance(value, list)]
        # {"data": [rows]} is unwrapped; a dict with several lists or with other values is one record.
        is_wrapped = len(content) == 1 and lists and all(isinstance(row, dict) for row in lists[0])
        content = lists[0] if is_wrapped else [content]
    if not isinstance(content, list):
        raise DataError(f"{path}: holds {type(content).__name__}, not a list of objects")
    for number, record in enumerate(content):
        yield number, _checked(record, f"{path}, row {number}")


def _read_csv(path: Path) -> _Numbered:
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    with path.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.DictReader(lines)
        for record in reader:
            if None in record or None in record.values():
                raise DataError(
                    f"{path}, line {reader.line_num}: another number of cells than the header's "
                    f"{len(reader.fieldnames or [])}"
                )
            yield reader.line_num, {key: cell if cell != "" else None for key, cell in record.items()}


def _read_parquet(path: Path) -> _Numbered:
    # Imported here: reading text files needs no pyarrow, which takes a quarter of a second to import.
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                for record in batch.to_pylist():
                    yield number, record
                    number += 1
    except pyarrow.ArrowException as error:
        raise DataError(f"{path}: cannot be read as parquet ({error})") from error


def _checked(record: Any, place: str) -> Record:
    if not isinstance(record, dict):
        raise DataError(f"{place}: a {type(record).__name__}, not an object with columns")
    return record


_READERS: dict[str, Callable[[Path], _Numbered]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".parquet": _read_parquet,
    ".csv": _read_csv,
}
