"""What a run needs, found out before any process starts."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from cauce.errors import DataError, ModelError, RecipeError, ResourceError, RewardError
from cauce.stages.prepare import Prepared, prepare
from cauce.stages.record import total_steps
from tests.local_session import ROWS, letters, local_recipe
from tests.tiny import EOS_ID, byte_tokenizer, tiny_model


def prepared(model: Path, tmp_path: Path, *, rows: Any = ROWS, reward: Any = letters, **settings: Any) -> Prepared:
    own = {key: settings.pop(key) for key in ("test_rows", "needs_data") if key in settings}
    return prepare(local_recipe(model, tmp_path / "run", **settings), rows=rows, reward=reward, **own)


def test_what_the_recipe_names_is_at_hand(tiny: Path, tmp_path: Path) -> None:
    made = prepared(tiny, tmp_path, test_rows=ROWS[:30], eval__tasks=5, learner__mini_batches=2, learner__epochs=3)
    assert made.source is not None
    assert len(made.source) == 40
    assert [row.id for row in made.test_rows] == [f"test:{i}" for i in range(5)]
    assert total_steps(made.recipe, {}) == 3 * 2 * 3
    assert (made.sampling.temperature, made.eval_sampling.temperature) == (1.0, 0.0)  # C4: greedy evaluation
    assert made.sampling.stop_token_ids == made.eval_sampling.stop_token_ids == (EOS_ID,)
    assert len({made.digests[key] for key in ("model_digest", "data_digest", "test_digest")}) == 3
    assert made.model_bytes > 0


def test_the_same_content_has_the_same_digest_and_other_content_another(tiny: Path, tmp_path: Path) -> None:
    def digests(**kwargs: Any) -> dict[str, str]:
        return prepared(**{"model": tiny, "tmp_path": tmp_path, **kwargs}).digests

    moved = shutil.copytree(tiny, tmp_path / "moved")
    assert digests() == digests(model=moved)
    assert digests()["data_digest"] != digests(rows=ROWS[:-1])["data_digest"]
    other = tiny_model(tmp_path / "other", seed=1)
    assert digests()["model_digest"] != digests(model=other)["model_digest"]


@pytest.mark.parametrize(
    ("engine", "learner", "tolerance"), [("fp32", "fp32", 1e-4), ("bf16", "fp32", 0.1), ("bf16", "bf16", 0.1)]
)
def test_the_tolerance_is_that_of_the_coarser_dtype(
    tiny: Path, tmp_path: Path, engine: str, learner: str, tolerance: float
) -> None:
    assert prepared(tiny, tmp_path, engine__dtype=engine, learner__dtype=learner).tolerance == tolerance


@pytest.mark.parametrize(
    ("settings", "is_on"),
    [
        ({}, False),
        ({"engine__dtype": "bf16"}, True),
        ({"buffer__max_staleness": 1}, True),
        ({"buffer__max_staleness": 1, "algorithm__correction": "off"}, False),
        ({"algorithm__correction": "on"}, True),
    ],
)
def test_the_correction_is_on_where_the_sampler_is_another_policy(
    tiny: Path, tmp_path: Path, settings: dict[str, Any], is_on: bool
) -> None:
    assert (prepared(tiny, tmp_path, **settings).algorithm.correction_cap is not None) == is_on


def test_stop_tokens_are_those_of_model_generation_config_and_recipe(tmp_path: Path) -> None:
    """B11."""
    model = tiny_model(tmp_path / "model")
    file = model / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token_id": [259, 5]}))
    newline = byte_tokenizer()("\n").input_ids[0]
    stops = prepared(model, tmp_path, rollout__stop='["\\n"]').sampling.stop_token_ids
    assert set(stops) == {EOS_ID, 259, 5, newline}


def test_prompts_may_be_as_long_as_the_context_leaves_room(tmp_path: Path) -> None:
    """C20: one token at least must fit behind a prompt; a limit of the recipe below that stays."""
    model = tiny_model(tmp_path / "model", context=32)
    longest = prepared(model, tmp_path).source
    assert longest is not None
    assert longest.max_prompt_tokens == 31
    shorter = prepared(model, tmp_path, data__max_prompt_tokens=10).source
    assert shorter is not None
    assert shorter.max_prompt_tokens == 10
    with pytest.raises(RecipeError, match=r"rollout\.max_tokens=32 leaves no room .* 32 tokens; set at most 16"):
        prepared(model, tmp_path, rollout__max_tokens=32)


def needs_solution(completions: list[str], solution: list[str]) -> list[float]:
    return [float(c == s) for c, s in zip(completions, solution, strict=True)]


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"reward": needs_solution}, RewardError, "needs 'solution'"),  # E1: a column that no row has
        ({"rows": []}, DataError, "has 0 rows"),
        ({"rows": [{"text": "t"}]}, DataError, "no known shape"),
        ({"model__path": "/no/such/folder"}, ModelError, "no such folder"),
        ({"rollout__temperature": 0}, RecipeError, "rollout.temperature"),  # C4
        ({"reward__weights": "[1, 2]"}, RecipeError, "2 numbers for 1"),
        ({"rollout__stop": '["two words"]'}, RecipeError, "rollout.stop"),
    ],
)
def test_what_is_wrong_is_said_before_anything_starts(
    tiny: Path, tmp_path: Path, changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        prepared(tiny, tmp_path, **changes)
    assert not (tmp_path / "run").exists()


def test_a_replay_needs_neither_data_nor_reward(tiny: Path, tmp_path: Path) -> None:
    made = prepared(tiny, tmp_path, rows=None, reward=None, needs_data=False)
    assert (made.source, made.reward, made.test_rows) == (None, None, ())
    assert made.algorithm.name == "grpo"
    assert made.digests["model_digest"]


def test_published_weights_are_about_as_large_as_expected(tiny: Path, tmp_path: Path) -> None:
    file = (tiny / "model.safetensors").stat().st_size
    fp32, bf16 = (prepared(tiny, tmp_path, engine__dtype=name).model_bytes for name in ("fp32", "bf16"))
    assert file <= fp32 <= 2 * file
    assert bf16 == fp32 // 2
    assert torch.float32.itemsize == 2 * torch.bfloat16.itemsize


def test_an_engine_that_is_not_there_is_found_out_before_anything_starts(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CAUCE_VLLM_PYTHON", raising=False)
    monkeypatch.chdir(tmp_path)
    vllm = {"engine__backend": "vllm", "engine__deterministic": "false"}
    with pytest.raises(ResourceError, match=r"engine\.backend = 'vllm'.*make vllm"):
        prepared(tiny, tmp_path, **vllm)
    assert prepared(tiny, tmp_path, needs_data=False, **vllm).source is None  # a replay samples nothing
