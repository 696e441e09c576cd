"""The attention function that the native engine registers with transformers, and what it computes.

A model runs its own forward; where it attends, transformers calls `engine_attention`, which hands queries,
keys and values to the plan passed through the forward's keyword arguments. A PrefillPlan attends inside each
prompt of a packed row and keeps the keys and values; a DecodePlan writes one new key per slot into the slot
cache and attends over the live part of it. Masks are made from positions, one per window size, so that
sliding windows stay sliding. Left out on purpose: attention sinks and models that do not attend through
transformers' interface; both are refused with words.

Letters: R query heads that share one key head, S slots, L live length, P tokens of all packed prompts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface

from cauce.engine.cache import RowCache
from cauce.errors import ModelError

ENGINE_ATTENTION = "cauce_engine"
HIDDEN = -1e30  # added to the score of a place that is not attended to
PLAN = "cauce_plan"  # the keyword argument of the model's forward that carries the plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """One layer's queries [B, H, T, D], keys and values [B, Hk, T, D] and how to attend with them."""

    layer: int
    query: Tensor
    key: Tensor
    value: Tensor
    scaling: float
    window: int | None
    softcap: float | None


class AttentionPlan(Protocol):
    """What one forward of the engine does where the model attends."""

    def attend(self, heads: Heads) -> Tensor:
        """The attention output [B, T, H, D] of one layer."""


def engine_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function that transformers calls; the engine's plan arrives in `kwargs`."""
    plan: AttentionPlan | None = kwargs.get(PLAN)
    if plan is None:
        raise ModelError(
            f"a model with attention {ENGINE_ATTENTION!r} ran outside the engine; for a plain forward call "
            "model.set_attn_implementation('sdpa') first"
        )
    if kwargs.get("s_aux") is not None:
        raise ModelError(f"{type(module).__name__} uses attention sinks, which the native engine does not compute")
    heads = Heads(
        layer=int(module.layer_idx),  # type: ignore[arg-type]  # set by transformers on every attention module
        query=query,
        key=key,
        value=value,
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=kwargs.get("sliding_window"),
        softcap=kwargs.get("softcap"),
    )
    return plan.attend(heads), None


AttentionInterface.register(ENGINE_ATTENTION, engine_attention)


@dataclass(slots=True, kw_only=True)
class PrefillPlan:
    """Whole prompts, one after another in one row; each attends to itself only."""

    lengths: Sequence[int]
    keys: dict[int, Tensor] = field(default_factory=dict)  # layer -> [Hk, P, D]
    values: dict[int, Tensor] = field(default_factory=dict)

    def attend(self, heads: Heads) -> Tensor:
        self.keys[heads.layer], self.values[heads.layer] = heads.key[0], heads.value[0]
        num_heads, num_tokens = heads.query.shape[1:3]
        out = heads.query.new_empty(1, num_tokens, num_heads, heads.value.shape[-1])
        start = 0
        for length in self.lengths:
            part = slice(start, start + length)
            mask = _prompt_mask(length, heads)
            attended = _attend(heads.query[:, :, part], heads.key[:, :, part], heads.value[:, :, part], mask, heads)
            out[:, part] = attended.transpose(1, 2)
            start += length
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeLayout:
    """Who attends to what in one decode step: S rows of the batch, P prompts, at most G rows for each."""

    answer_S: Tensor  # int64: tokens of the answer in the cache, which is where the new one goes
    prompt_S: Tensor  # int64: length of each row's prompt
    prompt_P: Tensor  # int64: length of each prompt; 0 where a row of the prompts' cache is unused
    row_PG: Tensor  # int64: the rows that attend to each prompt; what is left over repeats row 0 and is not read
    back_S: Tensor  # int64: where in the flattened row_PG each row is
    answer_spans: Sequence[tuple[Tensor | slice, int]]
    prompt_spans: Sequence[tuple[Tensor | slice, int]]


