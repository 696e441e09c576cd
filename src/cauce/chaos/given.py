"""What a user gives to `cauce chaos`, looked at before anything starts."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cauce.errors import RecipeError
from cauce.journal import Journal
from cauce.recipe.load import load_recipe
from cauce.recipe.models import Recipe
from cauce.stages.record import recorded_recipe

OWN = ("run.dir", "run.name")


def load(recipe: str, settings: Sequence[str]) -> Recipe:
    """Raises RecipeError for settings that are chaos's own, or that it cannot work with."""
    loaded = load_recipe(recipe, list(settings))
    for setting in settings:
        if setting.lstrip("-").startswith(OWN):
            raise RecipeError(f"{setting}: chaos makes its runs in a folder of its own; say where by --folder")
    if loaded.cluster.address != "local":
        raise RecipeError(
            f"cluster.address={loaded.cluster.address!r}: chaos kills the processes of a Ray that the run starts "
            "itself; leave it at local"
        )
    if loaded.journal.locking == "exclusive":
        raise locked("journal.locking='exclusive'")
    return loaded


def locked(seen: str) -> RecipeError:
    return RecipeError(
        f"{seen}: chaos reads the record while the run goes on; put --folder on a local disk, with "
        "journal.locking=shared"
    )


def wall_of(run_dir: Path, recipe: Recipe) -> float:
    """Seconds that a given run took in peace, by the chaos that made it or else by its own summary.

    The latter leaves out starting and ending the command, so that what is compared with it looks a little worse.

    Raises:
        RecipeError: where it is not finished, was disturbed, is a fork, or is a run of another recipe.
    """
    with Journal.read_only(run_dir) as journal:
        found, starts = recorded_recipe(journal), len(journal.events("started"))
        deaths = [kind for kind in ("worker_died", "learner_died") if journal.events(kind)]
        ended, is_fork = journal.events("ended"), journal.is_fork
    status = ended[-1].detail["status"] if ended else "running, or was killed"
    if is_fork:
        raise RecipeError(f"--undisturbed {run_dir}: it is a fork, which generates nothing")
    if status != "finished":
        raise RecipeError(f"--undisturbed {run_dir}: it is not finished, but {status}")
    if deaths or starts != 1:
        raise RecipeError(
            f"--undisturbed {run_dir}: it was disturbed: {starts} starts, {', '.join(deaths) or 'no deaths'}"
        )
    ours, theirs = _learning(recipe), _learning(found)
    if other := [section for section in ours if ours[section] != theirs[section]]:
        raise RecipeError(f"--undisturbed {run_dir} is a run of another recipe: [{other[0]}] differs")
    beside = run_dir.parent / "chaos.json"
    if beside.exists():
        made = json.loads(beside.read_text(encoding="utf-8"))
        if Path(made["runs"]["undisturbed"]).resolve() == run_dir.resolve():
            return float(made["wall_s"]["undisturbed"])
    return float(json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))["wall_s"])


def _learning(recipe: Recipe) -> dict[str, Any]:
    """The settings by section, without those that say where a run lies and what is shown of it."""
    return recipe.model_dump(exclude={"run": {"dir", "name"}, "logging": True})
