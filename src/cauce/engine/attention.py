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

from cauce.engine.cache import SlotCache
from cauce.errors import ModelError

ENGINE_ATTENTION = "cauce_engine"
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


@dataclass(slots=True, kw_only=True)
class DecodePlan:
    """One new token for each of the first rows of the slot cache.

    `spans` are the runs of rows that attend over the same length: one span over the longest live length, or,
    for deterministic decoding, one for each length bucket, so that a row's arithmetic depends on its own
    length only.
    """

    cache: SlotCache
    position_S: Tensor  # int64: where each row's new key goes
    spans: Sequence[tuple[Tensor | slice, int]]
    masks: dict[tuple[int, int | None], Tensor] = field(default_factory=dict)

    def attend(self, heads: Heads) -> Tensor:
        num_rows, num_heads, _, _ = heads.query.shape
        keys, values = self.cache.keys[heads.layer], self.cache.values[heads.layer]
        self.cache.append(heads.layer, self.position_S, heads.key[:, :, 0], heads.value[:, :, 0])
        num_shared = num_heads // heads.key.shape[1]
        # The query heads of one key head become rows of one product: keys and values are never expanded.
        query = heads.query.reshape(num_rows, heads.key.shape[1], num_shared, -1)
        if len(self.spans) == 1 and isinstance(self.spans[0][0], slice):
            length = self.spans[0][1]
            mask = self._mask(0, heads)
            part = _attend(query, keys[:num_rows, :, :length], values[:num_rows, :, :length], mask, heads)
            return part.reshape(num_rows, 1, num_heads, -1)
        out = query.new_empty(*query.shape[:3], values.shape[-1])
        for number, (rows, length) in enumerate(self.spans):
            mask = self._mask(number, heads)
            out[rows] = _attend(query[rows], keys[rows, :, :length], values[rows, :, :length], mask, heads)
        return out.reshape(num_rows, 1, num_heads, -1)

    def _mask(self, number: int, heads: Heads) -> Tensor:
        """Additive mask [S, 1, 1, L] of one span, shared by all layers with the same window."""
        mask = self.masks.get((number, heads.window))
        if mask is None:
            rows, length = self.spans[number]
            position = self.position_S[rows, None]
            column = torch.arange(length, device=position.device)
            hidden = column > position
            if heads.window is not None:
                hidden |= column <= position - heads.window
            mask = torch.zeros(hidden.shape, dtype=heads.query.dtype, device=position.device)
            mask = mask.masked_fill_(hidden, float("-inf"))[:, None, None]
            self.masks[number, heads.window] = mask
        return mask


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
