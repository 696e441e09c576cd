"""Files, packaged recipes and command lines to recipes, and back."""

import logging
import tomllib
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cauce.errors import RecipeError
from cauce.recipe import (
    apply_overrides,
    dump_toml,
    load_recipe,
    load_resolved,
    packaged_names,
    recipe_name,
    semantic_differences,
)
from cauce.recipe.fields import choices, literal_words
from cauce.recipe.load import recipe_from_tables
from cauce.recipe.models import SECTIONS, AlgorithmSettings, EvalSettings, Recipe, RewardSettings
from cauce.recipe.overrides import parse_value

GIVEN = ["model.path=M", "data.train=rows.jsonl", "reward.fn=score.py:score"]


def load(*overrides: str) -> Recipe:
    return load_recipe("grpo", [*GIVEN, *overrides])


# Packaged recipes and files


def test_the_packaged_recipes() -> None:
    assert packaged_names() == ["dapo", "dr_grpo", "grpo", "quickstart", "rloo"]


@pytest.mark.parametrize("name", ["dapo", "dr_grpo", "grpo", "rloo"])
def test_an_algorithm_recipe_needs_only_model_data_and_reward(name: str) -> None:
    recipe = load_recipe(name, GIVEN)
    assert recipe.algorithm.name == name
    assert (recipe.model.path, recipe.data.train, recipe.reward.fn) == ("M", "rows.jsonl", "score.py:score")


def test_the_quickstart_is_complete() -> None:
    recipe = load_recipe("quickstart")
    assert recipe.model.path == "SmolLM2-135M-Instruct"
    assert (recipe.data.train, recipe.data.test) == ("builtin:addition/train", "builtin:addition/test")
    assert recipe.reward.fn == "cauce.rewards.verifiers:last_number"
    assert recipe.algorithm.name == "grpo"


@pytest.mark.parametrize("name", ["dapo", "dr_grpo", "grpo", "quickstart", "rloo"])
def test_packaged_recipes_load_without_a_warning(name: str, caplog: pytest.LogCaptureFixture) -> None:
    load_recipe(name, [] if name == "quickstart" else GIVEN)
    assert not caplog.records


def test_a_missing_model_data_and_reward_are_named_at_once() -> None:
    with pytest.raises(RecipeError) as error:
        load_recipe("dapo")
    text = str(error.value)
    assert all(key in text for key in ("model.path", "data.train", "reward.fn"))
    assert "cauce train dapo model.path=" in text
    with pytest.raises(RecipeError) as error:
        load_recipe("dapo", GIVEN[:2])
    assert "reward.fn is missing" in str(error.value)
    assert "model.path is missing" not in str(error.value)


def test_what_python_supplies_may_be_left_out() -> None:
    recipe = load_recipe("grpo", ["model.path=M"], given=("data.train", "reward.fn"))
    assert recipe.data.train == ""


def test_no_recipe_starts_from_the_defaults() -> None:
    assert load_recipe(None, GIVEN).learner == Recipe().learner


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_text('[model]\npath = "M"\n[data]\ntrain = "t"\n[reward]\nfn = ["a.py:f", "a.py:g"]\n', "utf-8")
    recipe = load_recipe(str(path), ["learner.lr=2e-5"])
    assert recipe.reward.names == ["a.py:f", "a.py:g"]
    assert recipe.learner.lr == 2e-5
    assert recipe_name(str(path)) == "my"


def test_a_recipe_that_is_not_there_names_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"quickstrat.*dapo, dr_grpo.*did you mean 'quickstart'"):
        load_recipe("quickstrat")
    with pytest.raises(RecipeError, match="neither a file"):
        load_recipe(str(tmp_path / "none.toml"))
    with pytest.raises(RecipeError, match="is a folder"):
        load_recipe(str(tmp_path))


