"""Cauce from Python: a loop of one's own in fifteen lines, what a rollout and its score are, settings as objects."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import cauce
from cauce.errors import DataError, RecipeError, TrainingStopped, WeightsError
from cauce.interface import Rollout
from cauce.metrics.observer import NullObserver
from tests.tiny import EOS_ID, byte_tokenizer, tiny_model

ROWS = [{"prompt": f"say {i}", "answer": str(i)} for i in range(8)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("tiny") / "model"))


def likes_high_letters(text: str) -> float:
    return sum(map(ord, text)) / (1 + len(text)) / 256


def test_a_loop_of_ones_own_learns(model: str) -> None:
    """Actor, learner and a reward that never enters either."""
    actor = cauce.Actor(model, dtype="fp32")
    learner = cauce.Learner(model, settings={"lr": 5e-3, "dtype": "fp32"})
    means = []
    for step in range(12):
        rollouts = actor.generate(["hello", "world"], num=8, max_tokens=6)
        scores = [[likes_high_letters(text) for text in rollout.texts] for rollout in rollouts]
        means.append(float(np.mean(scores)))
        metrics = learner.update([rollout.score(score) for rollout, score in zip(rollouts, scores, strict=True)])
        assert metrics["sampler/log_ratio_abs_mean"] < 1e-4
        assert metrics["optim/step"] == learner.version == step + 1
        actor.load_state(learner.state(), version=learner.version)
        assert actor.status()["version"] == learner.version
    assert np.mean(means[-3:]) > np.mean(means[:3]) + 0.03


def test_a_rollout_is_what_was_sampled(model: str) -> None:
    actor = cauce.Actor(model, dtype="fp32")
    first, second = actor.generate(["hi", [{"role": "user", "content": "ho"}]], num=3, max_tokens=5)
    assert (first.prompt, len(first.completions), len(first.texts)) == ("hi", 3, 3)
    tokenizer = byte_tokenizer()
    assert tokenizer.decode(first.prompt_ids) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    for rollout in (first, second):
        for completion, text in zip(rollout.completions, rollout.texts, strict=True):
            ids = [i for i in completion.token_ids.tolist() if i != EOS_ID]
            assert text == tokenizer.decode(ids, skip_special_tokens=True)
    assert {c.task for c in first.completions} != {c.task for c in second.completions}
    again = actor.generate(["hi"], num=3, max_tokens=5)[0]  # a new task: other samples
    assert again.texts != first.texts
    fresh = cauce.Actor(model, dtype="fp32").generate(["hi"], num=3, max_tokens=5)[0]
    assert [c.token_ids.tolist() for c in fresh.completions] == [c.token_ids.tolist() for c in first.completions]


def test_greedy_answers_are_all_the_same_and_an_empty_list_is_refused(model: str) -> None:
    actor = cauce.Actor(model, dtype="fp32")
    assert len(set(actor.generate(["hi"], num=3, max_tokens=5, temperature=0.0)[0].texts)) == 1
    with pytest.raises(DataError, match="at least one prompt"):
        actor.generate([])


def rollout(model: str, *, num: int = 4) -> Rollout:
    return cauce.Actor(model, dtype="fp32").generate(["hi"], num=num, max_tokens=5)[0]


def test_none_leaves_an_answer_out(model: str) -> None:
    """E8: it abstains; it is no zero."""
    group = rollout(model).score([1.0, None, 0.0, 1])
    assert [s.outcome.status for s in group.samples] == ["scored", "abstained", "scored", "scored"]
    assert [s.outcome.value for s in group.samples] == [1.0, None, 0.0, 1.0]
    learner = cauce.Learner(model, settings={"dtype": "fp32"})
    tokens = sum(len(s.completion.token_ids) for s in group.samples if s.outcome.value is not None)
    assert learner.update([group])["learner/tokens"] == tokens
    with pytest.raises(ValueError, match=r"longer|shorter"):
        rollout(model).score([1.0])


def test_an_update_that_cannot_be_is_refused_and_moves_no_version(model: str) -> None:
    """A4, G15."""
    learner = cauce.Learner(model, settings={"dtype": "fp32"})
    before = {name: tensor.clone() for name, tensor in learner.state().items()}
    with pytest.raises(DataError, match="none of the 1 groups has two scored answers"):
        learner.update([rollout(model).score([None, None, None, 1.0])])
    with pytest.raises(TrainingStopped, match="nan is scored but not finite"):
        learner.update([rollout(model).score([float("nan"), 0.0, 1.0, 1.0])])
    assert learner.version == 0
    assert all(torch.equal(before[name], tensor) for name, tensor in learner.state().items())


def test_equal_rewards_are_no_signal(model: str) -> None:
    """A12."""
    learner = cauce.Learner(model, settings={"dtype": "fp32"})
    before = {name: tensor.clone() for name, tensor in learner.state().items()}
    metrics = learner.update([rollout(model).score([1.0] * 4)])
    assert (metrics["has_signal"], metrics["learner/skipped_groups"]) == (0.0, 1.0)
    assert all(torch.equal(before[name], tensor) for name, tensor in learner.state().items())


def test_weights_of_another_model_are_refused(model: str, tmp_path: Path) -> None:
    """D4."""
    other = cauce.Learner(str(tiny_model(tmp_path / "other", "gpt2")), settings={"dtype": "fp32"})
    with pytest.raises(WeightsError):
        cauce.Actor(model, dtype="fp32").load_state(other.state(), version=1)


# A whole run as an object


def score(completions: list[Any], **_: Any) -> list[float]:
    return [0.0] * len(completions)


def trainer(model: str, **settings: Any) -> cauce.Trainer:
    named = {key.replace("__", "."): value for key, value in settings.items()}
    return cauce.Trainer(model=model, data=ROWS, reward=score, settings=named, observer=NullObserver())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("data.system", 'Say "hi", \\ and \t {x} = [1]'),
        ("data.system", "caf\u00e9 #1"),
        ("run.name", "2026-01-02"),
        ("run.name", "true"),
        ("learner.lr", 2.5e-05),
        ("learner.lr", 1),
        ("run.plans", np.int64(7)),
        ("data.shuffle", False),
        ("algorithm.clip_high", None),
        ("rollout.stop", ["\\n", 'a"b']),
        ("reward.weights", (0.5,)),
        ("reward.kwargs", {"scale": 2.0, "names": ["a", "b"], "deep": {"x": True}}),
        ("run.dir", Path("some/where")),
    ],
)
def test_settings_are_python_values(model: str, key: str, value: Any) -> None:
    section, name = key.split(".")
    found = getattr(getattr(trainer(model, **{key: value}).recipe, section), name)
    expected = list(value) if isinstance(value, tuple) else str(value) if isinstance(value, Path) else value
    assert found == expected


def test_what_is_given_in_python_need_not_be_named(model: str) -> None:
    recipe = trainer(model).recipe
    assert (recipe.data.train, recipe.reward.fn, recipe.model.path) == ("", "", model)
    by_name = cauce.Trainer(
        model=model, data="builtin:addition/train", test="builtin:addition/test", reward="last_number"
    )
    assert (by_name.recipe.data.train, by_name.recipe.data.test) == ("builtin:addition/train", "builtin:addition/test")
    assert by_name.recipe.reward.names == ["last_number"]


def test_settings_are_checked_when_the_trainer_is_made(model: str) -> None:
    """J1, F14."""
    with pytest.raises(RecipeError, match=r"rollout\.group_size"):
        trainer(model, num_generations=8)
    with pytest.raises(RecipeError, match="left over"):
        trainer(model, learner__tasks_per_plan=10, learner__mini_batches=4)


def test_rows_may_come_from_a_generator_and_are_read_once(model: str) -> None:
    made = cauce.Trainer(model=model, data=(row for row in ROWS), reward=score, observer=NullObserver())
    assert made._rows == ROWS
