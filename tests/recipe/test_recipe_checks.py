"""Contradictory and useless settings, what is missing, warnings, and the batch arithmetic."""

import pytest

from cauce.errors import RecipeError
from cauce.recipe import batch_arithmetic, check_recipe, load_recipe, recipe_warnings
from cauce.recipe.load import recipe_from_tables
from cauce.recipe.models import Recipe
from cauce.recipe.overrides import apply_pairs, split_overrides
from cauce.recipe.traits import TRAITS

GIVEN = ["model.path=M", "data.train=rows.jsonl", "reward.fn=score.py:score"]


def make(*overrides: str) -> Recipe:
    return recipe_from_tables(apply_pairs({}, split_overrides([*GIVEN, *overrides])))


def test_the_defaults_make_sense() -> None:
    check_recipe(Recipe())
    check_recipe(make())


REFUSED = [
    # settings, what the text holds: field, value, remedy
    (["stage=sft"], ["stage = 'sft'", "stage=rl"]),
    (["engine.backend=sglang"], ["engine.backend = 'sglang'", "native, vllm", "engine.backend=native"]),
    (
        ["engine.backend=vllm", "engine.deterministic=true"],
        ["engine.deterministic = True", "engine.deterministic=false", "engine.backend=native"],
    ),
    (["engine.python=/opt/vllm/bin/python"], ["engine.python = '/opt/vllm/bin/python'", "engine.backend=vllm"]),
    (["algorithm.name=gpro"], ["algorithm.name = 'gpro'", "did you mean grpo?"]),
    (["algorithm.name=Dr-GRPO"], ["algorithm.name", "did you mean dr_grpo?"]),
    (["algorithm.name=ppo"], ["algorithm.name = 'ppo'", "grpo, dr_grpo, dapo, rloo"]),
    (["journal.keep=since_checkpoint"], ["journal.keep = 'since_checkpoint'", "journal.keep=all"]),
    (["rollout.temperature=0"], ["rollout.temperature = 0.0", "rollout.temperature=1.0"]),
    (["rollout.top_p=0.9"], ["rollout.top_p = 0.9", "rollout.top_p=1.0"]),
    (["rollout.top_k=50"], ["rollout.top_k = 50", "rollout.top_k=0"]),
    (["rollout.stop=['']"], ["rollout.stop", "leave it out"]),
    (["rollout.group_size=1"], ["rollout.group_size = 1", "at least 2", "rollout.group_size=8"]),
    (["rollout.group_size=1", "algorithm.name=rloo"], ["rollout.group_size = 1: rloo"]),
    (["algorithm.clip_low=1"], ["algorithm.clip_low = 1.0", "algorithm.clip_low=0.2"]),
    (["algorithm.dual_clip=1.1"], ["algorithm.dual_clip = 1.1", "1.2", "algorithm.dual_clip=3.0"]),
    (["algorithm.dual_clip=3", "algorithm.clip_high=4"], ["algorithm.dual_clip = 3.0", "5"]),
    (["algorithm.aggregation_length=9"], ["algorithm.aggregation_length = 9", "token_sum_constant"]),
    (
        ["algorithm.name=dr_grpo", "algorithm.aggregation=token_mean", "algorithm.aggregation_length=9"],
        ["algorithm.aggregation_length = 9: token_mean"],
    ),
    (["algorithm.name=rloo", "algorithm.advantage_scale=group_std"], ["algorithm.advantage_scale", "grpo"]),
    (["algorithm.correction=off", "algorithm.correction_cap=3"], ["algorithm.correction_cap = 3.0", "auto"]),
    (["algorithm.name=dapo", "algorithm.kl_coef=0.1"], ["kl_coef = 0.1: dapo", "algorithm.kl_coef=0"]),
    (["algorithm.kl_in=reward"], ["algorithm.kl_in = 'reward'", "algorithm.kl_coef=0.01"]),
    (
        ["algorithm.kl_coef=0.1", "algorithm.kl_in=reward"],
        ["algorithm.kl_in = 'reward': grpo", "kl_in=loss", "advantage_scale=none", "rloo or dr_grpo"],
    ),
    (
        ["algorithm.name=dr_grpo", "algorithm.advantage_scale=group_std", "algorithm.kl_coef=0.1",
         "algorithm.kl_in=reward"],
        ["algorithm.kl_in = 'reward': dr_grpo"],
    ),
    (["algorithm.kl_estimator=k1"], ["algorithm.kl_estimator = 'k1'", "algorithm.kl_coef=0.01"]),
    (
        ["learner.tasks_per_plan=10", "learner.mini_batches=4"],
        ["learner.tasks_per_plan = 10", "learner.mini_batches = 4", "(2 left over)",
         "learner.mini_batches=2 or learner.tasks_per_plan=12"],
    ),
    (["learner.mini_batches=9"], ["(8 left over)", "learner.mini_batches=8 or learner.tasks_per_plan=9"]),
    (["weights.every=3", "buffer.max_staleness=1"], ["weights.every = 3", "max_staleness=2", "every=2"]),
    (["buffer.max_reuse=2"], ["buffer.max_reuse = 2", "buffer.max_staleness=1", "learner.epochs"]),
    (["buffer.max_reuse=4", "buffer.max_staleness=2"], ["buffer.max_reuse = 4", "buffer.max_staleness=3"]),
    (["buffer.sampling=random"], ["buffer.sampling = 'random'", "buffer.max_staleness=1", "in_order"]),
    (["reward.weights=[1, 2]"], ["reward.weights = [1.0, 2.0]", "2 for 1"]),
    (["reward.weights=[0]"], ["reward.weights = [0.0]", "every reward would be 0"]),
    (["reward.fn=['']"], ["reward.fn", "file.py:name"]),
    (["rollout.gpus=1.5"], ["rollout.gpus = 1.5", "rollout.gpus=1 or rollout.gpus=2"]),
    (["learner.gpus=2.5"], ["learner.gpus = 2.5"]),
    (["cluster.address=auto", "cluster.cpus=4"], ["cluster.cpus", "'auto'"]),
    (["cluster.address=auto", "rollout.object_store_memory=1GB"], ["rollout.object_store_memory"]),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "parts"), REFUSED, ids=[" ".join(case[0]) for case in REFUSED])
