"""`cauce fork`: a recorded run, trained on from one of its plans with other settings of the learning.

    source, plans 1 .. K as they were applied -> weights, moments and step of plan K -> its plans K+1 ..., with the
    same groups in the same order, under another algorithm, loss, aggregation, learning rate, clip, ...

Nothing is generated, so a fork takes the time of learning alone. What that means is stated where it is used: the
samples come from the policy of the source, which the fork leaves more with every plan. The truncated importance
correction is on (unless algorithm.correction=off is asked for), and the metric sampler/effective_sample_size says how
far apart the two are; a fork far down that road says little about a run of its own.

The record of the fork is made in journal/forking.py, its training in runtime/forked.py. A killed fork is resumed like
any run.
"""

import os
import shutil
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cauce.checkpoint import write_beside
from cauce.errors import RecipeError
from cauce.journal import Journal, JournalReader
from cauce.journal.forking import MiniBatches, fork_journal
from cauce.metrics.observer import NullObserver, Observer
from cauce.recipe.dump import dump_toml
from cauce.recipe.load import Difference, apply_overrides, differences
from cauce.recipe.models import Recipe
from cauce.recipe.overrides import split_overrides
from cauce.runtime.learn import make_plan
from cauce.runtime.recovery import load_newest, newest_checkpoint, redo
from cauce.runtime.session import Session
from cauce.stages.prepare import Prepared, prepare
from cauce.stages.record import (
    as_recorded,
    new_run_folder,
    recorded_recipe,
    same_as_recorded,
    total_steps,
    with_dtypes,
    write_recipe,
)
from cauce.stages.run import run, session_plan

_OPEN = ("algorithm", "learner", "checkpoint", "cluster", "logging")
_OPEN_KEYS = ("run.name", "run.dir", "run.plans")
_CLOSED_KEYS = {
    "algorithm.dynamic_sampling": "which groups were planned is recorded",
    "learner.tasks_per_plan": "a fork takes the plans of its source with the groups they hold",
}
_ANSWERS = "the answers are recorded as they were sampled, and a fork generates none"
_CLOSED = {
    "stage": "a fork trains as its source did",
    "run": "the answers were sampled and ordered by it",
    "model": "the answers are that model's, and so are the weights that a fork begins with",
    "data": "the prompts are recorded, and others would need answers",
    "reward": "the outcomes are recorded, and a fork calls no reward",
    "rollout": _ANSWERS,
    "engine": _ANSWERS,
    "buffer": "which groups a plan takes is recorded",
    "weights": "a fork publishes no weights",
    "eval": "an evaluation generates, and a fork does not",
    "journal": "the record of the source is taken as it is",
}


def why_not(key: str) -> str:
    """Why a fork cannot have another value of this setting; empty where it can."""
    section = key.partition(".")[0]
    if key in _CLOSED_KEYS:
        return _CLOSED_KEYS[key]
    return "" if section in _OPEN or key in _OPEN_KEYS else _CLOSED[section]


def fork(
    run_dir: str | Path, *, at: int, overrides: Sequence[str] = (), observer: Observer | None = None
) -> dict[str, Any]:
    """Trains on from plan `at` of a recorded run, which may be running, in a new run folder; returns its summary.

    Raises:
        RecipeError: for a plan that the source does not have, and for a setting that would need generation.
    """
    source, watcher = Path(run_dir), observer or NullObserver()
    with Journal.read_only(source) as journal:
        recorded = recorded_recipe(journal)
        recipe = forked_recipe(recorded, overrides, beside=source)
        until = _last_plan(journal, recipe, at=at)
        base = prepare(as_recorded(recorded, journal.meta), needs_data=False)
        same_as_recorded(journal, base.digests, "model_digest")
        meta = _meta(journal, recipe, at=at, changes=differences(recorded, recipe))
        prepared = prepare(as_recorded(recipe, {**journal.meta, **meta}), needs_data=False)
        target = new_run_folder(recipe, f"{source.resolve().name}-fork-{at}")
        begun, note = _first_weights(journal, base, source, target, at=at, watcher=watcher)
        is_cut_anew = _cut(recipe) != _cut(recorded)
        write_recipe(target, recipe)
        fork_journal(
            source,
            target,
            at=at,
            until=until,
            meta=meta,
            event={"source": str(source.resolve()), "plan": at, "changed": meta["fork_changes"], **note},
            checkpoint=begun,
            mini_batches=_mini_batches(recipe) if is_cut_anew else None,
            now=time.time(),
        )
    watcher.on_note(
        f"fork of {source} after plan {at}, on its recorded samples up to plan {until}; changed: "
        f"{meta['fork_changes'] or 'nothing'}"
    )
    for line in _limits(recipe):
        watcher.on_note(line)
    with Journal.open(target) as fork_record:
        return run(prepared, fork_record, target, watcher)


def forked_recipe(recorded: Recipe, overrides: Sequence[str], *, beside: Path) -> Recipe:
    """The source's recipe with the settings of the fork; its folder goes beside the source's unless one is named."""
    for key, _ in split_overrides(overrides):
        known = key.partition(".")[0] in (*_OPEN, *_CLOSED)
        if known and (reason := why_not(key)):
            raise RecipeError(f"{key}: a fork cannot change it: {reason}. For another value start a new run")
    keys = {key for key, _ in split_overrides(overrides)}
    own = {"name": ""} if "run.name" not in keys else {}
    own |= {"dir": str(beside.resolve().parent)} if "run.dir" not in keys else {}
    recipe = apply_overrides(recorded, overrides)
    return recipe.model_copy(update={"run": recipe.run.model_copy(update=own)})


