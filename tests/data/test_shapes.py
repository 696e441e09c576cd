"""Shapes of rows, each in the foreign form verbatim: which rule matches, the prompt and the gold answer."""

from typing import Any

import numpy as np
import pytest

from cauce.data.source import RowSource, load_rows
from cauce.errors import DataError, RecipeError
from cauce.recipe.models import DataSettings

USER = {"role": "user", "content": "What is 2 + 2?"}
ASSISTANT = {"role": "assistant", "content": "4"}


def load(*rows: dict[str, Any], **settings: Any) -> RowSource:
    """Rows handed over in Python."""
    return load_rows(rows, settings=DataSettings(**settings), split="train")


CASES = {
    "trl_text": ({"prompt": "What is 2 + 2?", "solution": "4", "level": 1}, "trl", "What is 2 + 2?", "4"),
    "trl_chat": ({"prompt": [USER], "ground_truth": "4"}, "trl", [USER], "4"),
    "trl_no_gold": ({"prompt": [USER]}, "trl", [USER], None),
    "trl_two_golds": ({"prompt": "p", "answer": "4", "solution": "2+2=4"}, "trl", "p", None),
    "verl": (
        {
            "data_source": "openai/gsm8k",
            "prompt": np.array([USER], dtype=object),
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": np.str_("4")},
            "extra_info": {"split": "train", "index": np.int64(3), "answer": "4", "question": "?"},
        },
        "verl",
        [USER],
        "4",
    ),
    "question": (
        {"question": "What is 2 + 2?", "answer": "4", "info": {}},
        "question_answer",
        "What is 2 + 2?",
        "4",
    ),
    "gsm8k": ({"question": "Q?", "answer": "2+2=<<2+2=4>>4\n#### 1,234"}, "gsm8k", "Q?", "1234"),
    "maths": ({"problem": "P", "solution": "\\boxed{4}"}, "problem_solution", "P", "\\boxed{4}"),
    "maths_both": (
        {"problem": "P", "solution": "so \\boxed{4}", "answer": "4"},
        "problem_solution",
        "P",
        "4",
    ),
    "openrlhf": ({"input": "I", "label": "4", "datasource": "default"}, "openrlhf", "I", "4"),
    "openrlhf_bare": ({"input": [USER]}, "openrlhf", [USER], None),
    "messages_user": ({"messages": [USER], "answer": "4"}, "messages", [USER], "4"),
    "messages_assistant": ({"messages": [USER, ASSISTANT]}, "messages", [USER], "4"),
}


@pytest.mark.parametrize("case", CASES)
def test_shape_prompt_and_gold(case: str) -> None:
    record, shape, prompt, gold = CASES[case]
    source = load(record)
    row = source[0]
    assert (source.shape, row.prompt, source.gold(row)) == (shape, prompt, gold)
    assert source.rule
    assert row.columns.get("gold") == gold
    assert set(record) - {"prompt"} <= set(row.columns)


def test_numpy_is_converted_all_the_way_down() -> None:
    columns = load(CASES["verl"][0])[0].columns
    assert columns["extra_info"] == {"split": "train", "index": 3, "answer": "4", "question": "?"}
    assert type(columns["extra_info"]["index"]) is int
    assert type(columns["reward_model"]["ground_truth"]) is str


