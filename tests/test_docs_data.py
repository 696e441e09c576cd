"""docs/data.md is true: each row has the shape it is shown under, and each reward scores every one of them."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from cauce.data.shapes import FORMATS, GOLD_NAMES
from cauce.data.source import RowSource, load_rows
from cauce.recipe import load_recipe
from cauce.recipe.models import DataSettings
from cauce.rewards.load import SHIPPED, load_reward

PAGE = (Path(__file__).parent.parent / "docs" / "data.md").read_text(encoding="utf-8")
ROWS: dict[str, dict[str, Any]] = {
    name: json.loads(text) for name, text in re.findall(r"```json (\w+)\n(.*?)```", PAGE, flags=re.DOTALL)
}
REWARDS: dict[str, str] = dict(re.findall(r"```python (\w+)\n(.*?)```", PAGE, flags=re.DOTALL))
BY_HAND = next(line for line in PAGE.splitlines() if line.startswith("data.prompt_key=task ")).split()


def rows(shape: str) -> RowSource:
    settings = DataSettings()
    if shape == "by_hand":
        needed = ["model.path=m", "data.train=t.jsonl", "reward.fn=f.py:f"]
        settings = load_recipe("grpo", [*needed, *BY_HAND]).data
    return load_rows([ROWS[shape]], settings=settings, split="train")


def test_every_shape_has_an_example_and_a_line_of_the_table() -> None:
    assert set(ROWS) == {*FORMATS, "by_hand"} - {"auto"}
    assert set(re.findall(r"^\| `(\w+)` \|", PAGE, flags=re.MULTILINE)) == set(FORMATS) - {"auto"}
    assert all(f"`{name}`" in PAGE for name in (*GOLD_NAMES, *SHIPPED))


@pytest.mark.parametrize("shape", ROWS)
def test_a_row_is_of_the_shape_it_is_shown_under(shape: str) -> None:
    source = rows(shape)
    assert source.shape == shape
    assert source.gold(source[0]) == "5"
    assert "What is 2 + 3?" in str(source[0].prompt)
    if shape == "by_hand":
        assert source[0].columns["difficulty"] == 1


@pytest.mark.parametrize("shape", ROWS)
@pytest.mark.parametrize("convention", REWARDS)
def test_every_reward_scores_every_row(tmp_path: Path, convention: str, shape: str) -> None:
    path = tmp_path / "score.py"
    path.write_text(REWARDS[convention])
    reward = load_reward(str(path))
    assert [function.kind for function in reward.functions] == [convention]
    source = rows(shape)
    reward.require(source.columns)
    scored = reward.score(rows=[source[0]] * 2, texts=["it is 5", "no"], token_ids=[[1], [2]], step=0, max_steps=1)
    assert [outcome.value for outcome in scored.outcomes] == [1.0, 0.0]


def test_there_is_a_reward_of_every_convention() -> None:
    assert set(REWARDS) == {"native", "verl", "openrlhf"}
