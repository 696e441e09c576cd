"""The weights of record: float32, each parameter once, beside a copy in the dtype that the model computes in.

Updates at the learning rates of RL are smaller than bf16 can hold (a weight of 1.0 next to bf16's step of 0.008), so
they are applied to float32 masters, and the compute copy is made anew after each step. Gradients of the copy are
added to float32 sums as soon as autograd has finished each of them, so that cutting a step into micro-batches rounds
nothing away and two copies of all gradients never exist. Where the model computes in float32, its own parameters are
the masters and there is no copy.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn


class MasterWeights:
    """Owns the trainable parameters of a model that was loaded in float32, and their gradients."""

    def __init__(self, model: nn.Module, *, compute_dtype: torch.dtype) -> None:
        # named_parameters gives a tied parameter once, under its first name.
        self._compute = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._name_of = {id(p): name for name, p in self._compute.items()}
        self._is_copy = compute_dtype != torch.float32
        self.masters: dict[str, Tensor] = dict(self._compute)
        if self._is_copy:
            self.masters = {name: p.detach().float().clone() for name, p in self._compute.items()}
            # Parameters alone: a cast of buffers would round the rotary frequencies, and with them every
            # position.
            for parameter in model.parameters():
                parameter.data = parameter.data.to(compute_dtype)
            for name, parameter in self._compute.items():
                parameter.register_post_accumulate_grad_hook(self._collector(name))

    def named_gradients(self) -> dict[str, Tensor]:
        """The summed gradients; zeros where nothing reached a parameter since the last step."""
        for master in self.masters.values():
            if master.grad is None:
                master.grad = torch.zeros_like(master)
        return {name: _gradient(master) for name, master in self.masters.items()}

    def add_gradient(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Adds to the float32 sum of a parameter of the model; the gradient is given away and may become the sum."""
        master = self.masters[self._name_of[id(parameter)]]
        if master.grad is None:
            master.grad = gradient.float()
        else:
            master.grad.add_(gradient)

    def zero_gradients(self) -> None:
        """Begin a new sum. The old ones are let go, so that they take no memory while others generate."""
        for master in self.masters.values():
            master.grad = None

    def in_dtype(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The weights by name; views where masters or compute copy have that dtype already."""
        source = self._compute if self._is_copy and next(iter(self._compute.values())).dtype == dtype else self.masters
        return {name: source[name].detach().to(dtype) for name in source}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Overwrite the masters in place, then refresh the copy."""
        with torch.no_grad():
            for name, master in self.masters.items():
                master.copy_(tensors[name])
        self.refresh()

    def refresh(self) -> None:
        """Make the compute copy anew from the masters."""
        if self._is_copy:
            with torch.no_grad():
                for name, parameter in self._compute.items():
                    parameter.copy_(self.masters[name])

    def _collector(self, name: str) -> Callable[[Tensor], None]:
        def collect(parameter: Tensor) -> None:
            self.add_gradient(self._compute[name], _gradient(parameter))
            parameter.grad = None

        return collect


def _gradient(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad
