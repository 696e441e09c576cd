"""Keys and values of the slots, one preallocated tensor per layer.

A slot is one row that holds the keys and values of one sample: its prompt's, copied in when the sample is
admitted, and one more per generated token. Shapes are learned from the first prompt, so that no model's
config has to be understood. What lies beyond a slot's length is stale but finite, and masked.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

CAPACITY_STEP = 128


class SlotCache:
    """keys[layer] and values[layer] are [S, Hk, capacity, D]."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.capacity = 0
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    def reserve(self, length: int, keys: Mapping[int, Tensor], values: Mapping[int, Tensor]) -> None:
        """Make room for `length` tokens per slot, shaped like these layers' [Hk, P, D]; keep old content."""
        if length <= self.capacity:
            return
        self.capacity = -(-length // CAPACITY_STEP) * CAPACITY_STEP
        for table, sources in ((self.keys, keys), (self.values, values)):
            for layer, like in sources.items():
                grown = like.new_zeros(self.slots, like.shape[0], self.capacity, like.shape[2])
                if layer in table:
                    grown[:, :, : table[layer].shape[2]] = table[layer]
                table[layer] = grown

    def fill(self, rows: list[int], keys: Mapping[int, Tensor], values: Mapping[int, Tensor]) -> None:
        """Copy one prompt's keys and values to the slots of its samples."""
        first, last = rows[0], rows[-1]
        where: slice | list[int] = slice(first, last + 1) if rows == list(range(first, last + 1)) else rows
        for table, sources in ((self.keys, keys), (self.values, values)):
            for layer, prompt in sources.items():
                table[layer][where, :, : prompt.shape[1]] = prompt

    def append(self, layer: int, position_S: Tensor, key: Tensor, value: Tensor) -> None:
        """Write one token's key and value [S, Hk, D] of each of the first rows at its position."""
        rows = torch.arange(len(position_S), device=position_S.device)
        self.keys[layer][rows, :, position_S] = key
        self.values[layer][rows, :, position_S] = value

    def move(self, sources: list[int], targets: list[int], length: int) -> None:
        """Copy the first `length` tokens of whole slots; sources and targets do not overlap."""
        for table in (self.keys, self.values):
            for tensor in table.values():
                tensor[targets, :, :length] = tensor[sources, :, :length]

    @property
    def num_bytes(self) -> int:
        """Memory reserved."""
        return sum(t.numel() * t.element_size() for table in (self.keys, self.values) for t in table.values())
