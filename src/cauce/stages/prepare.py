"""What a run needs before any process starts: the recipe checked, the data read, the reward loaded, the algorithm
resolved. Everything that can be wrong with a recipe should be found here, within seconds."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, GenerationConfig

from cauce.algorithms.table import Algorithm, resolve
from cauce.data.source import RowSource, load_rows
from cauce.engine.vllm_python import find_vllm_python
from cauce.environments.single_turn import SingleTurn
from cauce.errors import ModelError, RecipeError
from cauce.models.load import load_tokenizer, local_folder, resolve_dtype, weights_digest
from cauce.recipe.checks import check_recipe
from cauce.recipe.models import Recipe
from cauce.rewards.load import load_reward
from cauce.rewards.reward import Reward
from cauce.runtime.tasks import TaskSource
from cauce.stages.lengths import prompt_limit
from cauce.types import Row, Sampling

# Mean |log ratio| between sampler and learner on fresh tokens, above which something is wrong rather than imprecise.
# In fp32 both sides round alike; in bf16 the packed and the batched forward round differently at every layer.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A recipe with everything that it names at hand."""

    recipe: Recipe
    algorithm: Algorithm
    model_path: str
    model_bytes: int
    source: TaskSource | None
    test_rows: tuple[Row, ...]
    reward: Reward | None
    sampling: Sampling
    eval_sampling: Sampling
    tolerance: float
    digests: dict[str, str]


def prepare(
    recipe: Recipe,
    *,
    rows: str | Iterable[Mapping[str, Any]] | None = None,
    test_rows: str | Iterable[Mapping[str, Any]] | None = None,
    reward: Callable[..., Any] | Sequence[Callable[..., Any]] | None = None,
    needs_data: bool = True,
) -> Prepared:
    """Resolves what a recipe names. `needs_data` is False for a replay, which has everything in its record."""
    check_recipe(recipe)
    folder = local_folder(recipe.model.path)
    tokenizer = load_tokenizer(str(folder))
    environment = SingleTurn(tokenizer, recipe.data)
    stops = environment.stop_token_ids(recipe.rollout.stop, eos_token_ids=_generation_eos(folder))
    digests = {"model_digest": weights_digest(folder), "data_digest": "", "test_digest": ""}
    source, loaded = None, None
    held_out: tuple[Row, ...] = ()
    if needs_data:
        _engine_is_there(recipe, folder)
        data = load_rows(rows if rows is not None else recipe.data.train, settings=recipe.data, split="train")
        digests["data_digest"] = data.digest
        source = TaskSource(
            data,
            environment,
            seed=recipe.run.seed,
            shuffle=recipe.data.shuffle,
            max_prompt_tokens=_longest_prompt(recipe, folder),
            eos_token_ids=stops,
        )
        test = _test_source(recipe, test_rows)
        if test is not None:
            digests["test_digest"] = test.digest
            held_out = tuple(test[i] for i in range(min(recipe.eval.tasks, len(test))))
        loaded = load_reward(recipe.reward if reward is None else reward, settings=recipe.reward)
        loaded.require(data.columns)
    engine_dtype, learner_dtype = resolve_dtype(recipe.engine.dtype), resolve_dtype(recipe.learner.dtype)
    max_tokens = recipe.rollout.max_tokens
    sampling = Sampling(
        max_tokens=max_tokens, temperature=recipe.rollout.temperature, stop_token_ids=stops, seed=recipe.run.seed
    )
    greedy = Sampling(
        max_tokens=recipe.eval.max_tokens or max_tokens, temperature=0.0, stop_token_ids=stops, seed=recipe.run.seed
    )
    return Prepared(
        recipe=recipe,
        algorithm=resolve(recipe.algorithm, max_tokens=max_tokens, correction_needed=_sampler_differs(recipe)),
        model_path=str(folder.absolute()),
        model_bytes=_published_bytes(folder, engine_dtype),
        source=source,
        test_rows=held_out,
        reward=loaded,
        sampling=sampling,
        eval_sampling=greedy,
        tolerance=max(TOLERANCE[engine_dtype], TOLERANCE[learner_dtype]),
        digests=digests,
    )


def _test_source(recipe: Recipe, test_rows: str | Iterable[Mapping[str, Any]] | None) -> RowSource | None:
    spec = test_rows if test_rows is not None else recipe.data.test
    return load_rows(spec, settings=recipe.data, split="test") if spec else None


def _sampler_differs(recipe: Recipe) -> bool:
    """Whether tokens are drawn with other numbers than the learner's: another engine, dtype, or older weights."""
    if recipe.engine.backend != "native" or recipe.buffer.max_staleness > 0 or recipe.buffer.max_reuse > 1:
        return True
    return resolve_dtype(recipe.engine.dtype) != resolve_dtype(recipe.learner.dtype)


def _engine_is_there(recipe: Recipe, folder: Path) -> None:
    if recipe.engine.backend != "vllm":
        return
    find_vllm_python(recipe.engine.python)
    if not (folder / "config.json").exists():
        raise ModelError(
            f"model {recipe.model.path!r}: engine.backend = 'vllm' reads a folder with config.json and safetensors, "
            "not GGUF; set engine.backend=native"
        )


def _generation_eos(folder: Path) -> tuple[int, ...]:
    """End-of-sequence ids of generation_config.json, which may name several."""
    if not (folder / "generation_config.json").exists():
        return ()
    ids = _read_config(GenerationConfig, folder).eos_token_id
    if ids is None:
        return ()
    return (ids,) if isinstance(ids, int) else tuple(ids)


def _read_config(kind: Any, folder: Path) -> Any:
    try:
        return kind.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"model {str(folder)!r}: no usable config ({str(error).splitlines()[0]})") from error


def _longest_prompt(recipe: Recipe, folder: Path) -> int:
    """data.max_prompt_tokens, or less where the model's context leaves less room before one new token."""
    context = None  # one GGUF file: the engine itself knows the limit
    if (folder / "config.json").exists():
        context = getattr(_read_config(AutoConfig, folder), "max_position_embeddings", None)
    if context is not None and recipe.rollout.max_tokens >= context:
        raise RecipeError(
            f"rollout.max_tokens={recipe.rollout.max_tokens} leaves no room for a prompt: the model's context is "
            f"{context} tokens; set at most {context // 2}"
        )
    return prompt_limit(recipe, context)


def _published_bytes(folder: Path, dtype: torch.dtype) -> int:
    """About how large one published version is; a GGUF file grows when it is unpacked."""
    files = list(folder.glob("*.safetensors"))
    if files:
        return sum(file.stat().st_size for file in files) * dtype.itemsize // 4 * 2
    return 8 * sum(file.stat().st_size for file in folder.glob("*.gguf"))
