"""What is said of settings that do not exist."""

import pytest

from cauce.errors import RecipeError
from cauce.recipe import load_recipe
from cauce.recipe.foreign import FOREIGN
from cauce.recipe.names import KNOWN_KEYS, unknown_key_text


@pytest.mark.parametrize(
    ("typed", "ours"),
    [
        ("learner.lrr", "learner.lr"),
        ("learner.weight_deacy", "learner.weight_decay"),
        ("lerner.lr", "learner.lr"),
        ("rollout.lr", "learner.lr"),
        ("rollot.tempreature", "rollout.temperature"),
        ("buffer.staleness", "buffer.max_staleness"),
        ("group_size", "rollout.group_size"),
        ("lr", "learner.lr"),
        ("evaluation.tasks", "eval.tasks"),
    ],
)
def test_the_nearest_name_is_offered(typed: str, ours: str) -> None:
    """J1."""
    assert f"did you mean {ours}?" in unknown_key_text(typed)


def test_a_name_that_two_sections_have_offers_both() -> None:
    assert "rollout.max_tokens or eval.max_tokens" in unknown_key_text("max_tokens")


@pytest.mark.parametrize(
    ("typed", "ours"),
    [
        ("num_generations", "rollout.group_size"),
        ("algorithm.num_generations", "rollout.group_size"),
        ("max_completion_length", "rollout.max_tokens"),
        ("beta", "algorithm.kl_coef"),
        ("epsilon", "algorithm.clip_low and algorithm.clip_high"),
        ("epsilon_high", "algorithm.clip_high"),
        ("learning_rate", "learner.lr"),
        ("learner.learning_rate", "learner.lr"),
        ("per_device_train_batch_size", "learner.tasks_per_plan"),
        ("num_train_epochs", "run.plans"),
        ("save_steps", "checkpoint.every"),
        ("scale_rewards", "algorithm.advantage_scale"),
        ("loss_type", "algorithm.name and algorithm.aggregation"),
        ("rollout.n", "rollout.group_size"),
        ("actor_rollout_ref.rollout.n", "rollout.group_size"),
        ("data.train_batch_size", "learner.tasks_per_plan"),
        ("actor.clip_ratio_low", "algorithm.clip_low"),
        ("kl_loss_coef", "algorithm.kl_coef"),
        ("trainer.total_epochs", "run.plans"),
        ("trainer.n_gpus_per_node", "rollout.actors, rollout.gpus and learner.gpus"),
        ("data.max_response_length", "rollout.max_tokens"),
        ("n_samples_per_prompt", "rollout.group_size"),
        ("rollout_batch_size", "learner.tasks_per_plan"),
        ("init_kl_coef", "algorithm.kl_coef"),
        ("groups_per_batch", "learner.tasks_per_plan"),
        ("kl_penalty_coef", "algorithm.kl_coef"),
        ("num_generation", "rollout.group_size"),  # a slip in a name from elsewhere
    ],
)
def test_foreign_names_point_to_ours(typed: str, ours: str) -> None:
    assert f" is {ours} here" in unknown_key_text(typed)


def test_a_name_with_several_meanings_says_what_differs() -> None:
    text = unknown_key_text("train_batch_size")
    assert "counts prompts in verl" in text
    assert "TRL counts completions" in text
    assert "OpenRLHF counts completions" in text
    text = unknown_key_text("data.train_batch_size")  # only verl's has this section
    assert "counts prompts in verl" in text
    assert "depends on where" not in text


def test_a_foreign_setting_without_a_counterpart_says_so() -> None:
    assert "TRL's entropy_coef has no counterpart here: no entropy bonus" in unknown_key_text("entropy_coef")


def test_a_name_like_nothing_lists_the_sections() -> None:
    text = unknown_key_text("zzz.qqq")
    assert "did you mean" not in text
    assert "learner" in text


def test_a_section_is_not_a_setting() -> None:
    assert "data is a section" in unknown_key_text("data")


@pytest.mark.parametrize("arguments", [["num_generations=8"], ["--num_generations", "8"], ["rollout.n=8"]])
def test_the_command_line_says_it(arguments: list[str]) -> None:
    with pytest.raises(RecipeError, match=r"is rollout\.group_size here"):
        load_recipe("grpo", arguments)


def test_inner_keys_exist_only_in_tables() -> None:
    with pytest.raises(RecipeError, match=r"learner\.lr\.x"):
        load_recipe("grpo", ["learner.lr.x=1"])


@pytest.mark.parametrize("tool", list(FOREIGN))
def test_the_foreign_table_points_to_settings_that_exist(tool: str) -> None:
    names = [name for row in FOREIGN[tool] for name in row.names]
    assert len(names) == len(set(names))
    for row in FOREIGN[tool]:
        assert set(row.ours) <= set(KNOWN_KEYS), row
        assert row.ours or row.note, row
        assert "|" not in row.note


def test_every_foreign_name_is_answered_with_its_own_row() -> None:
    for rows in FOREIGN.values():
        for row in rows:
            for name in row.names:
                if name in KNOWN_KEYS or name.rpartition(".")[2] in {key.rpartition(".")[2] for key in KNOWN_KEYS}:
                    continue  # ours as it stands, or offered by its last part
                text = unknown_key_text(name)
                assert (row.ours[0] if row.ours else row.note) in text, name
