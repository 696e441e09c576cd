"""Attention of a packed row in tiles, so that its memory does not grow with the lengths of prompts and answers.

Prompts and answers are cut into blocks of at most QUERIES tokens. A block sees keys of consecutive positions: the end
of its prompt that its window reaches, and its own segment up to itself. Blocks with about as many keys stand side by
side in a padded tile of at most TILE_PAIRS pairs of query and key. Sorted by their keys they waste little on padding,
however different the answers are; a step of short answers is a few tiles, an answer of 1,000 is four blocks. Of a tile
nothing is kept: the backward pass attends again, tile by tile, so that what autograd holds of a layer is queries, keys
and values of the row, with no copy of a prompt for each answer and no mask.

Exact: a block has all its keys at once, so there is no running softmax to merge. Left out: what packed_attention.py,
which calls this, refuses. Letters: N packed token, H heads, E width of a head, B block of a tile, Q queries, S keys.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from cauce.packing import PackedBatch

QUERIES = 256  # of a block; more waste pairs above the diagonal, fewer gather the same keys more often
# Of query and key, padding included. A CPU wants the mask in its cache (a third faster than 2**22), a GPU few launches.
TILE_PAIRS = {"cpu": 2**18, "cuda": 2**23}
WASTE = 0.25  # of a tile's pairs at most, where it has several blocks ...
FREE_WASTE = 2**14  # ... or so many: another tile would cost as much
NOWHERE = 2**31 - 1  # the position of a padded key, which nobody sees


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Blocks side by side. Places are positions in the row; padding points at place 0."""

    query_BQ: Tensor  # int64: places
    key_BS: Tensor  # int64: places
    query_position_BQ: Tensor  # int32; a padded query stands where the last one does
    key_position_BS: Tensor  # int32
    valid: Tensor  # int64: which of the B * Q queries are real
    place: Tensor  # int64: their places

    def sees(self, window: int | None) -> Tensor:
        """Which queries see which keys, bool [B, 1, Q, S]: at least one each."""
        query, key = self.query_position_BQ[:, None, :, None], self.key_position_BS[:, None, None, :]
        seen = key <= query
        return seen if window is None else seen & (key > query - window)


@dataclass(frozen=True, slots=True)
class _Block:
    queries: np.ndarray  # places
    keys: np.ndarray
    first_query: int  # positions
    first_key: int

    @property
    def pairs(self) -> int:
        return len(self.queries) * len(self.keys)


def tiles_of(packed: PackedBatch, window: int | None, *, device: torch.device) -> list[Tile]:
    """The row in tiles, for layers with this window."""
    blocks = sorted(_blocks(packed, window), key=lambda block: (len(block.keys), len(block.queries)), reverse=True)
    limit = TILE_PAIRS.get(device.type, TILE_PAIRS["cuda"])
    tiles: list[Tile] = []
    chosen: list[_Block] = []
    for block in blocks:
        if chosen and not _go_together([*chosen, block], limit):
            tiles.append(_tile(chosen, device))
            chosen = []
        chosen.append(block)
    return [*tiles, _tile(chosen, device)] if chosen else tiles


def tiled_attention(
    query_NHE: Tensor, key_NHE: Tensor, value_NHE: Tensor, tiles: Sequence[Tile], *, window: int | None, scaling: float
) -> Tensor:
    """softmax(scaling * query key^T) value over the keys that each query sees: [N, H, E]."""
    return _TiledAttention.apply(query_NHE, key_NHE, value_NHE, tiles, window, scaling)


