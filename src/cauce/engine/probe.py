"""The load-time probe of the engine: does it say of its own tokens what the model's plain forward says?

A few tokens are sampled after two short prompts, through prefill and decode as in a run; then the model, with its own
attention and its own linear layers, reads them in one plain forward each. Recorded and plain log-probabilities must
agree. A model that attends past transformers' interface, adds biases by place (ALiBi) or carries state along the row
fails here, at load, where training on wrong log-probabilities would fail nowhere. Left out: any other way to generate.
"""

import numpy as np
import torch

from cauce.engine.native import NativeEngine
from cauce.errors import ModelError
from cauce.models.load import LoadedModel
from cauce.types import Completion, GenerationRequest, Sampling

PROMPT_LENGTHS = (5, 11)
NUM_TOKENS = 4
TOLERANCE_FP32 = 1e-3  # on the largest difference; rounding stays under a hundredth of it
TOLERANCE_HALF = 0.15  # on the mean difference: bf16 keeps eight bits, and single tokens may be further off


def probed_engine(
    model: LoadedModel, *, slots: int, deterministic: bool = False, compiled: bool = True
) -> NativeEngine:
    """An engine for this model; its attention setting of before serves the plain forward.

    Raises:
        ModelError: where the engine cannot run the model, or differs from it.
    """
    plain_attention = str(model.model.config._attn_implementation)
    name = type(model.model).__name__
    try:
        engine = NativeEngine(model, slots=slots, deterministic=deterministic, compiled=compiled)
        difference = largest_difference(engine, plain_attention=plain_attention)
    except Exception as error:  # foreign model code may fail in any way where it meets an attention not its own
        raise ModelError(_refusal(f"cannot run {name} ({_first_line(error)})")) from error
    tolerance = TOLERANCE_FP32 if engine.dtype == torch.float32 else TOLERANCE_HALF
    if not difference <= tolerance:
        text = f"gives log-probabilities that differ by {difference:.1e} from those of {name}'s plain forward"
        raise ModelError(_refusal(f"{text}, above {tolerance:g} for {engine.dtype}"))
    return engine


def largest_difference(engine: NativeEngine, *, plain_attention: str) -> float:
    """Between recorded and plain log-probabilities: the largest in float32, the mean in a shorter type."""
    requests = _requests(engine.vocabulary)
    completions = engine.generate(requests)
    with engine.plain_model(plain_attention) as plain, torch.inference_mode():
        differences = [
            _difference(plain, request.prompt_ids, completion)
            for request, completion in zip(requests, completions, strict=True)
        ]
    difference_N = np.concatenate(differences)
    if not np.isfinite(difference_N).all():
        return float("inf")
    return float(difference_N.max() if engine.dtype == torch.float32 else difference_N.mean())


def _requests(vocabulary: int) -> list[GenerationRequest]:
    random = np.random.default_rng(0)
    return [
        GenerationRequest(
            task=number,
            attempt=0,
            indices=(0,),
            prompt_ids=random.integers(0, vocabulary, length, dtype=np.int32),
            sampling=Sampling(max_tokens=NUM_TOKENS, temperature=1.0, stop_token_ids=(), seed=0),
        )
        for number, length in enumerate(PROMPT_LENGTHS)
    ]


def _difference(plain: torch.nn.Module, prompt_ids: np.ndarray, completion: Completion) -> np.ndarray:
    ids_N = torch.from_numpy(np.concatenate([prompt_ids, completion.token_ids]).astype(np.int64))
    ids_N = ids_N.to(next(plain.parameters()).device)
    logits_TV = plain(input_ids=ids_N[None], use_cache=False).logits[0, len(prompt_ids) - 1 : -1].float()
    target_T = ids_N[len(prompt_ids) :, None]
    logp_T = torch.log_softmax(logits_TV, dim=-1).gather(1, target_T)[:, 0]
    return np.asarray(np.abs(logp_T.cpu().numpy() - completion.logps))


def _refusal(what: str) -> str:
    return f"the native engine {what}; set model.path to another decoder, such as Llama, Qwen or Mistral"


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
