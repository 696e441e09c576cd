"""`cauce plan`: its numbers are those of the run, and what it says fits does."""

from dataclasses import replace
from pathlib import Path

import pytest

from cauce.journal import Journal
from cauce.recipe.models import ClusterSettings, LearnerSettings, ModelSettings, Recipe, RolloutSettings
from cauce.stages.estimate import memory_by_role, read_size
from cauce.stages.lengths import PromptLengths
from cauce.stages.plan import MOST_TRIED, plan, plan_for, render
from tests.local_session import LocalSession, local_recipe, train_locally

GIB = 2**30
LENGTHS = PromptLengths(mean=40, longest=100, source="by hand")


def test_the_batch_numbers_are_those_of_the_run(local: type[LocalSession], tiny: Path, tmp_path: Path) -> None:
    """J4."""
    shape = {"learner__mini_batches": 2, "learner__epochs": 2, "learner__tasks_per_plan": 4, "run__plans": 2}
    train_locally(tiny, tmp_path / "run", **shape)
    batch = dict(plan(local_recipe(tiny, tmp_path / "run", **shape)).batch)
    with Journal.read_only(tmp_path / "run") as journal:
        records = journal.plans()
        groups = [journal.group(task) for record in records for task in record.plan.tasks]
    assert batch["plans"] == len(records)
    assert batch["prompts per plan"] == len(records[0].plan.tasks)
    assert batch["completions per prompt"] == len(groups[0].samples)
    assert batch["prompts per optimizer step"] == len(records[0].plan.mini_batches[0])
    assert batch["optimizer steps per plan"] == len(records[0].plan.mini_batches)
    assert batch["optimizer steps in total"] == records[-1].metrics["optim/step"]
    assert batch["prompts sampled in total"] == len(groups)
    assert batch["completions sampled in total"] == sum(len(group.samples) for group in groups)


def machine(folder: Path, *, available: int) -> Path:
    """A system with this much memory."""
    (folder / "proc").mkdir(parents=True)
    kib = available // 1024
    (folder / "proc/meminfo").write_text(f"MemTotal: {kib} kB\nMemAvailable: {kib} kB\n")
    return folder


@pytest.mark.parametrize("available", [3, 8, 64])
def test_the_most_that_fits_fits_and_one_more_does_not(tiny: Path, tmp_path: Path, available: int) -> None:
    many = LearnerSettings(tasks_per_plan=10**6)  # so that memory is what limits
    recipe, found = Recipe(model=ModelSettings(path=str(tiny)), learner=many), read_size(tiny)
    assert found is not None
    size = replace(found, context=None)
    report = plan_for(recipe, size, LENGTHS, root=machine(tmp_path, available=available * GIB))
    assert (report.available, report.total < report.available) == (available * GIB, True)
    for fit in report.fits:
        section, name = fit.key.split(".")
        for value, is_within in ((fit.most, True), (fit.most + 1, False)):
            changed = getattr(recipe, section).model_copy(update={name: value})
            needed = memory_by_role(recipe.model_copy(update={section: changed}), size, LENGTHS)
            if value <= MOST_TRIED and fit.most < MOST_TRIED:
                assert (sum(each for _, each in needed) <= report.available) == is_within, fit
    assert any(fit.most < MOST_TRIED for fit in report.fits)


def test_what_does_not_fit_is_said(tiny: Path, tmp_path: Path) -> None:
    recipe, size = Recipe(model=ModelSettings(path=str(tiny))), read_size(tiny)
    report = plan_for(recipe, size, LENGTHS, root=machine(tmp_path, available=GIB))
    text = render(report)
    assert "! does not fit" in text
    assert "rollout.actors" in text
    assert "none" in text
    crowded = Recipe(
        rollout=RolloutSettings(cpus=3, actors=4), learner=LearnerSettings(cpus=2), cluster=ClusterSettings(cpus=4)
    )
    assert "no room for a rollout worker" in render(plan(crowded))


def test_more_than_has_an_effect_is_not_offered(tiny: Path, tmp_path: Path) -> None:
    recipe, size = Recipe(model=ModelSettings(path=str(tiny))), read_size(tiny)
    report = plan_for(recipe, size, LENGTHS, root=machine(tmp_path, available=64 * GIB))
    most = {fit.key: fit.most for fit in report.fits}
    assert (most["engine.slots"], most["rollout.max_tokens"]) == (64, 255)


def test_without_a_model_only_memory_is_left_out() -> None:
    text = render(plan(Recipe()))
    assert "prompts per plan" in text
    assert "learner  1 x" in text
    assert "not estimated: the model's config is not at hand" in text
