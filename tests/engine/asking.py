"""Requests, and what a plain forward of transformers says about the answers."""

from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from cauce.engine.native import NativeEngine
from cauce.models.load import load_model
from cauce.types import Completion, GenerationRequest, Sampling


def engine_of(
    folder: Path,
    *,
    slots: int = 4,
    deterministic: bool = False,
    compiled: bool = True,
    dtype: torch.dtype = torch.float32,
) -> NativeEngine:
    model = load_model(str(folder), dtype=dtype, attention="sdpa")
    return NativeEngine(model, slots=slots, deterministic=deterministic, compiled=compiled)


def plain_model(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def ask(
    task: int,
    prompt: list[int] | np.ndarray,
    *,
    samples: int | tuple[int, ...] = 1,
    max_tokens: int = 8,
    temperature: float = 1.0,
    stop: tuple[int, ...] = (),
    seed: int = 0,
) -> GenerationRequest:
    return GenerationRequest(
        task=task,
        attempt=0,
        indices=tuple(range(samples)) if isinstance(samples, int) else samples,
        prompt_ids=np.asarray(prompt, dtype=np.int32),
        sampling=Sampling(max_tokens=max_tokens, temperature=temperature, stop_token_ids=stop, seed=seed),
    )


def random_prompt(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([length, seed]).integers(0, 256, length).astype(np.int32)


def mixed_requests(count: int, *, seed: int = 0, samples: int = 3) -> list[GenerationRequest]:
    """Prompts of 1 to 30 tokens, answers of 1 to 24, three temperatures."""
    rng = np.random.default_rng(seed)
    return [
        ask(
            task,
            random_prompt(int(rng.integers(1, 31)), task),
            samples=samples,
            max_tokens=int(rng.integers(1, 25)),
            temperature=(1.0, 0.6, 2.0)[task % 3],
            seed=seed,
        )
        for task in range(count)
    ]


def plain_logps(model: PreTrainedModel, request: GenerationRequest, completion: Completion) -> np.ndarray:
    """log_softmax(logits / temperature) of each sampled token, from one forward over the whole sequence."""
    ids = torch.from_numpy(np.concatenate([request.prompt_ids, completion.token_ids]).astype(np.int64))
    with torch.no_grad():
        logits = model(ids[None]).logits[0, len(request.prompt_ids) - 1 : -1].float()
    logp = torch.log_softmax(logits / (request.sampling.temperature or 1.0), dim=-1)
    return logp.gather(1, ids[len(request.prompt_ids) :, None])[:, 0].numpy()


def same(first: Completion, second: Completion) -> bool:
    """Bitwise equal tokens and log-probs, and the same end."""
    return (
        np.array_equal(first.token_ids, second.token_ids)
        and first.logps.tobytes() == second.logps.tobytes()
        and first.finish_reason == second.finish_reason
    )
