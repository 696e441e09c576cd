"""Finding reward functions by text or as objects, and sending them to another process."""

import functools
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from cauce.errors import RecipeError, RewardError
from cauce.recipe.models import RewardSettings
from cauce.rewards.load import load_reward
from cauce.rewards.reward import Reward
from cauce.types import Row

FILE = """
from __future__ import annotations
import dataclasses
from typing import ClassVar
import neighbour

@dataclasses.dataclass
class Scale:
    unit: ClassVar[float] = 2.0

def score(completions, **_):
    return [Scale.unit * neighbour.ONE * len(c) for c in completions]

def _private(completions):
    return [0.0]
"""
NEIGHBOUR = "ONE = 1.0\n"


def values(reward: Reward, *texts: str, **columns: object) -> list[float | None]:
    """Values that a reward gives to answers to one row."""
    row = Row(id="train:0", prompt="p", columns=columns)
    result = reward.score(rows=[row] * len(texts), texts=texts, token_ids=[[1]] * len(texts), step=1, max_steps=2)
    return [outcome.value for outcome in result.outcomes]


@pytest.fixture
def score_file(tmp_path: Path) -> Path:
    (tmp_path / "neighbour.py").write_text(NEIGHBOUR)
    (tmp_path / "score.py").write_text(FILE)
    return tmp_path / "score.py"


def test_a_file_and_a_module_in_both_spellings(score_file: Path, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    package = tmp_path / "scorers_of_this_test"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "lengths.py").write_text(
        "def score(completions, **_):\n    return [float(len(c)) for c in completions]\n"
    )
    assert values(load_reward(f"{score_file}:score"), "ab") == [4.0]
    assert values(load_reward("score.py:score"), "ab") == [4.0]
    assert values(load_reward("scorers_of_this_test.lengths:score"), "ab") == [2.0]
    assert values(load_reward("scorers_of_this_test.lengths.score"), "ab") == [2.0]
    assert values(load_reward(RewardSettings(fn="cauce.rewards.verifiers:last_number")), "68", answer="68") == [1.0]
    assert values(load_reward("last_number"), "68", answer="68") == [1.0]


VERL = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1\n"
OURS = "def {0}(completions, **columns):\n    return [2.0] * len(completions)\n"
HELPERS = "from statistics import mean\ndef extract(text):\n    return text\ndef anything(**kwargs):\n    return 0\n"


@pytest.mark.parametrize(
    ("text", "taken", "why"),
    [
        (VERL, "compute_score", "the name that files for other trainers give it"),
        (VERL + OURS.format("also"), "compute_score", "the name that files for other trainers give it"),
        (HELPERS + OURS.format("mine"), "mine", "the only function there with the parameters of a reward"),
        (OURS.format("_old") + OURS.format("mine"), "mine", "the only function there with the parameters of a reward"),
    ],
)
def test_a_file_without_a_name_has_one_function_that_can_be_meant_and_it_is_said(
    tmp_path: Path, text: str, taken: str, why: str
) -> None:
    path = tmp_path / "score.py"
    path.write_text(text)
    reward = load_reward(str(path))
    assert reward.names == (taken,)
    assert reward.notes == (f"reward.fn = {str(path)!r} names no function: {taken} is taken, {why}",)
    assert len(values(reward, "x", gold="1")) == 1
    assert load_reward(f"{path}:{taken}").notes == ()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (OURS.format("one") + OURS.format("two"), r"one and two could each be meant; write reward\.fn=.*score\.py:one"),
        (VERL + OURS.format("reward_func"), r"compute_score and reward_func could each be meant"),
        (HELPERS, r"none has the parameters of a reward .its functions: anything, extract"),
        ("x = 1\n", r"none has the parameters of a reward .it has no functions"),
    ],
)
def test_a_file_without_a_name_is_never_guessed_about(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "score.py"
    path.write_text(text)
    with pytest.raises(RewardError, match=words):
        load_reward(str(path))


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("nowhere.py:score", "there is no file"),
        ("{file}:missing", "has no 'missing' .its functions: score"),
        ("no_such_package_here.mod:fn", "No module named"),
        ("not_a_verifier", "last_number"),
        ("{file}:Scale", "no known convention|not a function"),
    ],
)
def test_what_cannot_be_found_is_said(score_file: Path, spec: str, words: str) -> None:
    with pytest.raises(RewardError, match=words):
        load_reward(spec.format(file=score_file))


