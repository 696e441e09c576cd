"""Keys and values of rows of tokens, one preallocated tensor per layer.

The engine holds two: one row per prompt, and one per slot for what its sample has generated, so that samples of one
prompt share its keys and values. Shapes are learned from the first prompt, so that no model's config has to be
understood. What lies beyond a row's length is stale but finite, and masked.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

LENGTH_STEP = 128
ROW_STEP = 8


class RowCache:
    """keys[layer] and values[layer] are [rows, capacity, Hk, D]."""

    def __init__(self) -> None:
        self.rows = self.capacity = 0
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    def reserve(self, rows: int, length: int, keys: Mapping[int, Tensor], values: Mapping[int, Tensor]) -> None:
        """Make room for so many rows of so many tokens, shaped like these layers' [Hk, P, D]; keep old content."""
        if rows <= self.rows and length <= self.capacity:
            return
        old_rows, old_capacity = self.rows, self.capacity
        self.rows = max(old_rows, -(-rows // ROW_STEP) * ROW_STEP)
        self.capacity = max(old_capacity, -(-length // LENGTH_STEP) * LENGTH_STEP)
        for table, sources in ((self.keys, keys), (self.values, values)):
            for layer, like in sources.items():
                grown = like.new_zeros(self.rows, self.capacity, like.shape[0], like.shape[2])
                if layer in table:
                    grown[:old_rows, :old_capacity] = table[layer]
                table[layer] = grown

    def write(self, row: int, keys: Mapping[int, Tensor], values: Mapping[int, Tensor]) -> None:
        """Fill one row from its start with [Hk, P, D] of each layer."""
        for table, sources in ((self.keys, keys), (self.values, values)):
            for layer, source in sources.items():
                table[layer][row, : source.shape[1]] = source.transpose(0, 1)

    def append(self, layer: int, place_S: Tensor, key: Tensor, value: Tensor) -> None:
        """Write one token's key and value [S, Hk, D] for each of S rows; its place is row * capacity + position."""
        self.keys[layer].flatten(0, 1).index_copy_(0, place_S, key)
        self.values[layer].flatten(0, 1).index_copy_(0, place_S, value)

    def move(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Copy the first `length` tokens of whole rows; sources and targets do not overlap."""
        if not self.keys:
            return
        device = next(iter(self.keys.values())).device
        of, to = torch.tensor(sources, device=device), torch.tensor(targets, device=device)
        for table in (self.keys, self.values):
            for tensor in table.values():
                tensor[to, :length] = tensor[of, :length]

    def head(self, layer: int, rows: Tensor | slice, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values [rows, Hk, length, D] of a layer."""
        return self.keys[layer][rows, :length].transpose(1, 2), self.values[layer][rows, :length].transpose(1, 2)

    @property
    def num_bytes(self) -> int:
        """Memory reserved."""
        return sum(t.numel() * t.element_size() for table in (self.keys, self.values) for t in table.values())
