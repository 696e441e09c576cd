"""Memory per role and time per plan, before any weights load: arithmetic over the model's config and, for the
time, one small product of matrices on this machine. Estimates, to tell 6 GB from 60 and a minute from an hour;
what a run really takes is in its summary. Leaves out GPUs, which are not timed here, and mixtures of experts.
"""

import math
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from cauce.engine.prepack import PackedLinear
from cauce.models.load import resolve_dtype
from cauce.packing import REMADE_BUDGETS
from cauce.recipe.models import Recipe
from cauce.stages.lengths import PromptLengths
from cauce.weights.store import versions_kept

PROCESS_BYTES = 450 * 2**20  # Python with torch, transformers and ray imported
LOGITS_BYTES = 3 * 64 * 2**20  # a chunk of float32 logits, its softmax and its gradient
OVERHEAD = 2.0  # attention, norms, sampling and Python beside the products of matrices
FLOPS_PER_WEIGHT = 2  # of one token in a forward pass; a backward pass costs twice as much again
LEARNER_ROWS = 512
TIMED_S = 0.15
LAYER_AT_WORK = 2  # of a layer that is made again, what it keeps and the gradients of that
OUT_OF_CACHE_BYTES = 64 * 2**20
PARALLEL_SHARE = 0.8  # what a further thread adds


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """What a config says about a model's size."""

    num_parameters: int  # tied ones once
    num_multiplied: int  # weights that take part in the products of one token
    layers: int
    hidden: int
    intermediate: int
    kv_width: int  # elements of the keys of one token in one layer
    vocabulary: int
    context: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """How long a plan will about take on this machine."""

    generate_s: float  # per plan, every answer at its full length
    learn_s: float  # per plan, every group carrying signal


def read_size(folder: Path) -> ModelSize | None:
    """The size of a model by its config alone; None where transformers cannot tell."""
    gguf = sorted(folder.glob("*.gguf"))
    try:
        if (folder / "config.json").exists():
            config = AutoConfig.from_pretrained(folder)
        elif gguf:
            config = AutoConfig.from_pretrained(folder, gguf_file=gguf[0].name)
        else:
            return None
        with torch.device("meta"):  # parameters with shapes and no memory
            model = AutoModelForCausalLM.from_config(config)
    except (ValueError, KeyError, OSError):  # an architecture that this release of transformers does not know
        return None
    num_parameters = sum(p.numel() for p in model.parameters())
    text = config.get_text_config()
    heads = text.num_attention_heads
    head_width = getattr(text, "head_dim", None) or text.hidden_size // heads
    embedding = model.get_input_embeddings().weight.numel()
    is_tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    return ModelSize(
        num_parameters=num_parameters,
        num_multiplied=num_parameters - (0 if is_tied else embedding),
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        intermediate=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        kv_width=(getattr(text, "num_key_value_heads", None) or heads) * head_width,
        vocabulary=text.vocab_size,
        context=getattr(text, "max_position_embeddings", None),
    )


def memory_by_role(recipe: Recipe, size: ModelSize, lengths: PromptLengths) -> tuple[tuple[str, int], ...]:
    """What each process of a run needs, in bytes; rollout actors one by one."""
    engine_dtype, learner_dtype = resolve_dtype(recipe.engine.dtype), resolve_dtype(recipe.learner.dtype)
    one_actor = _rollout_bytes(recipe, size, engine_dtype, lengths.longest)
    versions = versions_kept(recipe.buffer.max_staleness) + 1  # a new one is written before the oldest goes
    published = versions * size.num_parameters * engine_dtype.itemsize
    return (
        ("learner", _learner_bytes(recipe, size, learner_dtype, lengths)),
        *((f"rollout actor {i + 1}", one_actor) for i in range(recipe.rollout.actors)),
        (f"published weights, {versions} versions", published),
        (f"{recipe.reward.workers} reward workers and the driver", (recipe.reward.workers + 1) * PROCESS_BYTES),
    )


