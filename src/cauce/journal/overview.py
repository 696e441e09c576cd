"""A run in a few facts, from its journal alone: what it is, how it stands, what it came to so far.

Works on a run that goes on, and disturbs nothing. Settings are read as plain TOML, so that runs of other releases can
be listed too.
"""

import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cauce.errors import JournalError
from cauce.journal.owner import Owner, live_owner
from cauce.journal.queries import EventRecord, JournalReader
from cauce.journal.schema import DATABASE_NAME
from cauce.journal.store import Journal


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """One line of a list of runs.

    `state`: running; finished, stopped or failed, as its last owner said; killed, where that one is gone without a
    word; new, where no owner began to work.
    """

    run_dir: Path
    run_id: str
    stage: str
    algorithm: str
    model: str
    state: str
    owner: Owner | None  # the living one
    failure: str
    plans: int  # decided, those before a fork included
    num_plans: int
    reward: float | None  # mean, of the last plan that was applied
    accuracy: float | None  # of the last evaluation
    accuracy_plan: int
    started: float | None  # unix time
    changed: float
    source: str  # of a fork: the run and the plan


def find_runs(folder: Path) -> list[Path]:
    """The run folders in a folder, or the folder itself where it is one; by name."""
    if (folder / DATABASE_NAME).is_file():
        return [folder]
    return sorted(path.parent for path in folder.glob(f"*/{DATABASE_NAME}"))


def read_overview(run_dir: Path) -> Overview:
    """Raises JournalError for a folder whose journal cannot be read."""
    with Journal.read_only(run_dir) as journal:
        return overview(journal)


def overview(journal: JournalReader) -> Overview:
    meta, run_dir = journal.meta, journal.run_dir
    recipe = _recipe(meta.get("recipe", ""), run_dir)
    owner = live_owner(run_dir)
    marks = [event for kind in ("started", "ended") for event in journal.events(kind)]
    last = max(marks, key=lambda event: event.time) if marks else None
    ended = last if last is not None and last.kind == "ended" else None
    evals = journal.events("evaluated")
    newest = journal.select("SELECT metrics FROM plan WHERE state = 'applied' ORDER BY number DESC LIMIT 1")
    return Overview(
        run_dir=run_dir,
        run_id=meta.get("run_id", ""),
        stage=str(recipe.get("stage", "")),
        algorithm=str(recipe.get("algorithm", {}).get("name", "")),
        model=str(recipe.get("model", {}).get("path", "")),
        state="running" if owner else _state(last),
        owner=owner,
        failure=str(ended.detail.get("failure", "")) if ended and not owner else "",
        plans=journal.last_decided,
        num_plans=journal.last_plan if journal.is_fork else int(recipe.get("run", {}).get("plans", 0)),
        reward=json.loads(newest[0][0]).get("reward/mean") if newest else None,
        accuracy=evals[-1].detail["accuracy"] if evals else None,
        accuracy_plan=int(evals[-1].detail["plan"]) if evals else 0,
        started=min((event.time for event in marks), default=None),
        changed=_changed(run_dir),
        source=f"{meta['forked_from']} after plan {journal.forked_at}" if journal.is_fork else "",
    )


def _state(last: EventRecord | None) -> str:
    if last is None:
        return "new"
    return str(last.detail["status"]) if last.kind == "ended" else "killed"


def _recipe(text: str, run_dir: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise JournalError(f"{run_dir}: the recipe in its record is not TOML: {error}") from error


def _changed(run_dir: Path) -> float:
    """When something was last written; a commit may be in the log beside the database."""
    files = [run_dir / name for name in (DATABASE_NAME, f"{DATABASE_NAME}-wal")]
    return max(file.stat().st_mtime for file in files if file.exists())