class DecodePlan:
    """One new token for each of the first rows of the answers' cache.

    A token attends to two places: its prompt, whose keys and values all samples of that prompt share, and its own
    answer. Each gives an average of values and the log of its summed weights; together they are what one softmax over
    both would give: own + (prompt - own) * sigmoid(prompt's log-sum - own log-sum). The queries of all samples of a
    prompt become rows of one product, so a prompt is read once per step.

    `layout` says which rows share a prompt and over which lengths to attend: one span over the longest live length, or,
    for deterministic decoding, one for each length bucket and a prompt row of its own for each sample, so that a row's
    arithmetic depends on its own lengths only.
    """

    def __init__(self, *, prompts: RowCache, answers: RowCache, layout: DecodeLayout) -> None:
        self._prompts, self._answers, self._layout = prompts, answers, layout
        self._masks: dict[tuple[str, int, int | None], Tensor] = {}
        self._place_S = (
            layout.answer_S + torch.arange(len(layout.answer_S), device=layout.answer_S.device) * answers.capacity
        )
        self._gather = torch.empty(0, dtype=torch.int64)

    def attend(self, heads: Heads) -> Tensor:
        num_rows, num_heads, _, width = heads.query.shape
        num_keys = heads.key.shape[1]
        num_shared = num_heads // num_keys
        self._answers.append(heads.layer, self._place_S, heads.key[:, :, 0], heads.value[:, :, 0])
        # The query heads of one key head become rows of one product: keys and values are never expanded.
        query = heads.query.reshape(num_rows, num_keys, num_shared, width)
        own, own_lse = self._attend_spans("answer", query, self._answers, heads)
        together, lse = self._attend_spans("prompt", self._stack(query), self._prompts, heads)
        prompt, prompt_lse = self._unstack(together, num_shared), self._unstack(lse[..., None], num_shared)
        weight = torch.sigmoid(prompt_lse - own_lse[..., None]).to(own.dtype)
        return torch.lerp(own, prompt, weight).reshape(num_rows, 1, num_heads, width)

    def _stack(self, query: Tensor) -> Tensor:
        """[S, Hk, R, D] -> [P, Hk, G * R, D]: below each other what attends to one prompt, G rows of the batch."""
        num_keys = query.shape[1]
        row_PG = self._layout.row_PG
        if len(self._gather) != row_PG.numel() * num_keys:
            self._gather = (
                row_PG[:, None] * num_keys + torch.arange(num_keys, device=row_PG.device)[:, None]
            ).flatten()
        return query.flatten(0, 1).index_select(0, self._gather).view(len(row_PG), num_keys, -1, query.shape[3])

    def _unstack(self, stacked: Tensor, num_shared: int) -> Tensor:
        """[P, Hk, G * R, D] -> [S, Hk, R, D]."""
        num_prompts, num_keys, _, width = stacked.shape
        rows = stacked.transpose(1, 2).reshape(num_prompts * self._layout.row_PG.shape[1], -1)
        return rows.index_select(0, self._layout.back_S).view(-1, num_shared, num_keys, width).transpose(1, 2)

    def _attend_spans(self, part: str, query: Tensor, cache: RowCache, heads: Heads) -> tuple[Tensor, Tensor]:
        """Attention of each span over its length, and the log of its summed weights."""
        spans = self._layout.answer_spans if part == "answer" else self._layout.prompt_spans
        if len(spans) == 1:
            rows, length = spans[0]
            return attend_with_lse(query, *cache.head(heads.layer, rows, length), self._mask(part, 0, heads), heads)
        out, lse = torch.empty_like(query), query.new_empty(query.shape[:3], dtype=torch.float32)
        for number, (rows, length) in enumerate(spans):
            key, value = cache.head(heads.layer, rows, length)
            out[rows], lse[rows] = attend_with_lse(query[rows], key, value, self._mask(part, number, heads), heads)
        return out, lse

    def _mask(self, part: str, number: int, heads: Heads) -> Tensor:
        """Additive mask of one span, shared by all layers with the same window. It is finite: a prompt that a window
        has left behind must come out with no weight, and not as no number."""
        found = self._masks.get((part, number, heads.window))
        if found is None:
            layout = self._layout
            rows, length = (layout.answer_spans if part == "answer" else layout.prompt_spans)[number]
            column = torch.arange(length, device=layout.answer_S.device)
            if part == "answer":
                hidden = column > layout.answer_S[rows, None]  # [S, L]
                absolute, position = column + layout.prompt_S[rows, None], layout.answer_S[rows, None]
                position = position + layout.prompt_S[rows, None]
                if heads.window is not None:
                    hidden = hidden | (absolute <= position - heads.window)
                hidden = hidden[:, None, None]
            else:
                hidden = (column >= layout.prompt_P[rows, None])[:, None, None]  # [P, 1, 1, L]
                if heads.window is not None:
                    position_PG = (layout.answer_S + layout.prompt_S)[layout.row_PG[rows]]
                    left = column <= position_PG[:, :, None] - heads.window
                    num_shared = heads.query.shape[1] // heads.key.shape[1]
                    hidden = hidden | left.repeat_interleave(num_shared, dim=1)[:, None]
            found = torch.zeros(hidden.shape, dtype=heads.query.dtype, device=hidden.device).masked_fill_(
                hidden, HIDDEN
            )
            self._masks[part, number, heads.window] = found
        return found


def _prompt_mask(length: int, heads: Heads) -> Tensor | None:
    """None stands for plain causal; a prompt beyond the window, or capped scores, need the mask itself."""
    window = heads.window if heads.window is not None and length > heads.window else None
    if window is None and heads.softcap is None:
        return None
    position = torch.arange(length, device=heads.query.device)
    hidden = position > position[:, None]
    if window is not None:
        hidden |= position <= position[:, None] - window
    mask = torch.zeros(length, length, dtype=heads.query.dtype, device=heads.query.device)
    return mask.masked_fill_(hidden, float("-inf"))


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, heads: Heads) -> Tensor:
    """softmax(scaling * Q K^T + mask) V, scores capped where the model caps them; mask None is causal."""
    shares = query.shape[1] != key.shape[1]
    if heads.softcap is None:
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=heads.scaling, enable_gqa=shares
        )
    if shares:
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        value = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
    scores = torch.matmul(query, key.transpose(2, 3)).float() * heads.scaling
    scores = torch.tanh(scores / heads.softcap) * heads.softcap
    if mask is not None:
        scores = scores + mask
    return torch.matmul(torch.softmax(scores, dim=-1).to(value.dtype), value)


def attend_with_lse(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, heads: Heads) -> tuple[Tensor, Tensor]:
    """Attention [B, Hk, T, D] and, in float32, the log of the summed weights [B, Hk, T]."""
    if heads.softcap is None and query.device.type == "cpu":
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = flash(query, key, value, 0.0, False, attn_mask=mask, scale=heads.scaling)
        return out, lse
    scores = torch.matmul(query, key.transpose(2, 3)).float() * heads.scaling
    if heads.softcap is not None:
        scores = torch.tanh(scores / heads.softcap) * heads.softcap
    scores = scores + mask
    lse = scores.logsumexp(-1)
    return torch.matmul((scores - lse[..., None]).exp().to(value.dtype), value), lse
