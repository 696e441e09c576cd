"""Rows that a run was given as Python objects, kept in its folder, so that a resume does not need them again.

    RUN/data/train.jsonl, RUN/data/test.jsonl

Only rows that JSON gives back as they were are kept: the digest of the data is compared at a resume. A reward has no
such form; `Trainer.resume(run, reward=...)` is given it again.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

Rows = str | Iterable[Mapping[str, Any]]


def listed(rows: Rows | None) -> Rows | None:
    """Rows that can be gone over more than once."""
    return rows if rows is None or isinstance(rows, str) else list(rows)


def keep_rows(run_dir: Path, split: str, rows: Rows | None) -> None:
    """Writes rows that are no file yet; nothing where a value has no JSON form."""
    if rows is None or isinstance(rows, str):
        return
    try:
        lines = [json.dumps(dict(row), ensure_ascii=False) + "\n" for row in rows]
    except (TypeError, ValueError):
        return
    path = run_dir / "data" / f"{split}.jsonl"
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(lines), encoding="utf-8", errors="surrogatepass")


def kept_rows(run_dir: Path, split: str, given: Rows | None) -> Rows | None:
    """What was given now, else what the run was given at its start; None where that was not kept either."""
    path = run_dir / "data" / f"{split}.jsonl"
    if given is not None or not path.is_file():
        return given
    text = path.read_text(encoding="utf-8", errors="surrogatepass")
    return [json.loads(line) for line in text.split("\n") if line]
