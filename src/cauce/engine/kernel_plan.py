"""Attention of a decode step in one kernel: head norms, positions, the new key and value, and both places attended to.

The kernel takes the product of queries, keys and values as it comes; DecodePlan of attention.py, which does the same
in torch's operations, is its reference. A sample's arithmetic does not depend on what shares its batch.
"""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from cauce.engine.cache import RowCache
from cauce.engine.kernels import Attention, Kernels, with_room
from cauce.engine.slots import SlotTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """How one layer attends."""

    layer: int
    heads: int
    key_heads: int
    width: int
    scaling: float
    window: int | None
    norms: tuple[Any, Any] | None  # of queries and keys, where heads are normalised


class KernelPlan:
    """One new token for each of the first S rows of the answers' cache."""

    def __init__(
        self,
        kernels: Kernels,
        *,
        prompts: RowCache,
        answers: RowCache,
        answer_S: np.ndarray,
        prompt_S: np.ndarray,
        prompt_row_S: np.ndarray,
    ) -> None:
        """Lengths [S] of each row's answer and prompt, and the row of its prompt in the prompts' cache."""
        self._kernels, self._prompts, self._answers = kernels, prompts, answers
        # Kept: the kernel reads them by address.
        self._host = [np.array(column, dtype=np.int64) for column in (answer_S, prompt_S, prompt_row_S)]
        self._call = Attention(
            answer_length=self._host[0].ctypes.data,
            prompt_length=self._host[1].ctypes.data,
            prompt_row=self._host[2].ctypes.data,
            rows=len(answer_S),
            answer_capacity=answers.capacity,
            prompt_capacity=prompts.capacity,
            threads=torch.get_num_threads(),
        )

    @classmethod
    def of(cls, kernels: Kernels, table: SlotTable, num_rows: int, *, prompts: RowCache, answers: RowCache) -> Self:
        """For the first rows of the slot table."""
        return cls(
            kernels,
            prompts=prompts,
            answers=answers,
            answer_S=table.length[:num_rows],
            prompt_S=table.prompt_length[:num_rows],
            prompt_row_S=table.prompt_row[:num_rows],
        )

    def attend_joint(self, asked: Asked, joint: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """[S, 1, H E] of joint [S, 1, (H + 2 Hk) E], with cosine and sine [S, 1, E] of each row's position."""
        call, layer = self._call, asked.layer
        out = with_room((len(joint), 1, asked.heads * asked.width), joint.dtype)
        call.joint, call.out = joint.data_ptr(), out.data_ptr()
        call.cosine, call.sine = cosine.data_ptr(), sine.data_ptr()
        call.answer_keys, call.answer_values = (
            self._answers.keys[layer].data_ptr(),
            self._answers.values[layer].data_ptr(),
        )
        call.prompt_keys, call.prompt_values = (
            self._prompts.keys[layer].data_ptr(),
            self._prompts.values[layer].data_ptr(),
        )
        if asked.norms is not None:
            query_norm, key_norm = asked.norms
            call.query_norm, call.key_norm = query_norm.weight.data_ptr(), key_norm.weight.data_ptr()
            call.query_epsilon, call.key_epsilon = query_norm.variance_epsilon, key_norm.variance_epsilon
        call.heads, call.key_heads, call.width = asked.heads, asked.key_heads, asked.width
        call.scaling, call.window = asked.scaling, asked.window or 0
        self._kernels.attend(call, joint.dtype)
        return out
