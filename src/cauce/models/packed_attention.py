"""Attention over a packed row: every answer sees its prompt and itself, and nothing else.

Registered with transformers under the name `cauce_packed`. The model calls it in each layer with queries, keys and
values of the flat row; the layout arrives as the keyword `cauce_layout` of the model's own forward. The work is done in
tiles (tiled_attention.py). Windows are applied to positions, not to places in the row, and per layer.

Left out: soft-capped scores, attention sinks, ALiBi. A model that needs them fails the probe (models/probe.py) and
takes unshared rows instead.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from cauce.errors import ModelError
from cauce.models.tiled_attention import Tile, tiled_attention, tiles_of
from cauce.packing import PackedBatch

NAME = "cauce_packed"


class PackedLayout:
    """The tiles of one micro-batch, made once for each kind of layer."""

    def __init__(self, packed: PackedBatch, *, device: torch.device) -> None:
        self._packed, self._device = packed, device
        self._tiles: dict[int | None, list[Tile]] = {}

    def tiles(self, window: int | None) -> list[Tile]:
        if window not in self._tiles:
            self._tiles[window] = tiles_of(self._packed, window, device=self._device)
        return self._tiles[window]


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
    """The function that transformers calls in every layer; [1, H, N, E] in, [1, N, H, E] out."""
    if cauce_layout is None or attention_mask is not None:
        raise ModelError(f"{NAME} attention works on packed rows only: call the model through models/forward.py")
    if kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
        raise ModelError(f"{NAME} attention knows neither soft-capped scores nor attention sinks")
    window: int | None = kwargs.get("sliding_window")
    query_NHE, key_NHE, value_NHE = (x[0].transpose(0, 1) for x in (query, key, value))
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    tiles = cauce_layout.tiles(window)
    return tiled_attention(query_NHE, key_NHE, value_NHE, tiles, window=window, scaling=scaling)[None], None


AttentionInterface.register(NAME, packed_attention)
