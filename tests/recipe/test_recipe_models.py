"""The models: ranges, words, byte sizes, and what importing them costs."""

import subprocess
import sys
from typing import Any

import pytest
from pydantic import ValidationError

from cauce.recipe.fields import Section, change_of, expected, none_meaning, parse_bytes
from cauce.recipe.models import (
    SECTIONS,
    AlgorithmSettings,
    EvalSettings,
    LearnerSettings,
    Recipe,
    RewardSettings,
    RolloutSettings,
)

RUNTIME = {
    "run.dir", "run.name", "run.plans",
    "reward.timeout_s", "reward.max_failure_rate", "reward.workers",
    "rollout.actors", "rollout.cpus", "rollout.gpus", "rollout.memory", "rollout.object_store_memory",
    "engine.compiled", "engine.python", "engine.threads", "learner.cpus", "learner.gpus", "learner.memory",
    "eval.every", "eval.max_tokens", "eval.at_start",
    "checkpoint.max_redo_s", "checkpoint.every", "checkpoint.keep", "journal.locking",
    "cluster.address", "cluster.cpus", "cluster.dashboard", "cluster.namespace",
    "logging.tensorboard",
    "logging.trace", "logging.live",
}  # fmt: skip


def test_importing_the_recipe_layer_imports_no_heavy_package() -> None:
    code = (
        "import sys, cauce.recipe, cauce.recipe.document;"
        "print([m for m in ('torch', 'ray', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_every_setting_says_what_it_means_and_whether_it_may_change() -> None:
    runtime = set()
    for section, model in SECTIONS.items():
        assert model.__doc__
        for name, field in model.model_fields.items():
            text = str(field.description)
            assert len(text) > 10, (section, name)
            assert "\n" not in text
            assert "|" not in text + expected(field)  # they go into tables
            if change_of(field) == "runtime":
                runtime.add(f"{section}.{name}")
            assert bool(none_meaning(field)) == (field.default is None), (section, name)
    assert runtime == RUNTIME


def test_sections_are_the_fields_of_the_recipe() -> None:
    assert {"stage", *SECTIONS} == set(Recipe.model_fields)
    for section, model in SECTIONS.items():
        assert type(getattr(Recipe(), section)) is model


def test_a_recipe_is_frozen() -> None:
    with pytest.raises(ValidationError):
        Recipe().learner.lr = 1.0


@pytest.mark.parametrize("text", ["1e-4", "1.0e-4", 1e-4, " 0.0001 "])
def test_floats_may_be_text(text: object) -> None:
    """J3."""
    assert LearnerSettings(lr=text).lr == 1e-4


@pytest.mark.parametrize(
    ("model", "values"),
    [
        (LearnerSettings, {"lr": -1e-6}),
        (LearnerSettings, {"lr": float("nan")}),
        (LearnerSettings, {"lr": float("inf")}),
        (LearnerSettings, {"lr": True}),
        (LearnerSettings, {"epochs": True}),
        (LearnerSettings, {"epochs": 1.5}),
        (LearnerSettings, {"beta2": 1.0}),
        (LearnerSettings, {"threads": 0}),
        (LearnerSettings, {"threads": "many"}),
        (LearnerSettings, {"unknown": 1}),
        (RolloutSettings, {"memory": "lots"}),
        (RolloutSettings, {"cpus": 0}),
        (RolloutSettings, {"temperature": -0.1}),
        (AlgorithmSettings, {"dual_clip": 1.0}),
        (AlgorithmSettings, {"clip_low": 0.0}),
        (RewardSettings, {"max_failure_rate": 1.1}),
        (EvalSettings, {"max_tokens": 0}),
    ],
)
def test_values_out_of_range_are_refused(model: type[Section], values: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        model(**values)


@pytest.mark.parametrize("word", ["none", "None", "", None])
def test_an_absent_value_can_be_written(word: str | None) -> None:
    assert EvalSettings(max_tokens=word).max_tokens is None
    assert AlgorithmSettings(clip_low=word, aggregation=word).clip_low is None


def test_none_is_a_choice_of_its_own_for_the_advantage_scale() -> None:
    assert AlgorithmSettings(advantage_scale="none").advantage_scale == "none"
    assert AlgorithmSettings(advantage_scale="").advantage_scale is None


@pytest.mark.parametrize(
    ("value", "number"),
    [("2GB", 2 * 10**9), ("2 GiB", 2**31), ("512MiB", 2**29), ("1.5g", 1_500_000_000), ("100", 100), (7, 7)],
)
def test_bytes_take_units(value: object, number: int) -> None:
    assert parse_bytes(value) == number
    assert RolloutSettings(memory=value).memory == number


def test_auto_is_kept() -> None:
    settings = RolloutSettings(memory="auto", cpus="auto")
    assert (settings.memory, settings.cpus) == ("auto", "auto")


def test_one_text_stands_for_a_list_of_one() -> None:
    assert RolloutSettings(stop="\n").stop == ["\n"]


def test_reward_functions_as_a_list() -> None:
    assert RewardSettings().names == []
    assert RewardSettings(fn="a.py:f").names == ["a.py:f"]
    assert RewardSettings(fn=["a.py:f", "b.py:g"]).names == ["a.py:f", "b.py:g"]


def test_defaults_are_not_shared_between_recipes() -> None:
    assert RewardSettings().kwargs is not RewardSettings().kwargs


def test_what_a_setting_accepts_in_words() -> None:
    fields = LearnerSettings.model_fields
    assert expected(fields["lr"]) == "a number of at least 0"
    assert expected(fields["beta1"]) == "a number of at least 0 below 1"
    assert expected(fields["threads"]) == 'a whole number of at least 1 or "auto"'
    assert expected(fields["schedule"]) == '"constant", "linear" or "cosine"'
    assert expected(RolloutSettings.model_fields["memory"]) == 'a whole number of at least 1 or "auto"'
    assert expected(RewardSettings.model_fields["fn"]) == "text or a list of texts"
    assert expected(AlgorithmSettings.model_fields["clip_low"]) == 'a number above 0 or "none"'