def _last_plan(journal: JournalReader, recipe: Recipe, *, at: int) -> int:
    """The last plan that the fork takes."""
    first, last = journal.forked_at, min(journal.last_plan, recipe.run.plans)
    if not first <= at <= journal.last_decided or at >= last:
        raise RecipeError(
            f"--at {at}: a fork trains on the plans after it, and {journal.run_dir} has recorded plans {first + 1} to "
            f"{journal.last_plan} (run.plans={recipe.run.plans}); give a plan from {first} to "
            f"{max(first, min(last - 1, journal.last_decided))}"
        )
    return last


def _meta(journal: JournalReader, recipe: Recipe, *, at: int, changes: Sequence[Difference]) -> dict[str, str]:
    """What the record of a fork says otherwise than that of its source."""
    source, changed = journal.meta, {change.key for change in changes}
    recorded = recorded_recipe(journal)
    until_fork = recorded.model_copy(update={"run": recorded.run.model_copy(update={"plans": at})})
    meta = {
        "run_id": uuid.uuid4().hex[:8],
        "lineage": str(int(source["lineage"]) + 1),
        "recipe": dump_toml(recipe),
        # Its samples are another policy's, whatever "auto" came to for the source.
        "correction": "off" if recipe.algorithm.correction == "off" else "on",
        "fingerprint_since": str(at),
        "forked_from": str(journal.run_dir.resolve()),
        "forked_run": source["run_id"],
        "forked_at": str(at),
        "forked_steps": str(total_steps(until_fork, source)),
        "fork_changes": "; ".join(str(change) for change in changes if change.key not in _OPEN_KEYS),
    }
    if "learner.dtype" in changed:
        meta["learner_dtype"] = with_dtypes(recipe).learner.dtype
    if recipe.learner.threads != "auto":
        meta["learner_threads"] = str(recipe.learner.threads)
    return meta


def _limits(recipe: Recipe) -> list[str]:
    """What a reader of a fork's numbers must know."""
    correction = (
        "algorithm.correction=off: nothing corrects for that; set algorithm.correction=on unless it is meant"
        if recipe.algorithm.correction == "off"
        else f"the truncated importance correction (cap {recipe.algorithm.correction_cap:g}) is on"
    )
    return [
        f"its samples come from the policy of the source, which the fork leaves more with every plan: {correction}. "
        "sampler/effective_sample_size says how much of a plan still counts; near 1 the fork tells what the source "
        "would have become, far below it does not"
    ]


def _first_weights(
    journal: JournalReader, base: Prepared, source: Path, target: Path, *, at: int, watcher: Observer
) -> tuple[Path | None, dict[str, str]]:
    """Puts the checkpoint of plan `at` into the fork: the source's own where it is kept, else trained again from the
    record. Returns its folder, and what the fork's first event says of it."""
    if at == 0:
        return None, {}
    folder = target / "checkpoints" / f"plan_{at:06d}"
    newest = newest_checkpoint(source, journal, at_most=at)
    if newest is not None and newest[0] == at:
        # Files of a checkpoint are never written again, only unlinked: both runs can have the same ones.
        try:
            write_beside(folder, lambda beside: _link_files(newest[1], beside))
            return folder, {}
        except FileNotFoundError:  # a source that goes on has pruned it meanwhile
            pass
    plan = session_plan(base, journal, target, epoch=1)
    with Session(
        plan, reward=None, on_event=lambda kind, detail: None, on_note=watcher.on_note, only_learner=True
    ) as session:
        learner = session.fresh_learner()
        after = load_newest(learner, run_dir=source, journal=journal, at_most=at)
        watcher.on_note(f"{source} keeps no checkpoint of plan {at}: plans {after + 1} to {at} are trained again")
        result = redo(
            learner,
            journal=journal,
            algorithm=base.algorithm,
            after=after,
            until=at,
            on_plan=lambda number: watcher.on_phase("redo", number, at),
        )
        learner.save_checkpoint(run_dir=str(target.absolute()), plan=at)
    if result.divergence is None:
        return folder, {}
    text = f"plan {result.divergence.plan} of the source, trained again, gave other weights than its record has"
    watcher.on_note(f"{text}: the fork begins with those of this machine. See `cauce replay {source}`")
    return folder, {"note": text}


def _link_files(source: Path, beside: Path) -> None:
    for file in source.rglob("*"):
        if file.is_file():
            copy = beside / file.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(file, copy)
            except OSError:  # another file system, or one without links
                shutil.copyfile(file, copy)


def _mini_batches(recipe: Recipe) -> MiniBatches:
    epochs, parts = _cut(recipe)
    return lambda tasks: make_plan(0, tasks, epochs=epochs, num_mini_batches=parts).mini_batches


def _cut(recipe: Recipe) -> tuple[int, int]:
    """How a plan is cut into optimizer steps."""
    return recipe.learner.epochs, recipe.learner.mini_batches
