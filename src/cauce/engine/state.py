"""Whether weights that arrive are those of this model: names and shapes must match exactly."""

from collections.abc import Mapping

import torch
from torch import Tensor

from cauce.errors import WeightsError

WRAPPER_PREFIXES = ("module.", "_orig_mod.")


def check_state(shapes: Mapping[str, torch.Size], tensors: Mapping[str, Tensor], what: str) -> None:
    """Names and shapes must match exactly; otherwise a model would run half old, half new."""
    wrapped = [name for name in tensors if any(prefix in name for prefix in WRAPPER_PREFIXES)]
    wrapped = [name for name in wrapped if name not in shapes]
    if wrapped:
        raise WeightsError(
            f"weights {what}: {wrapped[0]!r} carries the prefix of a wrapper (DDP's 'module.', "
            "torch.compile's '_orig_mod.'); publish the unwrapped model's parameters"
        )
    missing = [name for name in shapes if name not in tensors]
    unknown = [name for name in tensors if name not in shapes]
    if missing or unknown:
        raise WeightsError(
            f"weights {what}: {len(missing)} are missing (first: {missing[:1]}), {len(unknown)} are "
            f"unknown (first: {unknown[:1]}); names must match exactly, a tied parameter once"
        )
    for name, shape in shapes.items():
        given = tensors[name]
        if given.shape != shape or not given.is_floating_point():
            raise WeightsError(
                f"weights {what}: {name} is {given.dtype} {tuple(given.shape)}, this model has {tuple(shape)}"
            )
