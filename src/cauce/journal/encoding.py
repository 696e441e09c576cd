"""JSON text for the columns of the database: rows of data, reward parts, metrics, details of events.

Numpy values become plain ones, and a key that is not text becomes text, as JSON has it. What JSON cannot hold
is refused by name, when the task is admitted and not at the resume that needs it. Token arrays are not
encoded here; they go to payload files.
"""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from cauce.errors import JournalError
from cauce.types import Row


def to_json(value: object, *, what: str) -> str:
    try:
        return json.dumps(value, default=_plain, ensure_ascii=False, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise JournalError(f"{what} cannot be written to the journal: {error}") from error


def row_to_json(row: Row) -> str:
    """The row as JSON; a column that JSON cannot hold is named."""
    for name, value in row.columns.items():
        try:
            json.dumps(value, default=_plain)
        except (TypeError, ValueError) as error:
            raise JournalError(
                f"row {row.id!r}: column {name!r} cannot be written to the journal: {error}; "
                "turn it into text, numbers, lists or dictionaries, or leave it out of the data"
            ) from error
    content = {"id": row.id, "prompt": row.prompt, "columns": row.columns}
    return to_json(content, what=f"row {row.id!r}")


def row_from_json(text: str) -> Row:
    content = json.loads(text)
    return Row(id=content["id"], prompt=content["prompt"], columns=content["columns"])


def metrics_to_json(metrics: Mapping[str, float], *, plan: int) -> str:
    return to_json({name: float(value) for name, value in metrics.items()}, what=f"the metrics of plan {plan}")


def _plain(value: object) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise TypeError(f"a value of type {type(value).__name__} has no JSON form")
