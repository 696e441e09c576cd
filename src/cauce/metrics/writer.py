"""RUN/metrics.jsonl: one line per plan, flushed as it is written, each plan exactly once.

A resumed run redoes the plans after its checkpoint. Their lines are replaced, not appended: a later value
wins, and what only the earlier line had (an evaluation that the redo did not repeat) stays. The file is not
the record of the run, which is the journal; it is what people and tools read, also while the run goes on.
"""

import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from cauce.metrics.names import is_known
from cauce.metrics.observer import NullObserver

logger = logging.getLogger(__name__)

Row = dict[str, float | int | None]


def read_metrics(run_dir: Path) -> list[Row]:
    """Rows of metrics.jsonl in plan order; a line torn by a crash is left out, and so is a missing file."""
    path = Path(run_dir) / "metrics.jsonl"
    if not path.exists():
        return []
    rows: dict[int, Row] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("plan"), int):
            rows[row["plan"]] = {**rows.get(row["plan"], {}), **row}
    return [rows[plan] for plan in sorted(rows)]


class MetricsWriter(NullObserver):
    """Writes what it is told of plans and evaluations. Usable as an observer, or through `write`."""

    def __init__(self, run_dir: Path, *, clock: Callable[[], float] = time.time) -> None:
        self._path = Path(run_dir) / "metrics.jsonl"
        self._clock = clock
        self._unknown: set[str] = set()
        self._file: IO[str] | None = None
        self._rows = {int(row["plan"] or 0): row for row in read_metrics(Path(run_dir))}
        if self._path.exists():
            self._rewrite()

    def write(self, plan: int, metrics: Mapping[str, float]) -> None:
        """Adds these numbers to the row of `plan`; a number that is already there is replaced."""
        self._warn_of_unknown(metrics)
        numbers = {name: _as_number(value) for name, value in metrics.items()}
        old = self._rows.get(plan, {})
        row: Row = {
            "plan": plan,
            "time": round(self._clock(), 3),
            **{k: v for k, v in old.items() if k != "time"},
        }
        row.update(numbers)
        is_next = all(plan > other for other in self._rows)
        self._rows[plan] = row
        if is_next:
            self._append(row)
        else:
            self._rewrite()

    def restore(self, plans: Mapping[int, Mapping[str, float]]) -> None:
        """Adds rows of plans that the file lacks, where a crash came between the journal and this file."""
        for plan in sorted(plans.keys() - self._rows.keys()):
            self.write(plan, plans[plan])

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def on_plan(self, plan: int, metrics: Mapping[str, float]) -> None:
        self.write(plan, metrics)

    def on_eval(self, plan: int, name: str, accuracy: float) -> None:
        self.write(plan, {f"eval/{name}/accuracy": accuracy})

    def on_end(self, summary: Mapping[str, Any]) -> None:
        self.close()

    def _append(self, row: Row) -> None:
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("a", encoding="utf-8")
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def _rewrite(self) -> None:
        """Replaces the file in one rename, so that a reader or a crash never meets half of it."""
        self.close()
        beside = self._path.with_name("metrics.jsonl.tmp")
        with beside.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(self._rows[plan]) + "\n" for plan in sorted(self._rows))
            file.flush()
            os.fsync(file.fileno())
        beside.replace(self._path)

    def _warn_of_unknown(self, metrics: Mapping[str, float]) -> None:
        unknown = {name for name in metrics if not is_known(name)} - self._unknown
        if unknown:
            self._unknown |= unknown
            logger.warning("metrics outside the list in cauce.metrics.names: %s", ", ".join(sorted(unknown)))


def _as_number(value: float) -> float | int | None:
    """JSON has no NaN or infinity: they become null, which every plot shows as a gap."""
    if isinstance(value, (bool, int)):
        return int(value)
    number = float(value)
    return number if math.isfinite(number) else None
