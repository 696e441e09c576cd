"""Attention over a packed row: every answer sees its prompt and itself, and nothing else.

Registered with transformers under the name `cauce_packed`. The model calls it in each layer with queries, keys and
values of the flat row; the layout arrives as the keyword `cauce_layout` of the model's own forward. Prompts attend in
a batch of rows [G, P]; answers attend in a batch [A, T] to their prompt's keys followed by their own. A prompt's keys
and values are gathered once per answer, so that autograd sums their gradient; the largest mask is [A, T, P + T], and
there is none over the whole row. Windows are applied to positions, not to places in the row, and per layer.

A dense mask over each group's row (a "tree") was measured beside this and is not faster: 8 groups x 8 answers, prompt
44, answer 24: 0.93 s against 0.86 s for 30 layers, forward and backward; 4.6 s against 2.4 s at 128.

Left out: soft-capped scores, attention sinks, ALiBi. A model that needs them fails the probe (models/probe.py) and
takes unshared rows instead. Letters: G prompt, A answer, P padded prompt, T padded answer, S = P + T.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from cauce.errors import ModelError
from cauce.packing import PackedBatch

NAME = "cauce_packed"


class PackedLayout:
    """Index tensors and masks of one micro-batch, made once and shared by all layers.

    Places are positions in the flat row; padding points at place 0 and is masked or dropped.
    """

    def __init__(self, packed: PackedBatch, *, device: torch.device) -> None:
        prompt_G2 = torch.from_numpy(packed.prompts_G).to(device)
        answer_A3 = torch.from_numpy(packed.answers_A).to(device)
        self.prompt_GP, self._prompt_valid_GP = _places(prompt_G2[:, 0], prompt_G2[:, 1])
        self.answer_AT, self._answer_valid_AT = _places(answer_A3[:, 0], answer_A3[:, 1])
        self._prompt_of_A = answer_A3[:, 2]
        self.key_AS = torch.cat([self.prompt_GP[self._prompt_of_A], self.answer_AT], dim=1)
        self._position_N = torch.from_numpy(packed.position_ids_N).to(device)
        self._masks: dict[tuple[int | None, torch.dtype], tuple[Tensor | None, Tensor]] = {}
        # For each place of the flat row, where its result lies behind the prompts' and then the answers'
        # rows.
        valid = torch.cat([self._prompt_valid_GP.flatten(), self._answer_valid_AT.flatten()])
        place = torch.cat([self.prompt_GP.flatten(), self.answer_AT.flatten()])
        self.restore_N = torch.empty(packed.num_tokens, dtype=torch.int64, device=device)
        self.restore_N[place[valid]] = torch.nonzero(valid)[:, 0]

    def masks(self, window: int | None, dtype: torch.dtype) -> tuple[Tensor | None, Tensor]:
        """Additive masks of prompts (None: plain causal) and answers, for layers with this window."""
        key = (window, dtype)
        if key not in self._masks:
            prompt_length = self.prompt_GP.shape[1]
            prompts = None
            if window is not None and prompt_length > window:
                place_1P = torch.arange(prompt_length, device=self.prompt_GP.device)[None]
                prompts = _additive(_sees(place_1P, place_1P, window), dtype)
            valid_AS = torch.cat([self._prompt_valid_GP[self._prompt_of_A], self._answer_valid_AT], dim=1)
            sees_ATS = _sees(self._position_N[self.answer_AT], self._position_N[self.key_AS], window)
            self._masks[key] = prompts, _additive(sees_ATS & valid_AS[:, None, :], dtype)
        return self._masks[key]


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    cauce_layout: PackedLayout | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function that transformers calls in every layer; [1, H, N, D] in, [1, N, H, D] out."""
    if cauce_layout is None or attention_mask is not None:
        raise ModelError(f"{NAME} attention works on packed rows only: call the model through models/forward.py")
    if kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
        raise ModelError(f"{NAME} attention knows neither soft-capped scores nor attention sinks")
    arguments = (query, key, value, cauce_layout, kwargs.get("sliding_window"), scaling)
    if torch.is_grad_enabled():
        # Made again in the backward pass: the gathered float32 rows would be a third of all activations, for
        # 3 %.
        return checkpoint(_attention, *arguments, use_reentrant=False, preserve_rng_state=False), None
    return _attention(*arguments), None


def _attention(
    query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, window: int | None, scaling: float | None
) -> Tensor:
    query_NHD, key_NHD, value_NHD = (_on_cpu_float32(x[0].transpose(0, 1)) for x in (query, key, value))
    prompt_mask, answer_mask = layout.masks(window, query_NHD.dtype)
    prompts = layout.prompt_GP
    rows = _rows(query_NHD, prompts), _rows(key_NHD, prompts), _rows(value_NHD, prompts)
    parts = [_attend(*rows, mask=prompt_mask, scaling=scaling)]
    if layout.answer_AT.shape[1] > 0:  # 0: every answer has one token, which its prompt predicts
        keys = layout.key_AS
        rows = _rows(query_NHD, layout.answer_AT), _rows(key_NHD, keys), _rows(value_NHD, keys)
        parts.append(_attend(*rows, mask=answer_mask, scaling=scaling))
    return torch.cat(parts).index_select(0, layout.restore_N).to(query.dtype)[None]


def _on_cpu_float32(x: Tensor) -> Tensor:
    """On the CPU these short rows are 1.4 to 1.8 times as fast in float32 as in bf16, and more exact."""
    return x.float() if x.device.type == "cpu" and x.dtype != torch.float64 else x


def _rows(x_NHD: Tensor, places: Tensor) -> Tensor:
    """Gather a batch of rows: [B, H, L, D]."""
    gathered = x_NHD.index_select(0, places.flatten())
    return gathered.unflatten(0, places.shape).transpose(1, 2)


def _attend(query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None, scaling: float | None) -> Tensor:
    """Rows [B, H, L, D] -> [B * L, H, D]; no mask means plain causal."""
    out = nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out.transpose(1, 2).flatten(0, 1)


def _places(start: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
    """Padded places in the flat row [B, max length], and which of them are real."""
    offset = torch.arange(int(length.max()), device=start.device)
    valid = offset < length[:, None]
    return torch.where(valid, start[:, None] + offset, 0), valid


def _sees(query_position: Tensor, key_position: Tensor, window: int | None) -> Tensor:
    """Which queries see which keys. Padded queries stand at position 0, where they see their prompt's first
    token: a row of nothing would make NaN."""
    distance = query_position[:, :, None] - key_position[:, None, :]
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


def _additive(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, L, S] of truth to [B, 1, L, S] of 0 and a number so low that it leaves no weight, yet no NaN."""
    return torch.zeros_like(allowed, dtype=dtype).masked_fill(~allowed, torch.finfo(dtype).min)[:, None]


AttentionInterface.register(NAME, packed_attention)