def test_a_file_that_fails_while_loading_names_the_cause(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("import no_such_package_here\n")
    with pytest.raises(RewardError, match=r"broken\.py fails while it is loaded: ModuleNotFoundError"):
        load_reward(f"{path}:score")


class LengthScore:
    """An instance is a reward as well."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, completions: list[str], **_: object) -> list[float]:
        return [self.factor * len(c) for c in completions]


def shorter(completions: list[str], penalty: float, **_: object) -> list[float]:
    """Shorter answers score higher."""
    return [-penalty * len(c) for c in completions]


def test_names_for_metrics() -> None:
    reward = load_reward(
        [
            functools.partial(shorter, penalty=2.0),
            LengthScore(3.0),
            lambda completions: [0.0],
            LengthScore(1.0),
        ]
    )
    assert reward.names == ("shorter", "LengthScore", "lambda", "LengthScore_2")
    assert values(reward, "ab") == [-4.0 + 6.0 + 0.0 + 2.0]


def test_weights_and_keyword_arguments_of_the_recipe() -> None:
    settings = RewardSettings(weights=[1.0, 0.5], kwargs={"penalty": 2.0})
    assert values(load_reward([shorter, LengthScore(3.0)], settings=settings), "ab") == [-4.0 + 3.0]
    with pytest.raises(RecipeError, match="2 numbers for 1 reward functions"):
        load_reward(shorter, settings=settings)
    with pytest.raises(RecipeError, match=r"reward\.kwargs\.penalti"):
        load_reward(lambda completions: [0.0], settings=RewardSettings(kwargs={"penalti": 1}))
    with pytest.raises(RecipeError, match="empty"):
        load_reward(RewardSettings())


def test_a_file_reward_runs_where_the_file_is_not(score_file: Path, tmp_path: Path) -> None:
    (score_file.parent / "score.py").write_text(FILE.replace("import neighbour\n", "").replace("neighbour.ONE * ", ""))
    reward = load_reward(f"{score_file}:score")
    shipped = tmp_path / "reward.pickle"
    shipped.write_bytes(pickle.dumps(reward))
    score_file.unlink()
    code = f"""
import pickle
from cauce.types import Row
reward = pickle.loads(open({str(shipped)!r}, "rb").read())
row = Row(id="train:0", prompt="p", columns={{}})
print(reward.score(rows=[row], texts=["abc"], token_ids=[[1]], step=1, max_steps=1).outcomes[0].value)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout == "6.0\n", done.stderr


def test_lambdas_closures_and_instances_travel_by_value(tmp_path: Path) -> None:
    """Defined in a __main__ of their own, as in a notebook, and run in another process."""
    shipped = tmp_path / "reward.pickle"
    sender = f"""
from ray import cloudpickle
from cauce.rewards.load import load_reward
class Length:
    def __call__(self, completions, **_):
        return [100.0 * len(c) for c in completions]
def closure(factor):
    def longer(completions, **_):
        return [factor * len(c) for c in completions]
    return longer
reward = load_reward([lambda completions: [1.0] * len(completions), closure(10.0), Length()])
open({str(shipped)!r}, "wb").write(cloudpickle.dumps(reward))
"""
    receiver = f"""
import pickle
from cauce.types import Row
reward = pickle.loads(open({str(shipped)!r}, "rb").read())
row = Row(id="train:0", prompt="p", columns={{}})
outcome = reward.score(rows=[row], texts=["abc"], token_ids=[[1]], step=1, max_steps=1).outcomes[0]
print(outcome.value, sorted(outcome.parts))
"""
    for code, expected in ((sender, ""), (receiver, "331.0 ['Length', 'lambda', 'longer']\n")):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
        assert done.stdout == expected, done.stderr
