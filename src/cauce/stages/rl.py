"""The stage `rl`: train, resume, replay - each from a recipe or a run folder to its result. What happens in between is
in run.py; what must be found out before any process starts is in prepare.py; a fork of a run is in fork.py.
"""

import json
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cauce.errors import RecipeError
from cauce.faults import fault_point
from cauce.journal import Journal, JournalReader
from cauce.metrics.observer import NullObserver, Observer
from cauce.recipe.dump import dump_toml
from cauce.recipe.load import Difference, apply_overrides, differences, load_resolved, semantic_differences
from cauce.recipe.models import Recipe
from cauce.runtime.recovery import load_newest, redo
from cauce.runtime.session import Session
from cauce.stages.fork import why_not
from cauce.stages.given import Rows, keep_rows, kept_rows, listed
from cauce.stages.prepare import prepare
from cauce.stages.record import (
    as_recorded,
    new_run_folder,
    recipe_meta,
    recorded_recipe,
    same_as_recorded,
    with_dtypes,
    write_recipe,
)
from cauce.stages.run import run, session_plan

RewardLike = Callable[..., Any] | Sequence[Callable[..., Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """What a replay found: the first plan whose weights differ from the record, or None."""

    plans: int
    divergent_plan: int | None
    lineages: int = 1  # above 1 the record holds weights of several numeric environments, and a replay has only one
    after: int = 0  # the plan of the checkpoint that it began with; 0: the initial weights
    until: int = 0
    other_numerics: tuple[str, ...] = ()  # in what this machine differs from the one that the record is of


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
    rows, test_rows = listed(rows), listed(test_rows)
    prepared = prepare(with_dtypes(recipe), rows=rows, test_rows=test_rows, reward=reward)
    run_dir = new_run_folder(recipe, name or "run")
    write_recipe(run_dir, recipe)
    keep_rows(run_dir, "train", rows)
    keep_rows(run_dir, "test", test_rows)
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
        rows, test_rows = kept_rows(run_dir, "train", rows), kept_rows(run_dir, "test", test_rows)
        if not journal.is_fork:
            _need_what_python_gave(journal, recipe, rows=rows, test_rows=test_rows, reward=reward)
        prepared = prepare(
            as_recorded(recipe, journal.meta),
            rows=rows,
            test_rows=test_rows,
            reward=reward,
            needs_data=not journal.is_fork,
        )
        same_as_recorded(journal, prepared.digests, "model_digest", *(() if journal.is_fork else ("data_digest",)))
        changes = [str(change) for change in differences(recorded_recipe(journal), recipe)]
        write_recipe(run_dir, recipe)  # before the record: a kill in between leaves what was asked for, as an edit
        with journal.transaction():
            journal.set_meta("recipe", dump_toml(recipe))
            if changes:
                journal.event("settings", {"changed": "; ".join(changes)})
        return run(prepared, journal, run_dir, watcher)


def replay(
    run_dir: str | Path,
    *,
    from_plan: int | None = None,
    until_plan: int | None = None,
    observer: Observer | None = None,
) -> ReplayResult:
    """Trains again on the record alone, compares every checksum, and stops at the first that differs.

    Args:
        from_plan: the first plan that must be compared; training begins at the newest checkpoint before it, so that a
            checkpoint on either side of a difference tells which plans made it. None: from the initial weights.
        until_plan: the last plan; None for all.
    """
    run_dir = Path(run_dir)
    watcher = observer or NullObserver()
    with Journal.read_only(run_dir) as journal:
        last = _replayed_until(journal, from_plan, until_plan)
        prepared = prepare(as_recorded(recorded_recipe(journal), journal.meta), needs_data=False)
        same_as_recorded(journal, prepared.digests, "model_digest")
        forks = [int(event.detail["plan"]) for event in journal.events("lineage")]
        if forks:
            watcher.on_note(
                f"the record has {len(forks) + 1} lineages: redone under another numeric fingerprint, plan "
                f"{', plan '.join(map(str, forks))} gave other weights. A replay is one lineage and may differ there"
            )
        with Session(
            session_plan(prepared, journal, run_dir, epoch=1),
            reward=None,
            on_event=lambda kind, detail: None,
            on_note=watcher.on_note,
            only_learner=True,
        ) as session:
            learner = session.fresh_learner()
            begin = journal.forked_at if from_plan is None else from_plan - 1
            after = load_newest(learner, run_dir=run_dir, journal=journal, at_most=begin)
            result = redo(
                learner,
                journal=journal,
                algorithm=prepared.algorithm,
                after=after,
                until=last,
                stops_at_divergence=True,
                on_plan=lambda number: watcher.on_phase("replay", number, last),
            )
            here = learner.status()["fingerprint"]
        recorded = json.loads(journal.meta.get("fingerprint", "{}"))
    return ReplayResult(
        plans=result.num_redone,
        divergent_plan=None if result.divergence is None else result.divergence.plan,
        lineages=len(forks) + 1,
        after=after,
        until=last,
        other_numerics=tuple(
            f"{name} {recorded.get(name)} in the record, {value} here"
            for name, value in here.items()
            if recorded.get(name) != value
        ),
    )


def _replayed_until(journal: JournalReader, from_plan: int | None, until_plan: int | None) -> int:
    """The last plan that a replay trains on."""
    first, last = journal.forked_at + 1, journal.last_decided
    begin, end = first if from_plan is None else from_plan, last if until_plan is None else until_plan
    if not (last < first and from_plan is until_plan is None) and not first <= begin <= end <= last:
        raise RecipeError(
            f"--from-plan {begin} --until-plan {end}: {journal.run_dir} has the plans {first} to {last} to replay"
        )
    return end


def changed_recipe(run_dir: Path, overrides: Sequence[str]) -> Recipe:
    """The run's recipe with runtime keys changed, by overrides or by an edit of its recipe.toml.

    Raises:
        RecipeError: when a semantic key would change, or was edited; the text says what to do instead.
    """
    with Journal.read_only(run_dir) as journal:
        recorded, is_fork = recorded_recipe(journal), journal.is_fork
    written = load_resolved(run_dir)
    edits = semantic_differences(recorded, written)
    if edits:
        raise RecipeError(
            f"{run_dir / 'recipe.toml'} says other than the record of the run: {_listed(edits)}. Its weights were "
            f"made with the former; put these settings back. {_instead(run_dir, edits)}"
        )
    recipe = apply_overrides(written, overrides)
    changes = semantic_differences(recorded, recipe)
    if recipe.run.plans != recorded.run.plans and (is_fork or recorded.learner.schedule != "constant"):
        why = (
            "a fork has the plans that it was made with"
            if is_fork
            else f"learner.schedule={recorded.learner.schedule!r} spreads the learning rate over all plans"
        )
        raise RecipeError(
            f"{run_dir} cannot go on with run.plans: {recorded.run.plans} -> {recipe.run.plans} ({why}). "
            "Resume it as it is, or start a new run"
        )
    if changes:
        raise RecipeError(
            f"{run_dir} cannot go on with other settings that shape its weights: {_listed(changes)}. "
            f"Resume it as it is. {_instead(run_dir, changes)}"
        )
    return recipe


def _listed(changes: Sequence[Difference]) -> str:
    return "; ".join(map(str, changes))


def _instead(run_dir: Path, changes: Sequence[Difference]) -> str:
    """What to do for settings that no resume accepts."""
    closed = [change.key for change in changes if why_not(change.key)]
    if closed:
        return f"For another {', '.join(closed)} start a new run"
    settings = " ".join(f"--set {change.key}={change.new}" for change in changes)
    return f"To train on its recorded samples with other settings: cauce fork {run_dir} --at PLAN {settings}"


def _need_what_python_gave(
    journal: JournalReader,
    recipe: Recipe,
    *,
    rows: Rows | None,
    test_rows: Rows | None,
    reward: RewardLike | None,
) -> None:
    """Names the Python objects that a run was started with and that a resume must be given again."""
    missing = []
    if reward is None and not recipe.reward.names:
        missing.append("reward=...")
    if rows is None and not recipe.data.train:
        missing.append("data=...")
    if test_rows is None and not recipe.data.test and journal.meta["test_digest"]:
        missing.append("test=...")
    if missing:
        run_dir = str(journal.run_dir)
        raise RecipeError(
            f"{run_dir} was started from Python with objects that no file holds; resume it there: "
            f"Trainer.resume({run_dir!r}, {', '.join(missing)})"
        )
