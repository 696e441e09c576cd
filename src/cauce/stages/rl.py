"""The stage `rl`: train, resume, replay - each from a recipe or a run folder to its result. What happens in between is
in run.py; what must be found out before any process starts is in prepare.py.
"""

import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cauce.durable import make_folder
from cauce.errors import RecipeError
from cauce.faults import fault_point
from cauce.journal import Journal, JournalReader
from cauce.metrics.observer import NullObserver, Observer
from cauce.recipe.dump import dump_toml
from cauce.recipe.load import apply_overrides, load_resolved, semantic_differences
from cauce.recipe.models import Recipe
from cauce.runtime.recovery import redo
from cauce.runtime.session import Session
from cauce.stages.prepare import Prepared, prepare
from cauce.stages.record import as_recorded, recipe_meta, recorded_recipe, with_dtypes, write_recipe
from cauce.stages.run import run, session_plan

Rows = str | Iterable[Mapping[str, Any]]
RewardLike = Callable[..., Any] | Sequence[Callable[..., Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """What a replay found: the first plan whose weights differ from the record, or None."""

    plans: int
    divergent_plan: int | None
    lineages: int = 1  # above 1 the record holds weights of several numeric environments, and a replay has only one


def train(
    recipe: Recipe,
    *,
    name: str = "",
    rows: Rows | None = None,
    test_rows: Rows | None = None,
    reward: RewardLike | None = None,
    observer: Observer | None = None,
) -> dict[str, Any]:
    """Runs a recipe from its beginning and returns what summary.json holds.

    Args:
        name: what the run folder is called if run.name is empty, with the time.
        rows, test_rows: data in place of data.train and data.test.
        reward: a callable (or several) in place of reward.fn.
    """
    prepared = prepare(with_dtypes(recipe), rows=rows, test_rows=test_rows, reward=reward)
    run_dir = _new_run_dir(recipe, name or "run")
    write_recipe(run_dir, recipe)
    fault_point("run_folder_made")
    meta = {
        "run_id": uuid.uuid4().hex[:8],
        "lineage": "0",
        "max_reuse": str(recipe.buffer.max_reuse),
        "group_size": str(recipe.rollout.group_size),
        "made_from_python": str(reward is not None or rows is not None),
        **recipe_meta(recipe, resolved=prepared.recipe, algorithm=prepared.algorithm),
        **prepared.digests,
    }
    with Journal.create(run_dir, meta=meta, locking=recipe.journal.locking) as journal:
        return run(prepared, journal, run_dir, observer or NullObserver())


def resume(
    run_dir: str | Path,
    *,
    overrides: Sequence[str] = (),
    rows: Rows | None = None,
    test_rows: Rows | None = None,
    reward: RewardLike | None = None,
    observer: Observer | None = None,
    takeover: bool = False,
) -> dict[str, Any]:
    """Goes on with a run after any stop. Runtime keys may change; a semantic one is refused.

    Raises:
        RecipeError: when a semantic key, the model or the data is not that of the run.
        FencedError: when another process owns the run.
    """
    run_dir = Path(run_dir)
    watcher = observer or NullObserver()
    if takeover:
        Journal.wait_for_exclusive_owner(run_dir, say=watcher.on_note)
    recipe = changed_recipe(run_dir, overrides)
    with Journal.open(run_dir, takeover=takeover, locking=recipe.journal.locking) as journal:
        if journal.meta["made_from_python"] == "True" and reward is None and not recipe.reward.names:
            raise RecipeError(
                f"{run_dir} was started from Python with a reward of its own; resume it there: "
                f"Trainer.resume({str(run_dir)!r}, reward=...)"
            )
        prepared = prepare(as_recorded(recipe, journal.meta), rows=rows, test_rows=test_rows, reward=reward)
        _same_as_recorded(journal, prepared, "model_digest", "data_digest")
        write_recipe(run_dir, recipe)  # before the record: a kill in between leaves what was asked for, as an edit
        journal.set_meta("recipe", dump_toml(recipe))
        return run(prepared, journal, run_dir, watcher)


def replay(run_dir: str | Path, *, observer: Observer | None = None) -> ReplayResult:
    """Trains again from the initial weights on the record alone, and compares every checksum."""
    run_dir = Path(run_dir)
    watcher = observer or NullObserver()
    with Journal.read_only(run_dir) as journal:
        prepared = prepare(as_recorded(recorded_recipe(journal), journal.meta), needs_data=False)
        _same_as_recorded(journal, prepared, "model_digest")
        forks = [int(event.detail["plan"]) for event in journal.events("lineage")]
        if forks:
            watcher.on_note(
                f"the record has {len(forks) + 1} lineages: redone under another numeric fingerprint, plan "
                f"{', plan '.join(map(str, forks))} gave other weights. A replay is one lineage and may differ there"
            )
        plan = session_plan(prepared, journal, run_dir, epoch=1)
        last = journal.last_plan
        with Session(
            plan,
            reward=None,
            on_event=lambda kind, detail: None,
            on_note=watcher.on_note,
            only_learner=True,
        ) as session:
            result = redo(
                session.fresh_learner(),
                journal=journal,
                algorithm=prepared.algorithm,
                after=0,
                on_plan=lambda number: watcher.on_phase("replay", number, last),
            )
    divergent = None if result.divergence is None else result.divergence.plan
    return ReplayResult(plans=result.num_redone, divergent_plan=divergent, lineages=len(forks) + 1)


def changed_recipe(run_dir: Path, overrides: Sequence[str]) -> Recipe:
    """The run's recipe with runtime keys changed, by overrides or by an edit of its recipe.toml.

    Raises:
        RecipeError: when a semantic key would change, or was edited; the text says what to do instead.
    """
    with Journal.read_only(run_dir) as journal:
        recorded = recorded_recipe(journal)
    written = load_resolved(run_dir)
    edits = [str(change) for change in semantic_differences(recorded, written)]
    if edits:
        raise RecipeError(
            f"{run_dir / 'recipe.toml'} says other than the record of the run: {'; '.join(edits)}. Its weights were "
            "made with the former; put these settings back, or start a new run"
        )
    recipe = apply_overrides(written, overrides)
    changes = [str(change) for change in semantic_differences(recorded, recipe)]
    if recipe.run.plans != recorded.run.plans and recorded.learner.schedule != "constant":
        changes.append(
            f"run.plans: {recorded.run.plans} -> {recipe.run.plans} (learner.schedule={recorded.learner.schedule!r} "
            "spreads the learning rate over all plans)"
        )
    if changes:
        raise RecipeError(
            f"{run_dir} cannot go on with other settings that shape its weights: {'; '.join(changes)}. "
            "Resume it as it is, or start a new run"
        )
    return recipe


def _new_run_dir(recipe: Recipe, name: str) -> Path:
    folder = Path(recipe.run.dir) / (recipe.run.name or f"{name}-{time.strftime('%Y%m%d-%H%M%S')}")
    if folder.exists() and any(folder.iterdir()) and not _was_never_begun(folder):
        if recipe.run.name:
            raise RecipeError(
                f"run.name={recipe.run.name!r}: {folder} exists already. Go on with it by `cauce resume {folder}`, "
                "or choose another run.name"
            )
        folder = folder.with_name(f"{folder.name}-{uuid.uuid4().hex[:4]}")
    make_folder(folder)
    return folder


def _was_never_begun(folder: Path) -> bool:
    """Whether it holds no more than what a kill before the first record leaves."""
    left = {"recipe.toml", "recipe.json", "owner.lock", "payloads", "journal.db", "journal.db-wal", "journal.db-shm"}
    return {f.name for f in folder.iterdir()} <= left and not Journal.is_begun(folder)


def _same_as_recorded(journal: JournalReader, prepared: Prepared, *keys: str) -> None:
    """Another model or other data under an old record would train on nonsense without a word."""
    settings = {"model_digest": "model.path", "data_digest": "data.train"}
    for key in keys:
        what, recorded, found = settings[key], journal.meta[key], prepared.digests[key]
        if recorded != found:
            raise RecipeError(
                f"{what} is not what this run began with: its content has digest {found[:12]}, recorded is "
                f"{recorded[:12]}. Put the original back, or start a new run"
            )