def test_settings_that_make_no_sense_are_refused(overrides: list[str], parts: list[str]) -> None:
    """C2, C4, F14."""
    with pytest.raises(RecipeError) as error:
        check_recipe(make(*overrides))
    assert "\n" not in str(error.value)  # one fault, one line
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ["learner.warmup_steps=40"],  # equal to the number of steps: no crash, a warning
        ["learner.warmup_steps=4000"],
        ["rollout.top_k=-1"],  # off, as other trainers write it
        ["algorithm.name=rloo", "algorithm.kl_coef=0.1", "algorithm.kl_in=reward", "algorithm.kl_estimator=k1"],
        ["algorithm.name=dr_grpo", "algorithm.kl_coef=0.1", "algorithm.kl_in=reward"],
        ["algorithm.advantage_scale=none", "algorithm.kl_coef=0.1", "algorithm.kl_in=reward"],
        ["algorithm.name=dr_grpo", "algorithm.aggregation_length=9"],
        ["algorithm.aggregation=token_sum_constant", "algorithm.aggregation_length=9"],
        ["algorithm.dual_clip=3"],
        ["weights.every=3", "buffer.max_staleness=2"],
        ["buffer.max_reuse=3", "buffer.max_staleness=2", "buffer.sampling=random"],
        ["learner.tasks_per_plan=12", "learner.mini_batches=4", "learner.epochs=3"],
        ["rollout.gpus=0.25"],
        ["rollout.gpus=2"],
        ["cluster.cpus=4", "rollout.object_store_memory=1GB"],
        ["reward.fn=[a.py:f, b.py:g]", "reward.weights=[1, -0.5]"],
        ["algorithm.name=rloo", "algorithm.advantage_scale=none"],
    ],
)
def test_settings_that_make_sense_are_accepted(overrides: list[str]) -> None:
    check_recipe(make(*overrides))


@pytest.mark.parametrize("name", list(TRAITS))
def test_a_kl_coefficient_is_refused_exactly_where_it_is_ignored(name: str) -> None:
    """A13."""
    recipe = make(f"algorithm.name={name}", "algorithm.kl_coef=0.5")
    if TRAITS[name].accepts_kl:
        check_recipe(recipe)
    else:
        with pytest.raises(RecipeError, match=rf"algorithm\.kl_coef = 0\.5: {name} has no KL term"):
            check_recipe(recipe)


def test_weights_are_not_counted_against_functions_given_in_python() -> None:
    check_recipe(recipe_from_tables({"reward": {"weights": [1.0, 2.0]}}))


def test_all_faults_are_reported_at_once() -> None:
    with pytest.raises(RecipeError) as error:
        check_recipe(make("rollout.temperature=0", "learner.mini_batches=3", "weights.every=2"))
    assert len(str(error.value).splitlines()) == 3


def test_loading_checks() -> None:
    with pytest.raises(RecipeError, match=r"rollout\.temperature"):
        load_recipe("grpo", [*GIVEN, "rollout.temperature=0"])


# Warnings


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (["learner.lr=4e07"], "learner.lr = 40000000.0"),
        (["learner.lr=0"], "learner.lr = 0.0"),
        (["rollout.temperature=7"], "rollout.temperature = 7.0"),
        (["algorithm.clip_high=20"], "algorithm.clip_high = 20.0"),
        (["learner.warmup_steps=40"], "40 optimizer steps"),
        (["data.test=rows.jsonl"], "held-out"),
        (["rollout.actors=9"], "some actors always wait"),
    ],
)
def test_unlikely_settings_are_warned_about(overrides: list[str], part: str) -> None:
    """J3."""
    lines = recipe_warnings(make(*overrides))
    assert len(lines) == 1
    assert part in lines[0]


def test_usual_settings_are_not_warned_about() -> None:
    assert recipe_warnings(make()) == []


# Batch arithmetic


def test_batch_arithmetic() -> None:
    recipe = make(
        "run.plans=5", "learner.tasks_per_plan=12", "learner.mini_batches=3", "learner.epochs=2",
        "rollout.group_size=4", "rollout.max_tokens=100",
    )  # fmt: skip
    assert dict(batch_arithmetic(recipe)) == {
        "prompts per plan": 12,
        "completions per prompt": 4,
        "completions per plan": 48,
        "new tokens per plan, at most": 4800,
        "prompts per optimizer step": 4,
        "completions per optimizer step": 16,
        "optimizer steps per plan": 6,
        "plans": 5,
        "optimizer steps in total": 30,
        "prompts sampled in total": 60,
        "completions sampled in total": 240,
    }


def test_groups_that_are_used_again_are_not_sampled_again() -> None:
    recipe = make("run.plans=5", "buffer.max_reuse=3", "buffer.max_staleness=2")
    numbers = dict(batch_arithmetic(recipe))
    assert numbers["prompts sampled in total, at least"] == 14  # 5 x 8 uses, 3 of each at most
    assert numbers["completions sampled in total, at least"] == 14 * 8