def test_a_file_that_is_not_toml_says_where(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text("[model]\npath = my/model\n", "utf-8")
    with pytest.raises(RecipeError, match=r"bad\.toml is not a TOML file.*line 2.*texts need quotes"):
        load_recipe(str(path))


def test_unknown_keys_of_a_file_are_all_named(tmp_path: Path) -> None:
    """J1."""
    path = tmp_path / "old.toml"
    path.write_text("[learner]\nlrate = 1\n[trainer]\ntotal_epochs = 3\n[data.foo]\nbar = 1\n", "utf-8")
    with pytest.raises(RecipeError) as error:
        load_recipe(str(path))
    text = str(error.value)
    assert "learner.lrate" in text
    assert "trainer.total_epochs is run.plans" in text
    assert "data.foo.bar" in text


def test_a_section_that_is_a_value_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "flat.toml"
    path.write_text('model = "M"\n', "utf-8")
    with pytest.raises(RecipeError, match=r"model is a section; write its settings under \[model\]"):
        load_recipe(str(path))


# Overrides


@pytest.mark.parametrize(
    "arguments",
    [
        ["learner.lr=1e-4"],
        ["--learner.lr", "1e-4"],
        ["--learner.lr=1e-4"],
        ["learner.lr=1.0e-4"],
        ['learner.lr="1e-4"'],
        ["learner.lr='1e-4'"],
        ["learner.lr=1", "learner.lr=1e-4"],
    ],
)
def test_ways_to_write_a_setting(arguments: list[str]) -> None:
    """J3."""
    assert load(*arguments).learner.lr == 1e-4


def test_dashes_are_taken_for_underscores() -> None:
    assert load("--learner.tasks-per-plan", "4").learner.tasks_per_plan == 4


@pytest.mark.parametrize("key", ["--learner.lr", "learner.lr", "M"])
def test_a_setting_without_a_value_is_refused(key: str) -> None:
    with pytest.raises(RecipeError, match=r"section\.key=value"):
        load(key)


@pytest.mark.parametrize(
    ("override", "section", "name", "value"),
    [
        ("model.path=a=b", "model", "path", "a=b"),
        ("model.path=7", "model", "path", "7"),
        ("run.name=2026-01-02", "run", "name", "2026-01-02"),
        ("run.name=true", "run", "name", "true"),
        ("run.name=", "run", "name", ""),
        ('data.system="Say \\"hi\\"\\n"', "data", "system", 'Say "hi"\n'),
        ("data.shuffle=False", "data", "shuffle", False),
        ("data.shuffle=false", "data", "shuffle", False),
        ("rollout.stop=Q:", "rollout", "stop", ["Q:"]),
        ('rollout.stop=["\\n", "Q:"]', "rollout", "stop", ["\n", "Q:"]),
        ("rollout.stop=[1, 2]", "rollout", "stop", ["1", "2"]),
        ("reward.fn=[a.py:f, b.py:g]", "reward", "fn", ["a.py:f", "b.py:g"]),
        ("rollout.memory=2GB", "rollout", "memory", 2 * 10**9),
        ("rollout.cpus=auto", "rollout", "cpus", "auto"),
        ("eval.max_tokens=none", "eval", "max_tokens", None),
        ("algorithm.clip_high=none", "algorithm", "clip_high", None),
        ("algorithm.advantage_scale=none", "algorithm", "advantage_scale", "none"),
        ("reward.kwargs={a = 1, b = 'x'}", "reward", "kwargs", {"a": 1, "b": "x"}),
        ("reward.kwargs.scale=2.5", "reward", "kwargs", {"scale": 2.5}),
        ("data.columns.answer=gold", "data", "columns", {"answer": "gold"}),
    ],
)
def test_values_of_overrides(override: str, section: str, name: str, value: object) -> None:
    assert getattr(getattr(load(override), section), name) == value


def test_one_weight_needs_no_brackets() -> None:
    assert load("reward.weights=2").reward.weights == [2.0]


def test_tables_are_merged_key_by_key() -> None:
    recipe = load("reward.kwargs.a=1", "reward.kwargs.b=2")
    assert apply_overrides(recipe, ["reward.kwargs.b=3"]).reward.kwargs == {"a": 1, "b": 3}
    assert recipe.reward.kwargs == {"a": 1, "b": 2}


def test_values_cannot_smuggle_in_other_settings() -> None:
    assert parse_value("1\nother = 2") == "1\nother = 2"


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        (
            "rollout.group_size=many",
            ["rollout.group_size = 'many'", "a whole number of at least 1", "default 8"],
        ),
        ("learner.lr=-1e-5", ["learner.lr = -1e-05", "a number of at least 0", "default 1e-06"]),
        ("learner.epochs=true", ["learner.epochs", "true", "a whole number"]),
        ("learner.schedule=cosin", ["learner.schedule = 'cosin'", '"constant", "linear" or "cosine"']),
        ("checkpoint.keep=0", ["checkpoint.keep = 0", "at least 1", "default 2"]),
        ("buffer.max_reuse=0", ["buffer.max_reuse = 0", "at least 1"]),
        ("algorithm.aggregation=mean", ["algorithm.aggregation = 'mean'", '"token_mean"', '"none"']),
        ("algorithm.dual_clip=0.5", ["algorithm.dual_clip = 0.5", "above 1"]),
        ("data.columns=x", ["data.columns = 'x'", "a table"]),
        ("data.columns.answer=[1]", ["data.columns", "a table"]),
        ("rollout.memory=lots", ["rollout.memory = 'lots'", "such as 2GB"]),
        ("reward.weights=[a]", ["reward.weights", "a list of numbers"]),
    ],
)
def test_a_value_of_the_wrong_kind_names_key_value_and_remedy(override: str, parts: list[str]) -> None:
    with pytest.raises(RecipeError) as error:
        load(override)
    for part in parts:
        assert part in str(error.value)
    assert "pydantic" not in str(error.value)


def test_all_wrong_values_are_reported_at_once() -> None:
    with pytest.raises(RecipeError) as error:
        load("learner.lr=x", "rollout.actors=0", "stage=''")
    assert "learner.lr" in str(error.value)
    assert "rollout.actors" in str(error.value)
    assert "stage" in str(error.value)


