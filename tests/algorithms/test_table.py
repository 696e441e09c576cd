"""The literal table, and what a recipe may change of a row."""

import subprocess
import sys

import pytest

from cauce.errors import RecipeError
from cauce.recipe.traits import TRAITS
from tests.algorithms.cases import MAX_TOKENS, algorithm


def test_rows_are_those_of_the_papers() -> None:
    rows = {
        name: (row.advantage, row.aggregation, row.clip_low, row.clip_high, row.arxiv) for name, row in TRAITS.items()
    }
    assert rows == {
        "grpo": ("group_std", "sequence_mean_token_mean", 0.2, 0.2, "2402.03300"),
        "dr_grpo": ("group_mean", "token_sum_constant", 0.2, 0.2, "2503.20783"),
        "dapo": ("group_std", "token_mean", 0.2, 0.28, "2503.14476"),
        "rloo": ("leave_one_out", "sequence_mean_token_sum", 0.2, 0.2, "2402.14740"),
    }


def test_overrides_replace_the_row() -> None:
    rules = algorithm("grpo", advantage_scale="none", clip_high=0.4, aggregation="token_mean", dual_clip=3.0)
    assert (rules.advantage, rules.clip_low, rules.clip_high) == ("group_mean", 0.2, 0.4)
    assert (rules.aggregation, rules.dual_clip) == ("token_mean", 3.0)
    assert algorithm("dr_grpo", advantage_scale="group_std").advantage == "group_std"
    assert algorithm("rloo", advantage_scale="none").advantage == "leave_one_out"


def test_constant_length_is_the_token_limit_unless_named() -> None:
    assert algorithm("dr_grpo").aggregation_length == MAX_TOKENS
    assert algorithm("dr_grpo", aggregation_length=100).aggregation_length == 100


@pytest.mark.parametrize(
    ("correction", "is_needed", "cap"),
    [("auto", False, None), ("auto", True, 2.0), ("on", False, 2.0), ("off", True, None)],
)
def test_correction_is_on_where_the_sampler_differs(correction: str, is_needed: bool, cap: float | None) -> None:
    assert algorithm(correction=correction, correction_needed=is_needed).correction_cap == cap


def test_reference_is_needed_for_kl_in_loss_and_in_reward() -> None:
    assert not algorithm("grpo").needs_reference
    assert algorithm("grpo", kl_coef=0.1).needs_reference
    assert algorithm("rloo", kl_coef=0.1, kl_in="reward").needs_reference


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"name": "gpro"}, ["algorithm.name", "'gpro'", "grpo"]),
        ({"name": "dapo", "kl_coef": 0.5}, ["algorithm.kl_coef", "0.5", "grpo"]),
        ({"name": "rloo", "advantage_scale": "group_std"}, ["algorithm.advantage_scale", "leave it unset"]),
        (
            {"name": "grpo", "aggregation_length": 64},
            ["algorithm.aggregation_length", "64", "token_sum_constant"],
        ),
    ],
)
def test_settings_that_contradict_the_row_name_field_value_and_remedy(
    settings: dict[str, object], words: list[str]
) -> None:
    """A13."""
    with pytest.raises(RecipeError) as caught:
        algorithm(**settings)
    assert all(word in str(caught.value) for word in words)


def test_traits_need_no_torch() -> None:
    code = "import sys, cauce.recipe.traits; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
