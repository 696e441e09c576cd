"""Linear layers with their weights laid out once for oneDNN, which speeds up small batches on CPUs.

A PackedLinear shares its Parameter with the layer it replaces, so names, ties and state_dict stay as they
were; after new weights are copied in, `repack` refreshes the packed copies. Other layers, devices and dtypes
keep their own code. `lean.py` uses the packed products directly.
"""

import torch
from torch import Tensor, nn

DTYPES = (torch.float32, torch.bfloat16)


def pack(weight: Tensor, *, rows: int) -> Tensor:
    """A weight [out, in] laid out for oneDNN, best for batches of `rows`."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), rows)
    return packed


def linear(x: Tensor, packed: Tensor, bias: Tensor | None, *, activation: str = "none") -> Tensor:
    """activation(x W^T + b); activation "none" or "swish"."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, activation, [], "")
    return out


def linear_with(x: Tensor, packed: Tensor, bias: Tensor | None, other: Tensor, operation: str) -> Tensor:
    """(x W^T + b) "add" or "mul" other, in one product."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, other, packed, bias, operation)
    return out


class PackedLinear(nn.Linear):
    """A Linear whose forward multiplies with a packed copy of its weight."""

    def __init__(self, given: nn.Linear, *, rows: int) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = given.in_features, given.out_features
        self.weight, self.bias = given.weight, given.bias
        self.rows = rows
        self.packed: list[Tensor] = []  # a list, so that no module hook mistakes it for a buffer
        self.repack()

    def repack(self) -> None:
        """Lay the current weight out anew."""
        with torch.no_grad():
            self.packed = [pack(self.weight, rows=self.rows)]

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.packed[0], self.bias)


def pack_linears(model: nn.Module, *, rows: int) -> list[PackedLinear]:
    """Replace every plain Linear of `model` that oneDNN can pack; an empty list where it cannot."""
    if not can_pack(next(model.parameters())):
        return []
    packed = []
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and child.weight.dtype in DTYPES:
                layer = PackedLinear(child, rows=rows)
                layer.train(child.training)
                setattr(parent, name, layer)
                packed.append(layer)
    return packed


def can_pack(parameter: Tensor) -> bool:
    """Whether this build has the operators and one small product with each comes out right."""
    if parameter.device.type != "cpu" or parameter.dtype not in DTYPES or not torch.backends.mkldnn.is_available():
        return False
    if parameter.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    weight, sample = (
        torch.eye(16, dtype=parameter.dtype),
        torch.arange(32.0).reshape(2, 16).to(parameter.dtype),
    )
    try:
        packed = pack(weight, rows=2)
        product, total = linear(sample, packed, None), linear_with(sample, packed, None, sample, "add")
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
    return torch.equal(product, sample) and torch.equal(total, 2 * sample)
