"""What a run keeps of its recipe: the journal decides, "auto" is settled once, the files follow."""

import json
import tomllib
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from cauce.algorithms.table import resolve
from cauce.errors import RecipeError
from cauce.journal import Journal
from cauce.models.load import DTYPES, resolve_dtype
from cauce.recipe.dump import dump_toml
from cauce.recipe.load import load_resolved
from cauce.recipe.models import Recipe
from cauce.runtime.roles import LearnerWorker, RolloutWorker
from cauce.stages import rl
from cauce.stages.record import as_recorded, recipe_meta, recorded_recipe, with_dtypes
from tests.local_session import LocalSession, local_recipe, resume_locally, train_locally
from tests.tiny import tiny_model


def recorded(run: Path) -> Recipe:
    with Journal.read_only(run) as journal:
        return recorded_recipe(journal)


def edit(run: Path, old: str, new: str) -> None:
    text = (run / "recipe.toml").read_text()
    assert text.count(old) == 1
    (run / "recipe.toml").write_text(text.replace(old, new))


def test_the_record_holds_the_recipe_as_it_was_given(local: type[LocalSession], tiny: Path, tmp_path: Path) -> None:
    """As TOML: a date, as here in the arguments of a reward, has no form of its own in JSON."""
    shape = {"run__plans": 1, "reward__kwargs": "{since = 2026-01-31}", "learner__dtype": "auto"}
    run = tmp_path / "run"
    train_locally(tiny, run, **shape)
    assert recorded(run) == load_resolved(run) == local_recipe(tiny, run, **shape)
    assert recorded(run).reward.kwargs == {"since": date(2026, 1, 31)}


def test_a_semantic_key_edited_in_the_file_is_refused_and_no_replay_believes_it(
    local: type[LocalSession], tiny: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    train_locally(tiny, run, run__plans=2)
    edit(run, "lr = 0.01", "lr = 0.5")
    with pytest.raises(RecipeError, match=r"recipe\.toml says other than .* learner\.lr: 0\.01 -> 0\.5.* put these"):
        resume_locally(run, overrides=["run.plans=3"])
    assert rl.replay(run).divergent_plan is None
    edit(run, "lr = 0.5", "lr = 0.01")
    assert resume_locally(run, overrides=["run.plans=3"])["plans"] == 3


def test_runtime_keys_by_override_or_by_edit_are_kept_in_record_and_files(
    local: type[LocalSession], tiny: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    train_locally(tiny, run, run__plans=1)
    edit(run, "plans = 1", "plans = 2")
    resume_locally(run, overrides=["checkpoint.keep=5"])
    kept = recorded(run)
    assert (kept.run.plans, kept.checkpoint.keep) == (2, 5)
    assert tomllib.loads((run / "recipe.toml").read_text()) == tomllib.loads(dump_toml(kept))
    assert json.loads((run / "recipe.json").read_text()) == json.loads(kept.model_dump_json())
    assert list(run.glob("*.tmp")) == []


def test_what_auto_came_to_is_taken_over_by_resume_and_replay(
    local: type[LocalSession], tiny: Path, tmp_path: Path
) -> None:
    """On another host "auto" is another dtype and another number of threads; the weights depend on both."""
    seen: list[tuple[str, Any]] = []

    class Listening(LearnerWorker):
        def __init__(self, **kwargs: Any) -> None:
            seen.append((kwargs["settings"].dtype, kwargs["settings"].threads))
            super().__init__(**kwargs)

    class ListeningToo(RolloutWorker):
        def __init__(self, **kwargs: Any) -> None:
            seen.append((kwargs["dtype"], "engine"))
            super().__init__(**kwargs)

    local.learner, local.rollout, run = Listening, ListeningToo, tmp_path / "run"
    here = next(word for word, dtype in DTYPES.items() if dtype == resolve_dtype("auto"))
    train_locally(tiny, run, run__plans=1, learner__dtype="fp32", engine__dtype="auto")
    with Journal.open(run) as journal:
        assert journal.meta["engine_dtype"] == here
        assert journal.meta["learner_dtype"] == "fp32"
        assert int(journal.meta["learner_threads"]) >= 1
        # as if it had begun on a host with bf16 instructions and three cores
        journal.set_meta("engine_dtype", "bf16")
        journal.set_meta("learner_dtype", "bf16")
        journal.set_meta("correction", "on")
        journal.set_meta("learner_threads", "3")
    seen.clear()
    resume_locally(run, overrides=["run.plans=2", "rollout.actors=2"])
    assert set(seen) == {("bf16", "engine"), ("bf16", 3)}
    seen.clear()
    rl.replay(run)
    assert seen == [("bf16", 3)]
    assert recorded(run).engine.dtype == "auto"  # the recipe stays what was asked for


def test_a_recorded_correction_holds_whatever_auto_means_later(tiny: Path, tmp_path: Path) -> None:
    """A recipe with a cap of its own stays valid where the correction is off."""
    recipe = local_recipe(tiny, tmp_path / "run", algorithm__correction_cap=1.5)
    for needed, word in ((False, "off"), (True, "on")):
        algorithm = resolve(recipe.algorithm, max_tokens=4, correction_needed=needed)
        meta = recipe_meta(recipe, resolved=with_dtypes(recipe), algorithm=algorithm)
        assert meta["correction"] == word
        again = as_recorded(recipe, meta)
        assert again.learner.threads == "auto"  # until a learner has started
        for now in (False, True):
            assert resolve(again.algorithm, max_tokens=4, correction_needed=now) == algorithm


def test_a_run_whose_correction_is_off_resumes_with_its_cap(
    local: type[LocalSession], tiny: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    train_locally(tiny, run, run__plans=1, algorithm__correction_cap=1.5)
    assert resume_locally(run, overrides=["run.plans=2"])["status"] == "finished"
    assert recorded(run).algorithm.correction_cap == 1.5


def test_a_replay_from_another_model_is_refused(local: type[LocalSession], tmp_path: Path) -> None:
    run, model = tmp_path / "run", tiny_model(tmp_path / "model")
    train_locally(model, run, run__plans=1)
    tiny_model(model, seed=9)
    with pytest.raises(RecipeError, match=r"model\.path is not what this run began with"):
        rl.replay(run)
