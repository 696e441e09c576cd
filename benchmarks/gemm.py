"""The fastest matrix products of a model's shapes on this machine: the bound that decoding and learning are held to.

All layers' weights are distinct and walked through in order, as a real step does it, so that a weight is as cold in
the caches here as there; inputs are the same in each layer and stay warm, which favours the bound. Each group of
weights (those that read the same input) is multiplied one by one or as one, by plain torch, with weights that oneDNN
has laid out before, or with gradients that were turned before; for every group the fastest way counts, summed over all
layers.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

Call = Callable[[], object]
Ways = Mapping[str, Sequence[Call]]  # each way makes all products of a group


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightGroup:
    """Weights [out, in] that read the same input, and how many rows that input has."""

    name: str
    weights: tuple[Tensor, ...]
    rows: int

    @property
    def numel(self) -> int:
        return sum(weight.numel() for weight in self.weights)


@dataclass(frozen=True, slots=True, kw_only=True)
class Products:
    """One group's products, and the ways to make them."""

    name: str
    ways: Ways


def groups_of(model: Any, *, rows: int, head_rows: int) -> list[WeightGroup]:
    """The linear weights of a Llama-like model in the order of its forward; the head, which may read fewer rows."""
    groups = []
    for layer in model.base_model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        members = {
            "qkv": (attention.q_proj, attention.k_proj, attention.v_proj),
            "o": (attention.o_proj,),
            "gate_up": (mlp.gate_proj, mlp.up_proj),
            "down": (mlp.down_proj,),
        }
        for name, modules in members.items():
            weights = tuple(module.weight.detach().clone() for module in modules)
            groups.append(WeightGroup(name=name, weights=weights, rows=rows))
    head = model.get_output_embeddings().weight.detach().clone()
    return [*groups, WeightGroup(name="head", weights=(head,), rows=head_rows)]


def forward_flops(groups: Sequence[WeightGroup]) -> int:
    """2 per weight and row."""
    return sum(2 * group.numel * group.rows for group in groups)


def forward_products(groups: Sequence[WeightGroup]) -> list[Products]:
    """x W^T of each group."""
    inputs = _Inputs(groups[0].weights[0].dtype)
    return [
        Products(name=f"{group.name} forward", ways=_ways(inputs(group.rows, group.weights[0].shape[1]), group.weights))
        for group in groups
    ]


def backward_products(groups: Sequence[WeightGroup]) -> list[Products]:
    """dy W and dy^T x of each group, from the last to the first."""
    inputs = _Inputs(groups[0].weights[0].dtype)
    products = []
    for group in reversed(groups):
        x = inputs(group.rows, group.weights[0].shape[1])
        outs = [inputs(group.rows, weight.shape[0]) for weight in group.weights]
        joint = inputs(group.rows, sum(weight.shape[0] for weight in group.weights))
        ways = {"plain": [_times(dy, weight) for dy, weight in zip(outs, group.weights, strict=True)]}
        turned = [weight.t().contiguous() for weight in group.weights]
        whole = torch.cat(group.weights)
        if is_packable(whole):
            ways["packed"] = [_packed(dy, weight) for dy, weight in zip(outs, turned, strict=True)]
            ways["packed, joint"] = [_packed(joint, whole.t().contiguous())]
        ways["plain, joint"] = [_times(joint, whole)]
        products.append(Products(name=f"{group.name} input gradient", ways=ways))
        products.append(
            Products(
                name=f"{group.name} weight gradient",
                ways={
                    "plain": [_times(dy.t(), x) for dy in outs],
                    "plain, joint": [_times(joint.t(), x)],
                    "turned, joint": [_times(x.t(), joint)],
                    "turned before, joint": [_times(inputs(joint.shape[1], group.rows), x)],
                },
            )
        )
    return products


def fastest(products: Sequence[Products], *, repeats: int) -> tuple[float, dict[str, str]]:
    """Seconds of all products at the fastest way of each, and which way that was by name.

    Each way walks through all products in their order; the best of `repeats` walks counts for each name.
    """
    best: dict[str, dict[str, float]] = {}
    names = list(dict.fromkeys(way for product in products for way in product.ways))
    with torch.inference_mode():
        for way in names:
            chosen = [(product.name, product.ways[way]) for product in products if way in product.ways]
            for _ in range(1 + repeats):  # the first warms up and is no slower than it has to be
                for name, seconds in _walk(chosen).items():
                    seen = best.setdefault(name, {})
                    seen[way] = min(seconds, seen.get(way, seconds))
    winners = {name: min(ways, key=lambda way: ways[way]) for name, ways in best.items()}
    return sum(best[name][way] for name, way in winners.items()), winners


def _walk(chosen: Sequence[tuple[str, Sequence[Call]]]) -> dict[str, float]:
    seconds: dict[str, float] = {}
    for name, calls in chosen:
        began = time.perf_counter()
        for call in calls:
            call()
        seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - began
    return seconds


def is_packable(weight: Tensor) -> bool:
    """Whether oneDNN lays out weights of this dtype here."""
    try:
        _packed(weight.new_zeros(2, 16), weight.new_zeros(16, 16))()
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
    return True


def _ways(x: Tensor, weights: Sequence[Tensor]) -> Ways:
    """x W^T one by one or as one, plain or packed. Each way has a copy of its own where the layout differs."""
    whole = torch.cat(list(weights))
    ways = {"plain": [_linear(x, weight) for weight in weights], "plain, joint": [_linear(x, whole)]}
    if is_packable(whole):
        ways["packed"] = [_packed(x, weight) for weight in weights]
        ways["packed, joint"] = [_packed(x, whole)]
    return ways


def _linear(x: Tensor, weight: Tensor) -> Call:
    return lambda: functional.linear(x, weight)


def _times(left: Tensor, right: Tensor) -> Call:
    return lambda: left @ right


def _packed(x: Tensor, weight: Tensor) -> Call:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, len(x))
    return lambda: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


class _Inputs:
    """One random matrix of each shape."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._made: dict[tuple[int, int], Tensor] = {}

    def __call__(self, rows: int, columns: int) -> Tensor:
        shape = (rows, columns)
        if shape not in self._made:
            self._made[shape] = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(self._dtype)
        return self._made[shape]
