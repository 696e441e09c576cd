"""The kernels of a training pass on tensors: what native_code/training.cpp and packed_attention.cpp do, shaped.

They come from the library that engine/kernels.py compiles. Everything is contiguous, on the CPU, and float32 or bf16;
sums inside are float32. Letters: N packed token, D hidden width, F width of the gate, H query heads, Hk key heads, E
width of a head, M trained token, V vocabulary.
"""

import ctypes
import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cauce.engine.kernels import SUFFIXES, Kernels, load_kernels
from cauce.packing import PackedBatch

SPARE_ROWS = 32  # behind the joint rows, where the attention may read beyond the last token


class _Attention(ctypes.Structure):
    """`struct PackedAttention` of packed_attention.cpp, field by field."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("joint", "out", "log_sum", "grad_out", "grad_joint", "prompts", "answers")
        ),
        *((name, ctypes.c_int64) for name in ("num_prompts", "num_answers", "heads", "key_heads", "width", "window")),
        ("scaling", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("threads", "in_tiles")),
    )


class _AdamW(ctypes.Structure):
    """`struct AdamW` of training.cpp, field by field."""

    _fields_ = tuple(
        (name, ctypes.c_float)
        for name in ("lr", "beta1", "beta2", "epsilon", "decay", "scale", "correction1", "correction2")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWStep:
    """What one step of AdamW has in common for weights with the same decay."""

    number: int  # from 1
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    scale: float  # of the gradients


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """Heads of one layer, and how they attend."""

    heads: int
    key_heads: int
    width: int
    scaling: float
    window: int | None

    @property
    def joint(self) -> int:
        """Columns of queries, keys and values side by side."""
        return (self.heads + 2 * self.key_heads) * self.width


class PackedRows:
    """Where the prompts and answers of a micro-batch lie, in the form the attention reads."""

    def __init__(self, packed: PackedBatch) -> None:
        self.prompts = np.ascontiguousarray(packed.prompts_G, dtype=np.int64)
        self.answers = np.ascontiguousarray(packed.answers_A, dtype=np.int64)


class TrainingKernels:
    """One library's functions for training."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        pointer, size, number, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float
        arguments: dict[str, list[Any]] = {
            "rotate_heads": [pointer] * 3 + [size] * 4 + [number] * 2,
            "rms_norm_grad": [pointer] * 5 + [size] * 2 + [real, number],
            "gate": [pointer] * 2 + [size] * 2 + [number],
            "gate_grad": [pointer] * 2 + [size] * 2 + [number],
            "token_logps": [pointer] * 5 + [size] * 2 + [real, number],
            "token_logps_grad": [pointer] * 4 + [size] * 2 + [real, number],
            "sum_squares": [pointer, size, pointer, number],
            "adamw": [ctypes.POINTER(_AdamW)] + [pointer] * 5 + [size, number],
            "packed_forward": [ctypes.POINTER(_Attention)],
            "packed_backward": [ctypes.POINTER(_Attention)],
        }
        self._functions = {
            (name, dtype): kernels.function(f"{name}_{suffix}", kinds)
            for name, kinds in arguments.items()
            for dtype, suffix in SUFFIXES.items()
        }
        self._turn = kernels.function("turn_bf16", [pointer] * 2 + [size] * 2 + [number])
        self.rms_norm = kernels.rms_norm

    def turned(self, x: Tensor) -> Tensor:
        """x^T [D, N] for a product that reads it along N: laid out anew where that is faster, in bf16."""
        if x.dtype != torch.bfloat16:
            return x.t()
        out = x.new_empty(x.shape[1], x.shape[0])
        self._turn(x.data_ptr(), out.data_ptr(), *x.shape, torch.get_num_threads())
        return out

    def rotate(self, joint_NW: Tensor, shape: HeadShape, turn: tuple[Tensor, Tensor], *, back: bool = False) -> None:
        """Turns queries and keys in place by cosine and sine [N, E] of their positions; `back`: the transpose."""
        cosine, sine = turn
        pointers = (joint_NW.data_ptr(), cosine.data_ptr(), sine.data_ptr())
        sizes = (len(joint_NW), shape.joint, shape.heads + shape.key_heads, shape.width)
        self._call("rotate_heads", joint_NW, *pointers, *sizes, int(back))

    def attend(self, rows: PackedRows, joint_NW: Tensor, shape: HeadShape) -> tuple[Tensor, Tensor]:
        """Outputs [N, H E], and of each query and head the log of its summed exponentials, float32 [N, H].

        There are SPARE_ROWS of readable memory behind joint_NW."""
        out = joint_NW.new_empty(len(joint_NW), shape.heads * shape.width)
        log_sum = torch.empty(len(joint_NW), shape.heads)
        call = self._attention(rows, joint_NW, shape, out, log_sum)
        self._functions["packed_forward", joint_NW.dtype](ctypes.byref(call))
        return out, log_sum

    def attend_grad(
        self, rows: PackedRows, joint_NW: Tensor, shape: HeadShape, attended: tuple[Tensor, Tensor], grad: Tensor
    ) -> Tensor:
        """The gradient of joint_NW, from what `attend` gave and the gradient of its outputs."""
        grad_joint = torch.empty_like(joint_NW)
        call = self._attention(rows, joint_NW, shape, *attended)
        call.grad_out, call.grad_joint = grad.data_ptr(), grad_joint.data_ptr()
        self._functions["packed_backward", joint_NW.dtype](ctypes.byref(call))
        return grad_joint

    def rms_norm_grad(self, x: Tensor, weight: Tensor, epsilon: float, given: Tensor, into: Tensor) -> Tensor:
        """Adds the gradient of x to `into`; gives the gradient of the weight, float32 [D]."""
        grad_weight = torch.empty(x.shape[-1])
        pointers = (x.data_ptr(), weight.data_ptr(), given.data_ptr(), into.data_ptr(), grad_weight.data_ptr())
        self._call("rms_norm_grad", x, *pointers, *x.shape, epsilon)
        return grad_weight

    def gate(self, joint: Tensor) -> Tensor:
        """silu(gate) * up [N, F] of both side by side [N, 2 F]."""
        out = joint.new_empty(len(joint), joint.shape[1] // 2)
        self._call("gate", joint, joint.data_ptr(), out.data_ptr(), *out.shape)
        return out

    def gate_grad(self, joint: Tensor, given: Tensor) -> None:
        """In place: joint becomes its gradient, and the gradient of the gate's output becomes that output."""
        self._call("gate_grad", joint, joint.data_ptr(), given.data_ptr(), *given.shape)

    def token_logps(self, logits_MV: Tensor, target_M: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probability of each target, entropy, and normaliser, float32 [M], under softmax(logits / temperature)."""
        found = [torch.empty(len(logits_MV)) for _ in range(3)]
        pointers = (logits_MV.data_ptr(), target_M.data_ptr(), *(each.data_ptr() for each in found))
        self._call("token_logps", logits_MV, *pointers, *logits_MV.shape, temperature)
        return found[0], found[1], found[2]

    def token_logps_grad(
        self, logits_MV: Tensor, target_M: Tensor, normaliser_M: Tensor, grad_M: Tensor, temperature: float
    ) -> None:
        """In place: logits become their gradient."""
        grad_M = grad_M.contiguous()
        pointers = (logits_MV.data_ptr(), target_M.data_ptr(), normaliser_M.data_ptr(), grad_M.data_ptr())
        self._call("token_logps_grad", logits_MV, *pointers, *logits_MV.shape, temperature)

    def norm(self, tensors: Iterable[Tensor]) -> float:
        """The 2-norm of all numbers together."""
        total, part = 0.0, ctypes.c_double()
        for tensor in tensors:
            self._call("sum_squares", tensor, tensor.data_ptr(), tensor.numel(), ctypes.addressof(part))
            total += part.value
        return math.sqrt(total) if total >= 0 else math.nan

    def adamw(
        self, step: AdamWStep, weight: Tensor, moments: tuple[Tensor, Tensor], grad: Tensor, copy: Tensor | None
    ) -> None:
        """Updates weight and moments (float32) and `copy` (bf16) in place."""
        call = _AdamW(
            lr=step.lr,
            beta1=step.beta1,
            beta2=step.beta2,
            epsilon=step.eps,
            decay=1 - step.lr * step.weight_decay,
            scale=step.scale,
            correction1=1 - step.beta1**step.number,
            correction2=math.sqrt(1 - step.beta2**step.number),
        )
        pointers = (*(each.data_ptr() for each in (weight, *moments, grad)), None if copy is None else copy.data_ptr())
        self._call("adamw", grad, ctypes.byref(call), *pointers, weight.numel())

    def _attention(
        self, rows: PackedRows, joint_NW: Tensor, shape: HeadShape, out: Tensor, log_sum: Tensor
    ) -> _Attention:
        return _Attention(
            joint=joint_NW.data_ptr(),
            out=out.data_ptr(),
            log_sum=log_sum.data_ptr(),
            prompts=rows.prompts.ctypes.data,
            answers=rows.answers.ctypes.data,
            num_prompts=len(rows.prompts),
            num_answers=len(rows.answers),
            heads=shape.heads,
            key_heads=shape.key_heads,
            width=shape.width,
            window=shape.window or 0,
            scaling=shape.scaling,
            threads=torch.get_num_threads(),
            in_tiles=self._kernels.has_tiles,
        )

    def _call(self, name: str, typed: Tensor, *arguments: Any) -> None:
        self._functions[name, typed.dtype](*arguments, torch.get_num_threads())


@functools.cache
def load_training_kernels() -> tuple[TrainingKernels | None, str]:
    """The kernels and "", or None and why there are none."""
    kernels, why = load_kernels()
    return (None, why) if kernels is None else (TrainingKernels(kernels), "")