def estimate(recipe: Recipe, size: ModelSize, lengths: PromptLengths) -> Estimate:
    """Time of a recipe on this machine's CPUs."""
    engine_dtype, learner_dtype = resolve_dtype(recipe.engine.dtype), resolve_dtype(recipe.learner.dtype)
    tasks, answers = recipe.learner.tasks_per_plan, recipe.learner.tasks_per_plan * recipe.rollout.group_size
    prompt_tokens = lengths.mean * tasks
    new_tokens = answers * recipe.rollout.max_tokens
    rows = max(1, min(recipe.engine.slots, answers // recipe.rollout.actors))
    forward = FLOPS_PER_WEIGHT * size.num_multiplied
    decode_rate = _flops_per_s(size, rows, engine_dtype)
    learn_rate = _flops_per_s(size, LEARNER_ROWS, learner_dtype)
    passes = 3 * recipe.learner.epochs  # forward and backward
    passes += recipe.learner.mini_batches * recipe.learner.epochs > 1  # log-probs before the first step
    passes += recipe.algorithm.kl_coef > 0  # log-probs of the reference
    return Estimate(
        generate_s=OVERHEAD * (new_tokens * forward / decode_rate + prompt_tokens * forward / learn_rate),
        learn_s=OVERHEAD * passes * (prompt_tokens + new_tokens) * forward / learn_rate,
    )


def _learner_bytes(recipe: Recipe, size: ModelSize, dtype: torch.dtype, lengths: PromptLengths) -> int:
    weight = 4 + 4 + 8  # float32 masters, their gradients, two moments
    is_copy = dtype != torch.float32
    weight += dtype.itemsize if is_copy else 0  # the copy that computes
    weight += dtype.itemsize if recipe.algorithm.kl_coef > 0 else 0  # the frozen reference
    return size.num_parameters * weight + _activation_bytes(recipe, size, dtype, lengths) + LOGITS_BYTES + PROCESS_BYTES


def _activation_bytes(recipe: Recipe, size: ModelSize, dtype: torch.dtype, lengths: PromptLengths) -> int:
    """Of the largest micro-batch: a budget of tokens whole, or up to REMADE_BUDGETS of a group that is remade."""
    budget, new_tokens = recipe.learner.token_budget, recipe.rollout.max_tokens
    # Kept for the backward pass, per token and layer: inputs of the projections and of the gated MLP.
    layer = (8 * size.hidden + 2 * size.kv_width + 4 * size.intermediate) * dtype.itemsize
    tasks = math.ceil(recipe.learner.tasks_per_plan / recipe.learner.mini_batches)
    step = tasks * (lengths.mean + recipe.rollout.group_size * new_tokens)
    kept = min(budget, math.ceil(step)) * size.layers * layer
    group = lengths.longest + recipe.rollout.group_size * new_tokens
    if group <= budget:
        return kept
    # An answer is never cut, so a longer one than the bound is the bound.
    tokens = max(min(group, REMADE_BUDGETS * budget), lengths.longest + new_tokens)
    remade = tokens * (size.layers * size.hidden * dtype.itemsize + LAYER_AT_WORK * layer)
    return max(kept, remade)


def _rollout_bytes(recipe: Recipe, size: ModelSize, dtype: torch.dtype, longest_prompt: int) -> int:
    length = longest_prompt + recipe.rollout.max_tokens
    cache = recipe.engine.slots * length * size.layers * 2 * size.kv_width * dtype.itemsize
    # Weights as loaded, and packed for oneDNN; the packed ones come anew before the old ones go.
    weights = 2 * size.num_parameters * dtype.itemsize
    logits = recipe.engine.slots * size.vocabulary * 4 * 2
    return weights + cache + logits + PROCESS_BYTES


def _flops_per_s(size: ModelSize, rows: int, dtype: torch.dtype) -> float:
    """How fast this machine multiplies the model's widest common shape, packed as in the engine.

    One thread is timed and the others are counted on top: on a busy machine several threads wait for each
    other at every product, which says nothing about an idle one. Many weights in turn, so that none stays in
    the cache.
    """
    weight_bytes = size.hidden * size.intermediate * dtype.itemsize
    num_weights = min(64, max(1, OUT_OF_CACHE_BYTES // weight_bytes))
    weights = [torch.nn.Linear(size.hidden, size.intermediate, bias=False, dtype=dtype) for _ in range(num_weights)]
    layers = weights if rows >= LEARNER_ROWS else [_packed(weight, rows) for weight in weights]
    inputs = torch.randn(rows, size.hidden).to(dtype)
    num_threads = torch.get_num_threads()
    best = math.inf  # the fastest, since other work on the machine only ever makes a product slower
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            end = time.perf_counter() + TIMED_S
            while (start := time.perf_counter()) < end:
                for layer in layers:
                    layer(inputs)
                best = min(best, (time.perf_counter() - start) / num_weights)
    finally:
        torch.set_num_threads(num_threads)
    return 2 * rows * size.hidden * size.intermediate / best * (1 + (num_threads - 1) * PARALLEL_SHARE)


def _packed(layer: torch.nn.Linear, rows: int) -> torch.nn.Linear:
    try:
        packed = PackedLinear(layer, rows=rows)
        packed(torch.zeros(1, layer.in_features, dtype=layer.weight.dtype))
    except (RuntimeError, AttributeError, NotImplementedError):  # a build of torch without oneDNN
        return layer
    return packed
