"""What a run keeps of its recipe: in its journal, which decides, and in two files, which are for people and tools.

    meta recipe            the settings as given, as TOML
    meta engine_dtype, learner_dtype, correction, learner_threads
                           what their "auto" came to where the run began; the weights depend on it, so that a resume
                           or a replay takes it over, whatever "auto" would be on its own host
    RUN/recipe.toml        the settings again. A runtime key may be edited here before a resume, a semantic one may not
    RUN/recipe.json        the same for programs

Which settings a resume accepts is decided in rl.py.
"""

import os
import time
import uuid
from collections.abc import Mapping
from pathlib import Path

from cauce.algorithms.table import Algorithm
from cauce.durable import make_folder
from cauce.errors import RecipeError
from cauce.journal import Journal, JournalReader
from cauce.models.load import DTYPES, resolve_dtype
from cauce.recipe.dump import dump_toml
from cauce.recipe.load import recipe_from_text
from cauce.recipe.models import AlgorithmSettings, Recipe


def with_dtypes(recipe: Recipe) -> Recipe:
    """The recipe with dtypes by name: of a run every process must take the same, on whichever host it lives."""
    dtypes = {"engine": recipe.engine.dtype, "learner": recipe.learner.dtype}
    words = {dtype: word for word, dtype in DTYPES.items()}
    return _with(recipe, {section: {"dtype": words[resolve_dtype(word)]} for section, word in dtypes.items()})


def recipe_meta(recipe: Recipe, *, resolved: Recipe, algorithm: Algorithm) -> dict[str, str]:
    """What the journal of a new run keeps: the recipe as given, and what its "auto" came to.

    The learner's threads are added when it has started.
    """
    return {
        "recipe": dump_toml(recipe),
        "engine_dtype": resolved.engine.dtype,
        "learner_dtype": resolved.learner.dtype,
        "correction": "off" if algorithm.correction_cap is None else "on",
    }


def recorded_recipe(journal: JournalReader) -> Recipe:
    """The settings of a run as given, with the runtime keys of its last resume."""
    return recipe_from_text(journal.meta["recipe"], source=f"the record of {journal.run_dir}")


def as_recorded(recipe: Recipe, meta: Mapping[str, str]) -> Recipe:
    """The recipe with what "auto" came to when the run began."""
    correction: dict[str, object] = {"correction": meta["correction"]}
    if meta["correction"] == "off":  # nothing reads the cap then, and a recipe that sets it would be refused
        correction["correction_cap"] = AlgorithmSettings().correction_cap
    learner: dict[str, object] = {"dtype": meta["learner_dtype"]}
    if "learner_threads" in meta:
        learner["threads"] = int(meta["learner_threads"])
    return _with(recipe, {"algorithm": correction, "engine": {"dtype": meta["engine_dtype"]}, "learner": learner})


def write_recipe(run_dir: Path, recipe: Recipe) -> None:
    """Both files, each there whole or as it was."""
    for name, text in (("recipe.toml", dump_toml(recipe)), ("recipe.json", recipe.model_dump_json(indent=1))):
        beside = run_dir / f"{name}.tmp"
        with beside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(run_dir / name)


def new_run_folder(recipe: Recipe, name: str) -> Path:
    """The folder of a run that begins: run.dir/run.name or, without a name, `name` and the time."""
    folder = Path(recipe.run.dir) / (recipe.run.name or f"{name}-{time.strftime('%Y%m%d-%H%M%S')}")
    if folder.is_dir() and any(folder.iterdir()) and not _was_never_begun(folder):
        if recipe.run.name:
            raise RecipeError(
                f"run.name={recipe.run.name!r}: {folder} exists already. Go on with it by `cauce resume {folder}`, "
                "or choose another run.name"
            )
        folder = folder.with_name(f"{folder.name}-{uuid.uuid4().hex[:4]}")
    try:
        make_folder(folder)
    except OSError as error:
        raise RecipeError(
            f"run.dir={recipe.run.dir!r}: cannot make {folder} ({error.strerror}); set another"
        ) from error
    return folder


def _was_never_begun(folder: Path) -> bool:
    """Whether it holds no more than what a kill before the first record leaves."""
    left = {
        "recipe.toml",
        "recipe.json",
        "data",
        "owner.lock",
        "payloads",
        "journal.db",
        "journal.db-wal",
        "journal.db-shm",
    }
    return {f.name for f in folder.iterdir()} <= left and not Journal.is_begun(folder)


def same_as_recorded(journal: JournalReader, digests: Mapping[str, str], *keys: str) -> None:
    """Another model or other data under an old record would train on nonsense without a word."""
    settings = {"model_digest": "model.path", "data_digest": "data.train"}
    for key in keys:
        what, recorded, found = settings[key], journal.meta[key], digests[key]
        if recorded != found:
            raise RecipeError(
                f"{what} is not what this run began with: its content has digest {found[:12]}, recorded is "
                f"{recorded[:12]}. Put the original back, or start a new run"
            )


def total_steps(recipe: Recipe, meta: Mapping[str, str]) -> int:
    """Optimizer steps over which the learning rate runs; those before a fork were cut as its source cut them."""
    steps_per_plan = recipe.learner.mini_batches * recipe.learner.epochs
    return int(meta.get("forked_steps", "0")) + (recipe.run.plans - int(meta.get("forked_at", "0"))) * steps_per_plan


def _with(recipe: Recipe, changes: Mapping[str, Mapping[str, object]]) -> Recipe:
    sections = {section: getattr(recipe, section).model_copy(update=dict(new)) for section, new in changes.items()}
    return recipe.model_copy(update=sections)