def test_the_assistant_turn_becomes_the_reference_and_other_rows_have_none() -> None:
    source = load({"messages": [USER, ASSISTANT]}, {"messages": [USER]})
    assert [row.columns["reference"] for row in source] == ["4", None]
    assert [row.prompt for row in source] == [[USER], [USER]]
    with pytest.raises(DataError, match="no prompt before it"):
        load({"messages": [ASSISTANT]})


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"prompt": "p", "chosen": "a", "rejected": "b"}, "preference pairs"),
        ({"input": {}, "preferred_output": [], "non_preferred_output": []}, "preference pairs"),
        ({"prompt": "p", "completion": "c", "label": True}, "unpaired preferences"),
        ({"prompt": "p", "completion": "c"}, "prompt-completion"),
        ({"prompt": "p", "completions": ["c"], "labels": [True]}, "stepwise"),
        ({"conversations": [{"from": "human", "value": "hi"}]}, "ShareGPT"),
        ({"instruction": "i", "input": "", "output": "o"}, "Alpaca"),
        ({"input": "i", "output": "o"}, "input-output"),
        ({"text": "t"}, r"no known shape has the columns text.*data\.prompt_key"),
    ],
)
def test_other_stages_and_unknown_columns_are_refused_in_words(record: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        load(record)


def test_two_matching_rules_are_named_and_chosen_between_by_hand() -> None:
    record = {"prompt": "from the prompt", "question": "from the question", "answer": "4"}
    with pytest.raises(DataError, match=r'trl .*question_answer .*data\.format = "trl" or "question_answer"'):
        load(record)
    assert load(record, format="trl")[0].prompt == "from the prompt"
    assert load(record, format="question_answer")[0].prompt == "from the question"
    with pytest.raises(RecipeError, match="did you mean 'question_answer'"):
        load(record, format="question_answers")
    with pytest.raises(DataError, match="shape openrlhf has its prompt in column 'input'"):
        load(record, format="openrlhf")


def test_keys_by_hand() -> None:
    record = {"q": "What?", "text": {"gold": "4"}, "chosen": "a", "rejected": "b"}
    source = load(record, prompt_key="q", gold_key="text.gold", system="")
    assert (source.shape, source[0].prompt, source.gold(source[0])) == ("by_hand", "What?", "4")
    assert source[0].columns["chosen"] == "a"
    source = load(record, prompt_key="q")
    assert source.gold(source[0]) is None
    source = load({"question": "Q", "answer": "long", "short": "4"}, gold_key="short")
    assert (source.shape, source.gold(source[0])) == ("question_answer", "4")
    with pytest.raises(DataError, match="'nope', which no row has a value in"):
        load(record, prompt_key="nope")


def test_where_no_gold_answer_is_recognised_the_rule_says_what_there_is() -> None:
    assert load({"prompt": "p", "result": "4", "level": 1}).rule.endswith(
        "no gold answer recognised: if one of the columns result, level is it, say data.gold_key=COLUMN"
    )
    assert load({"input": "p", "result": "4"}).rule.endswith("the columns result is it, say data.gold_key=COLUMN")
    several = load({"prompt": "p", "answer": "4", "solution": "2 + 2 = 4"}).rule
    assert several.endswith("answer and solution could each be it, choose with data.gold_key=answer")
    assert load({"prompt": "p"}).rule.endswith("no gold answer: there is no other column")


def test_columns_are_renamed_and_kept() -> None:
    source = load({"q": "What?", "result": {"value": "4"}}, columns={"question": "q", "answer": "result.value"})
    row = source[0]
    assert (source.shape, row.prompt, row.columns["answer"]) == ("question_answer", "What?", "4")
    assert row.columns["q"] == "What?"
    assert row.columns["result"] == {"value": "4"}
    with pytest.raises(DataError, match=r"data\.columns\.answer = 'nope'"):
        load({"q": "What?"}, columns={"question": "q", "answer": "nope"})


def test_a_column_called_gold_is_left_alone() -> None:
    row = load({"prompt": "p", "solution": "4", "gold": {"deposit": 1}}, gold_key="solution")[0]
    assert row.columns["gold"] == {"deposit": 1}


@pytest.mark.parametrize("prompt", [None, "", " ", [], ["no message"], {"role": "user"}])
def test_a_bad_prompt_names_its_row(prompt: object) -> None:
    with pytest.raises(DataError, match=r"data\.train, row 1: the prompt is"):
        load({"prompt": "fine"}, {"prompt": prompt})
