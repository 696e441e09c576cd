"""Shipped verifiers: gold scores 1, an empty answer 0, a near miss what the docstring says."""

from fractions import Fraction

import numpy as np
import pytest

from cauce.rewards.verifiers import boxed, exact_match, gsm8k, last_number, read_number

MINUS = "\u2212"  # what mathematics is typeset with, not the hyphen


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("72 clips, altogether.", 72),
        ("$29.00", 29),
        ("1,234", 1234),
        ("It costs $1,234.50, then.", Fraction("1234.5")),
        (",", None),
        ("", None),
        ("none at all", None),
        ("-3", -3),
        ("- 3", -3),
        (f"{MINUS}3", -3),
        (f"the answer is {MINUS} 3", -3),
        ("-$3.50", Fraction("-3.5")),
        ("$-3", -3),
        ("\\boxed{-3}", -3),
        ("= -3", -3),
        ("Answer:\n-3", -3),
        ("10 - 3", 3),
        ("10 -3", 3),
        ("10-3", 3),
        ("x - 3", 3),
        ("(1)-3", 3),
        ("items:\n- 3 apples", 3),
        ("COVID-19", 19),
        ("1/2", Fraction(1, 2)),
        ("on 3/4/2020", 2020),
        ("1, 2, 3", 3),
        ("1,2", 2),
        ("1,2345", 2345),
        ("23 + 45 = 68.", 68),
        ("1e-1", Fraction(1, 10)),
        ("1{,}234", 1234),
        ("\\$5", 5),
        ("5%", 5),
        (".5", Fraction(1, 2)),
        ("9" * 6000, None),
        ("1e999999999", 999999999),
    ],
)
def test_read_number(text: str, number: Fraction | int | None) -> None:
    assert read_number(text) == number


def test_last_number_tells_a_sign_from_none() -> None:
    answers = ["-3", "- 3", f"{MINUS}3", "3"]
    assert last_number(completions=answers, answer=["-3"] * 4) == [1.0, 1.0, 1.0, 0.0]


def test_last_number_reads_a_conversation_and_numbers_as_gold() -> None:
    turn = [{"role": "assistant", "content": "It is 68."}]
    assert last_number(completions=[turn, turn], answer=[68, 69]) == [1.0, 0.0]


def test_last_number_takes_the_last_of_several_as_documented() -> None:
    every_sum = " ".join(str(n) for n in range(20, 199))
    assert last_number(completions=["68, or 69", every_sum], answer=["68", "68"]) == [0.0, 0.0]


def test_gsm8k_finds_the_number_before_a_long_explanation() -> None:
    answer = "So she has\n#### 1,042\n" + "because of this and 7 of that. " * 80
    assert gsm8k(completions=[answer, "1042", "#### ", "#### 41"], answer=["1042"] * 4) == [
        1.0,
        0.0,
        0.0,
        0.0,
    ]
    assert gsm8k(completions=["#### 1042"], answer=["Half of it.\n#### 1,042"]) == [1.0]


def test_exact_match_forgives_spaces_only() -> None:
    answers = ["  the  sea\n", "The sea", "the sea."]
    assert exact_match(completions=answers, answer=["the sea"] * 3) == [1.0, 0.0, 0.0]


def test_boxed_compares_numbers_as_numbers_and_the_rest_as_text() -> None:
    pairs = [
        ("so \\boxed{1,234}", "1234", 1.0),
        ("\\boxed{-3}", f"{MINUS}3", 1.0),
        ("\\boxed{\\text{13}}", "13", 1.0),
        ("\\boxed{1} no, \\boxed{2}", "we get \\boxed{2}", 1.0),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}", 1.0),
        ("\\boxed{\\frac{1}{2}}", "0.5", 0.0),
        ("\\boxed{(3, \\pi/2)}", "(3, 2\\pi/3)", 0.0),
        ("\\boxed{1-1/e}", "1+1/e", 0.0),
        ("\\boxed{3,4}", "4", 0.0),
        ("\\boxed{", "4", 0.0),
        ("4", "4", 0.0),
    ]
    completions, golds, expected = zip(*pairs, strict=True)
    assert boxed(completions=completions, answer=golds) == list(expected)


@pytest.mark.parametrize("verifier", [last_number, gsm8k, boxed, exact_match])
def test_no_gold_abstains_and_an_unreadable_gold_is_an_error(verifier) -> None:
    assert verifier(completions=["7"], answer=[None]) == [None]
    with pytest.raises(ValueError, match="gold"):
        verifier(completions=["7"], answer=[" "])


WRITTEN = {
    last_number: "the sum is {}.",
    gsm8k: "first this\n#### {}\nand that was it",
    boxed: "hence \\boxed{{{}}}",
    exact_match: "{}",
}


@pytest.mark.parametrize("verifier", WRITTEN)
def test_gold_scores_one_and_a_neighbour_zero_for_random_numbers(verifier) -> None:
    rng = np.random.default_rng(7)
    for value in rng.integers(-(10**7), 10**7, size=200).tolist():
        forms = [str(value)]
        if verifier is not exact_match:
            forms += [f"{value:,}", str(value).replace("-", MINUS)]
        right = [WRITTEN[verifier].format(form) for form in forms]
        assert verifier(completions=right, answer=[str(value)] * len(right)) == [1.0] * len(right)
        near = [WRITTEN[verifier].format(other) for other in (value + 1, value * 10 + 1, -value or 1)]
        assert verifier(completions=near, answer=[str(value)] * 3) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("verifier", WRITTEN)
def test_empty_structure_is_not_paid(verifier) -> None:
    question = "What is 23 + 45?"
    hollow = [
        "",
        " \n",
        "<answer></answer>",
        "<think></think><answer></answer>",
        "\\boxed{}",
        "####",
        "#### #### ####",
        "\\boxed{} " * 20,
        question,
        question * 20,
        " ".join(str(n) for n in range(20, 199)),
    ]
    assert max(verifier(completions=hollow, answer=["68"] * len(hollow))) <= 0.1