def test_a_learning_rate_far_outside_the_usual_range_is_warned_about(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """J3."""
    with caplog.at_level(logging.WARNING):
        recipe = load("learner.lr=4e07")
    assert recipe.learner.lr == 4e7
    assert "learner.lr = 40000000.0 is far outside the usual range" in caplog.text


def test_overrides_of_a_recipe_are_checked_again() -> None:
    with pytest.raises(RecipeError, match=r"rollout\.temperature"):
        apply_overrides(load(), ["rollout.temperature=0"])


# Writing and resuming


def test_a_resolved_recipe_is_read_back(tmp_path: Path) -> None:
    recipe = load('reward.kwargs.text=\u00e9\U0001f40e\u007f"\\', "algorithm.clip_low=0.1")
    (tmp_path / "recipe.toml").write_text(dump_toml(recipe), "utf-8")
    assert load_resolved(tmp_path) == recipe
    assert load_resolved(str(tmp_path)) == recipe
    with pytest.raises(RecipeError, match="not a run's folder"):
        load_resolved(tmp_path / "other")


def test_a_dump_writes_every_setting_and_says_what_none_means() -> None:
    text = dump_toml(Recipe())
    tables = tomllib.loads(text)
    for section, model in SECTIONS.items():
        assert set(tables[section]) == set(model.model_fields)
    assert 'max_tokens = "none"  # rollout.max_tokens' in text
    assert 'advantage_scale = ""  # the algorithm\'s own' in text


def test_none_and_the_choice_none_are_told_apart_in_a_dump() -> None:
    recipe = Recipe(algorithm=AlgorithmSettings(advantage_scale="none"), eval=EvalSettings(max_tokens=None))
    again = recipe_from_tables(tomllib.loads(dump_toml(recipe)))
    assert again.algorithm.advantage_scale == "none"
    assert again.eval.max_tokens is None


def test_a_value_that_toml_cannot_hold_is_named() -> None:
    recipe = Recipe(reward=RewardSettings(kwargs={"inner": {"f": None}}))
    with pytest.raises(RecipeError, match=r"reward\.kwargs\.inner\.f = None"):
        dump_toml(recipe)


def test_semantic_differences_leave_runtime_settings_out() -> None:
    old = load()
    new = apply_overrides(old, ["rollout.actors=3", "learner.lr=3e-6", "run.plans=80", "rollout.group_size=4"])
    differences = semantic_differences(old, new)
    assert [difference.key for difference in differences] == ["rollout.group_size", "learner.lr"]
    assert str(differences[1]) == "learner.lr: 1e-06 -> 3e-06"
    assert semantic_differences(old, apply_overrides(old, ["checkpoint.keep=5"])) == []
    assert semantic_differences(old, old.model_copy(update={"stage": "sft"}))[0].key == "stage"


TEXT = st.text(max_size=6)
NUMBER = st.floats(allow_nan=False, allow_infinity=False)
PLAIN = st.recursive(
    TEXT | st.booleans() | st.integers() | NUMBER | st.dates() | st.datetimes(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=3,
)


def bounds(field: Any) -> dict[str, Any]:
    names = ("ge", "gt", "le", "lt", "min_length")
    return {name: getattr(note, name) for note in field.metadata for name in names
            if hasattr(note, name)}  # fmt: skip


def values_of(field: Any) -> st.SearchStrategy[Any]:
    """Any value that a setting accepts."""
    limits = bounds(field)
    low, high = limits.get("ge", limits.get("gt")), limits.get("le", limits.get("lt"))
    # Members of a union carry their ranges inside; 1 and 1.5 satisfy all of them.
    inside = low if low is not None else (1 if literal_words(field.annotation) else None)
    kinds = {
        int: st.integers(min_value=inside, max_value=high if high is not None else 2**40),
        float: st.floats(
            min_value=inside, max_value=high, exclude_min="gt" in limits, exclude_max="lt" in limits,
            allow_nan=False, allow_infinity=False,
        ),
        bool: st.booleans(),
        str: st.text(min_size=limits.get("min_length", 0), max_size=6),
        type(None): st.none(),
        list[str]: st.lists(TEXT, max_size=3),
        list[float]: st.lists(NUMBER, max_size=3),
    }  # fmt: skip
    options = []
    for part in choices(field.annotation):
        if get_origin(part) is Literal:
            options.append(st.sampled_from(get_args(part)))
        elif get_origin(part) is dict:
            options.append(st.dictionaries(TEXT, TEXT if get_args(part)[1] is str else PLAIN, max_size=3))
        else:
            options.append(kinds[part])
    return st.one_of(options)


RECIPES = st.fixed_dictionaries(
    {"stage": st.text(min_size=1, max_size=4)}
    | {
        section: st.fixed_dictionaries({name: values_of(field) for name, field in model.model_fields.items()})
        for section, model in SECTIONS.items()
    }
)


@given(tables=RECIPES)
@settings(max_examples=50, deadline=None)
def test_any_recipe_is_read_back_as_it_was_written(tables: dict[str, Any]) -> None:
    recipe = Recipe.model_validate(tables)
    assert recipe_from_tables(tomllib.loads(dump_toml(recipe))) == recipe
