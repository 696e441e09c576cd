"""Linear layers with their weights laid out once for oneDNN, which speeds up small batches on CPUs.

A PackedLinear shares its Parameter with the layer it replaces, so names, ties and state_dict stay as they
were; after new weights are copied in, `repack` refreshes the packed copies. Other layers, devices and dtypes
keep their own code.
"""

import torch
from torch import Tensor, nn

DTYPES = (torch.float32, torch.bfloat16)


class PackedLinear(nn.Linear):
    """A Linear whose forward multiplies with a packed copy of its weight."""

    def __init__(self, linear: nn.Linear, *, rows: int) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.rows = rows
        self.packed: list[Tensor] = []  # a list, so that no module hook mistakes it for a buffer
        self.repack()

    def repack(self) -> None:
        """Lay the current weight out anew, best for batches of `rows`."""
        with torch.no_grad():
            self.packed = [torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), self.rows)]

    def forward(self, input: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(input, self.packed[0], self.bias, "none", [], "")


def pack_linears(model: nn.Module, *, rows: int) -> list[PackedLinear]:
    """Replace every plain Linear of `model` that oneDNN can pack; an empty list where it cannot."""
    if not _is_available(next(model.parameters())):
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


def _is_available(parameter: Tensor) -> bool:
    """Whether this build has the operators and one small product with them comes out right."""
    if parameter.device.type != "cpu" or parameter.dtype not in DTYPES or not torch.backends.mkldnn.is_available():
        return False
    if parameter.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    weight, sample = (
        torch.eye(16, dtype=parameter.dtype),
        torch.arange(32.0).reshape(2, 16).to(parameter.dtype),
    )
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, 2)
        product = torch.ops.mkldnn._linear_pointwise(sample, packed, None, "none", [], "")
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
    return torch.equal(product, sample)
