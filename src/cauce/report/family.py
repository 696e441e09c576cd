"""The runs that a run is compared with: the one it was forked from, its own forks, and forks of the same source.

They are looked for beside the run and beside its source, by what their journals say; folders that cannot be read are
passed over. Their curves are taken from metrics.jsonl.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cauce.errors import JournalError
from cauce.journal.store import Journal
from cauce.metrics.writer import read_metrics

MAX_RELATIVES = 6  # more curves in one figure cannot be told apart


@dataclass(frozen=True, slots=True, kw_only=True)
class Relative:
    """One run of a family. `forked_at` is None for one that is no fork."""

    name: str
    forked_at: int | None
    changes: str
    rows: Sequence[Mapping[str, Any]]


def family(run_dir: Path) -> tuple[Relative, list[Relative]]:
    """The run itself, and its relatives: the source first, then forks by name."""
    meta = _meta(run_dir)
    own, source = meta.get("run_id", ""), meta.get("forked_run", "")
    found = {}
    for folder in _folders(run_dir, meta):
        other = _meta(folder)
        is_source = bool(source) and other.get("run_id") == source
        is_fork = bool(own) and other.get("forked_run", "") in {own, source} - {""}
        if is_source or is_fork:
            found[folder] = (not is_source, folder.name, other)
    relatives = [
        _relative(folder, other) for folder, (_, _, other) in sorted(found.items(), key=lambda item: item[1][:2])
    ]
    return _relative(run_dir, meta), relatives[:MAX_RELATIVES]


def _folders(run_dir: Path, meta: Mapping[str, str]) -> Iterator[Path]:
    here = run_dir.resolve()
    parents = {here.parent: None, Path(meta.get("forked_from", here)).parent: None}
    for parent in parents:
        for path in sorted(parent.glob("*/journal.db")):
            if path.parent != here:
                yield path.parent


def _meta(run_dir: Path) -> dict[str, str]:
    try:
        with Journal.read_only(run_dir) as journal:
            return journal.meta
    except JournalError:
        return {}


def _relative(run_dir: Path, meta: Mapping[str, str]) -> Relative:
    at = meta.get("forked_at")
    return Relative(
        name=run_dir.resolve().name,
        forked_at=None if at is None else int(at),
        changes=meta.get("fork_changes", ""),
        rows=read_metrics(run_dir),
    )
