"""The packed forward: log-probabilities and entropies of the trained tokens of one micro-batch.

Two paths, and the model's attention setting says which: with `cauce_packed` (see models/packed_attention.py) each
group's prompt is read once; otherwise every answer becomes a plain right-padded row with its own prompt, which is the
reference and the way for models that fail the probe. Both make logits through the model's own head, so that scaled or
capped logits stay what they are, for positions that predict a trained token alone, and in chunks: a vocabulary of
49,152 is 200 kB per token in float32. Temperature is applied before anything else; the log-softmax is float32 even
where the model computes in bf16. The entropy carries no gradient.

Between packing and the losses. Letters: N packed token, M trained token, V vocabulary, B row.
"""

import inspect
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from cauce.errors import DataError, ModelError
from cauce.models import packed_attention
from cauce.models.remaking import remade
from cauce.packing import PackedBatch

# Float32 logits in flight at a time, and logits kept for the backward pass; beyond the latter they are made
# again.
CHUNK_BYTES = 64 * 2**20
KEEP_BYTES = 128 * 2**20
CACHE_BYTES = 2 * 2**20  # of float32 logits at a time, on a CPU
LOWEST = -1e4  # below the highest logit: a probability of 0, and not a number that 0 times it would be NaN


def shares_prompts(model: PreTrainedModel) -> bool:
    """Whether this model reads packed rows; micro-batches must be packed accordingly."""
    return bool(model.config._attn_implementation == packed_attention.NAME)


def vocabulary_size(model: PreTrainedModel) -> int:
    """Rows of the embedding, which may be more than the tokenizer has words."""
    embedding = model.get_input_embeddings()
    assert isinstance(embedding, nn.Embedding)
    return embedding.num_embeddings