class _TiledAttention(torch.autograd.Function):
    """Keeps its inputs alone."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, tiles: Sequence[Tile], window: int | None, scaling: float
    ) -> Tensor:
        out = query.new_empty(*query.shape[:2], value.shape[2])
        for tile in tiles:
            attended = _attend(_gathered(tile, query, key, value), tile.sees(window), scaling)
            out[tile.place] = attended.transpose(1, 2).flatten(0, 1)[tile.valid].to(out.dtype)
        ctx.save_for_backward(query, key, value)
        ctx.tiles, ctx.window, ctx.scaling = tiles, window, scaling
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = ctx.saved_tensors
        # A prompt's keys get a gradient from every answer: the sum is float32 also where they are bf16.
        dtype = torch.promote_types(query.dtype, torch.float32)
        grad_query, grad_key, grad_value = (torch.zeros_like(x, dtype=dtype) for x in (query, key, value))
        for tile in ctx.tiles:
            inputs = _gathered(tile, query, key, value)
            for x in inputs:
                x.requires_grad_()
            with torch.enable_grad():
                attended = _attend(inputs, tile.sees(ctx.window), ctx.scaling)
                flat = attended.transpose(1, 2).flatten(0, 1)
            given = torch.zeros_like(flat)
            given[tile.valid] = grad[tile.place].to(flat.dtype)
            query_part, key_part, value_part = torch.autograd.grad(flat, inputs, given)
            grad_query[tile.place] = _rows(query_part)[tile.valid].to(dtype)
            # Padded keys have the place of another one, and a gradient of 0.
            for into, part in ((grad_key, key_part), (grad_value, value_part)):
                into.index_add_(0, tile.key_BS.flatten(), _rows(part).to(dtype))
        return (*(x.to(query.dtype) for x in (grad_query, grad_key, grad_value)), None, None, None)


def _gathered(tile: Tile, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """Rows of a tile [B, H, Q or S, E]. On a CPU they are float32, which is 1.4 to 1.8 times as fast there as bf16, and
    more exact."""
    gathered = []
    for x, places in ((query, tile.query_BQ), (key, tile.key_BS), (value, tile.key_BS)):
        rows = x.detach().index_select(0, places.flatten()).unflatten(0, places.shape).transpose(1, 2)
        gathered.append(rows.float() if x.device.type == "cpu" and x.dtype != torch.float64 else rows)
    return gathered


def _rows(x_BHLE: Tensor) -> Tensor:
    return x_BHLE.transpose(1, 2).flatten(0, 1)


def _attend(rows: Sequence[Tensor], mask: Tensor, scaling: float) -> Tensor:
    query, key, value = rows
    is_grouped = query.shape[1] != key.shape[1]
    if is_grouped and query.device.type != "cpu":  # no fused kernel there takes both a mask and shared key heads
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
        is_grouped = False
    return nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scaling, enable_gqa=is_grouped
    )


def _blocks(packed: PackedBatch, window: int | None) -> Iterator[_Block]:
    for start, length in packed.prompts_G:
        yield from _blocks_of(int(start), int(length), np.arange(0), window)
    for start, length, prompt in packed.answers_A:
        prompt_start, prompt_length = packed.prompts_G[prompt]
        yield from _blocks_of(int(start), int(length), np.arange(prompt_start, prompt_start + prompt_length), window)


def _blocks_of(start: int, length: int, before: np.ndarray, window: int | None) -> Iterator[_Block]:
    """One segment with the places of what comes before it."""
    places = np.concatenate([before, np.arange(start, start + length)])
    for first in range(len(before), len(places), QUERIES):
        end = min(first + QUERIES, len(places))
        first_key = 0 if window is None else max(0, first - window + 1)
        yield _Block(places[first:end], places[first_key:end], first, first_key)


def _go_together(blocks: Sequence[_Block], limit: int) -> bool:
    pairs = len(blocks) * max(len(block.queries) for block in blocks) * max(len(block.keys) for block in blocks)
    wasted = pairs - sum(block.pairs for block in blocks)
    return pairs <= limit and wasted <= max(WASTE * pairs, FREE_WASTE)


def _tile(blocks: Sequence[_Block], device: torch.device) -> Tile:
    num_queries, num_keys = (max(len(side) for side in sides) for sides in zip(*map(_sides, blocks), strict=True))
    query = np.zeros((len(blocks), num_queries), np.int64)
    key = np.zeros((len(blocks), num_keys), np.int64)
    query_position = np.empty((len(blocks), num_queries), np.int32)
    key_position = np.full((len(blocks), num_keys), NOWHERE, np.int32)
    is_valid = np.zeros((len(blocks), num_queries), bool)
    for b, block in enumerate(blocks):
        q, s = len(block.queries), len(block.keys)
        query[b, :q], key[b, :s] = block.queries, block.keys
        query_position[b] = block.first_query + np.minimum(np.arange(num_queries), q - 1)
        key_position[b, :s] = block.first_key + np.arange(s)
        is_valid[b, :q] = True
    arrays = {
        "query_BQ": query,
        "key_BS": key,
        "query_position_BQ": query_position,
        "key_position_BS": key_position,
        "valid": np.flatnonzero(is_valid),
        "place": query[is_valid],
    }
    return Tile(**{name: torch.from_numpy(array).to(device) for name, array in arrays.items()})


def _sides(block: _Block) -> tuple[np.ndarray, np.ndarray]:
    return block.queries, block.keys
