"""What the README shows is true: its commands, its settings, and its Python, which is run as it stands."""

import re
from pathlib import Path
from typing import Any

import pytest

from cauce.cli.main import app
from cauce.recipe import load_recipe
from cauce.recipe.models import SECTIONS
from tests.tiny import tiny_model

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
SHOWN_MODEL, SHOWN_PLANS = 'model="SmolLM2-135M-Instruct"', '"run.plans": 20'


def test_every_command_exists() -> None:
    named = set(re.findall(r"cauce (train|\w+) (?:RUN|RECIPE|grpo|runs/)", README))
    named |= set(re.findall(r"`cauce (\w+)", README))
    known = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    known |= {group.name for group in app.registered_groups}
    assert named - known == set()
    assert {"train", "resume", "replay", "check", "chat", "doctor"} <= named


def test_every_setting_of_the_table_exists() -> None:
    table = README.split("## Coming from another trainer")[1].split("\n## ")[0]
    ours = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    keys = [key for cell in ours for key in re.findall(r"`(\w+\.\w+)`", cell)]
    assert len(keys) >= 9
    assert [key for key in keys if key.split(".")[1] not in SECTIONS[key.split(".")[0]].model_fields] == []


def test_the_command_without_a_recipe_file_makes_a_recipe() -> None:
    line = next(line for line in README.splitlines() if line.startswith("cauce train grpo "))
    recipe = load_recipe("grpo", line.split()[3:])
    assert recipe.data.train == "rows.jsonl"
    assert recipe.reward.names == ["score.py:score"]


@pytest.mark.slow
def test_the_python_example_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert SHOWN_MODEL in code
    assert SHOWN_PLANS in code
    assert len(code.splitlines()) <= 20
    model = tiny_model(tmp_path / "tiny", context=1024)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    code = code.replace(SHOWN_MODEL, f"model={str(model)!r}").replace(SHOWN_PLANS, '"run.plans": 2')
    # Random letters are never a sum of two numbers, and a run that never sees a reward fails; they have its last digit.
    assert "gold in text" in code
    exec(code.replace("gold in text", "gold[-1] in text"), names)
    assert names["summary"]["plans"] == 2
    assert (Path(names["summary"]["run"]) / "model" / "config.json").is_file()