def token_logps(model: PreTrainedModel, packed: PackedBatch, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy of each trained token, float32 [M]; only the first carries gradient."""
    device = next(model.parameters()).device
    check_tokens(packed, vocabulary_size(model))
    target_M = torch.from_numpy(packed.target_M).to(device)
    run = _shared if shares_prompts(model) else _plain_rows
    with remade(model) if packed.is_remade and torch.is_grad_enabled() else nullcontext():
        parts = run(model, packed, target_M, temperature)
    logp_M, entropy_M = (torch.cat(part) for part in zip(*parts, strict=True))
    if len(logp_M) != packed.num_trained:
        raise ModelError(f"the model gave {len(logp_M)} log-probs for {packed.num_trained} trained tokens")
    return logp_M, entropy_M


def check_tokens(packed: PackedBatch, vocabulary: int) -> None:
    """Raises DataError for a token that the model does not have."""
    highest = int(max(packed.token_ids_N.max(), packed.target_M.max()))
    if highest >= vocabulary:
        raise DataError(f"token id {highest} is outside the model's vocabulary of {vocabulary}: wrong tokenizer?")


def logps_of(logits_MV: Tensor, target_M: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy, under softmax(logits / temperature)."""
    if logits_MV.shape[:-1] != target_M.shape:
        raise ModelError(f"{list(logits_MV.shape[:-1])} positions of logits for {list(target_M.shape)} tokens")
    return _TokenLogp.apply(logits_MV, target_M, temperature)


class _TokenLogp(torch.autograd.Function):
    """log softmax at one token per row. Keeps the logits as they came (bf16 stays bf16) and the normaliser, and makes
    the probabilities again in the backward pass: half to a third of what autograd would keep. Goes over a few rows at
    a time, so that on a CPU every pass but the first finds them in its cache."""

    @staticmethod
    def forward(ctx: Any, logits_MV: Tensor, target_M: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(logits_MV.dtype, torch.float32)
        normaliser_M, logp_M, entropy_M = torch.empty(3, len(logits_MV), dtype=dtype, device=logits_MV.device)
        for rows in _few_rows(logits_MV):
            x_RV = _scaled(logits_MV[rows], dtype, temperature)
            highest_R = x_RV.amax(-1)
            x_RV.sub_(highest_R[:, None]).clamp_(min=LOWEST)
            at_target_R = x_RV.gather(-1, target_M[rows, None])[:, 0]
            exp_RV = x_RV.exp()
            sum_R = exp_RV.sum(-1)
            log_sum_R = sum_R.log()
            normaliser_M[rows] = highest_R + log_sum_R
            logp_M[rows] = at_target_R - log_sum_R
            entropy_M[rows] = log_sum_R - exp_RV.mul_(x_RV).sum(-1) / sum_R
        ctx.save_for_backward(logits_MV, target_M, normaliser_M)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropy_M)
        return logp_M, entropy_M

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_M: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        # d logp / d logits = (one_hot(target) - softmax(logits / T)) / T
        logits_MV, target_M, normaliser_M = ctx.saved_tensors
        grad_MV = torch.empty_like(logits_MV)
        grad_M = grad_M / ctx.temperature
        for rows in _few_rows(logits_MV):
            x_RV = _scaled(logits_MV[rows], normaliser_M.dtype, ctx.temperature)
            x_RV.sub_(normaliser_M[rows, None]).exp_().mul_(-grad_M[rows, None])
            grad_MV[rows] = x_RV.scatter_add_(-1, target_M[rows, None], grad_M[rows, None])
        return grad_MV, None, None


def _few_rows(logits_MV: Tensor) -> list[slice]:
    """Rows that fit a CPU's cache in float32; elsewhere all of them."""
    num, vocabulary = logits_MV.shape
    step = max(1, CACHE_BYTES // (4 * vocabulary)) if logits_MV.device.type == "cpu" else max(1, num)
    return [slice(at, at + step) for at in range(0, num, step)]


def _scaled(logits_RV: Tensor, dtype: torch.dtype, temperature: float) -> Tensor:
    """A copy of its own, in this precision."""
    copy = logits_RV.to(dtype, copy=True)
    return copy if temperature == 1 else copy.div_(temperature)


def _shared(
    model: PreTrainedModel, packed: PackedBatch, target_M: Tensor, temperature: float
) -> list[tuple[Tensor, Tensor]]:
    """The flat row through the decoder; then logits of the predicting positions, chunk by chunk."""
    device = target_M.device
    decoder: Any = model.base_model
    outputs = decoder(
        input_ids=torch.from_numpy(packed.token_ids_N)[None].to(device),
        position_ids=torch.from_numpy(packed.position_ids_N)[None].to(device),
        use_cache=False,
        cauce_layout=packed_attention.PackedLayout(packed, device=device),
    )
    predictor_M = torch.from_numpy(packed.predictor_M).to(device)
    hidden_MD = outputs.last_hidden_state[0].index_select(0, predictor_M)

    def chunk_logps(hidden: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return logps_of(_own_head(model, outputs, hidden), target, temperature)

    vocabulary = vocabulary_size(model)
    rows = max(1, CHUNK_BYTES // (4 * vocabulary))
    remake = torch.is_grad_enabled() and len(target_M) * vocabulary * hidden_MD.element_size() > KEEP_BYTES
    parts = []
    for hidden, target in zip(hidden_MD.split(rows), target_M.split(rows), strict=True):
        if remake:
            parts.append(checkpoint(chunk_logps, hidden, target, use_reentrant=False, preserve_rng_state=False))
        else:
            parts.append(chunk_logps(hidden, target))
    return parts


def _own_head(model: PreTrainedModel, outputs: Any, hidden_MD: Tensor) -> Tensor:
    """The model's own way from hidden states to logits [M, V].

    What happens there (scaling, capping) is code inside each model's forward, so that forward is called with
    a decoder that returns these hidden states."""
    given = type(outputs)(last_hidden_state=hidden_MD[None])
    decoder: Any = model.base_model
    no_tokens = torch.zeros(1, len(hidden_MD), dtype=torch.int64, device=hidden_MD.device)
    decoder.forward = lambda *args, **kwargs: given
    try:
        logits = model(input_ids=no_tokens, use_cache=False).logits
    finally:
        del decoder.forward  # uncovers the class's own
    return logits[0]


def _plain_rows(
    model: PreTrainedModel, packed: PackedBatch, target_M: Tensor, temperature: float
) -> list[tuple[Tensor, Tensor]]:
    """Prompt and answer of each sequence as a right-padded row through the model's own attention."""
    device = target_M.device
    starts = packed.prompts_G[packed.answers_A[:, 2]]  # start and length of each answer's prompt
    lengths = torch.from_numpy(starts[:, 1] + packed.answers_A[:, 1])
    longest = int(lengths.max())
    row_BL = torch.zeros(len(lengths), longest, dtype=torch.int64)
    tokens_N = torch.from_numpy(packed.token_ids_N)
    for b, ((prompt_at, prompt_length), (at, length, _)) in enumerate(zip(starts, packed.answers_A, strict=True)):
        row_BL[b, :prompt_length] = tokens_N[prompt_at : prompt_at + prompt_length]
        row_BL[b, prompt_length : prompt_length + length] = tokens_N[at : at + length]
    valid_BL = torch.arange(longest) < lengths[:, None]
    answer_M = torch.from_numpy(packed.answer_M)
    # Token t of an answer is predicted by place prompt + t - 1 of its row.
    predictor_M = torch.from_numpy(starts[packed.answer_M, 1] + packed.offset_M - 1)

    # Logits from the earliest predictor on; models without `logits_to_keep` make all of them.
    first = int(predictor_M.min())
    keep: dict[str, int] = {}
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        keep["logits_to_keep"] = longest - first
    vocabulary = vocabulary_size(model)
    rows = max(1, CHUNK_BYTES // (4 * vocabulary * (longest - first)))
    parts = []
    for at in range(0, len(row_BL), rows):
        chosen = (answer_M >= at) & (answer_M < at + rows)
        logits_BLV = model(
            input_ids=row_BL[at : at + rows].to(device),
            attention_mask=valid_BL[at : at + rows].to(device, torch.int64),
            use_cache=False,
            **keep,
        ).logits
        place_M = predictor_M[chosen] - (longest - logits_BLV.shape[1])
        logits_MV = logits_BLV[(answer_M[chosen] - at).to(device), place_M.to(device)]
        parts.append(logps_of(logits_MV, target_M[chosen.to(device)], temperature))
    return parts
