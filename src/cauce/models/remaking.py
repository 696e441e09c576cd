"""Layers that keep their input alone for the backward pass, and make the rest again there.

For micro-batches that packing marks as remade, where a model is run by its own code and autograd (models/forward.py).
The models' own switch for this works in training mode only, which would turn dropout on. Left out: models whose layers
transformers does not mark as such; packing splits their groups instead.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer


def can_remake(model: nn.Module) -> bool:
    """Whether `remade` has an effect on this model."""
    return bool(_layers(model))


@contextmanager
def remade(model: nn.Module) -> Iterator[None]:
    """What runs inside keeps each layer's input; the backward pass may come after."""
    layers = _layers(model)
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward  # uncovers the class's own


def _layers(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
