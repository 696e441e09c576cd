"""The weights of record: float32, each parameter once, beside a copy in the dtype that the model computes in.

Updates at the learning rates of RL are smaller than bf16 can hold (a weight of 1.0 next to bf16's step of 0.008), so
they are applied to float32 masters, and the compute copy is made anew after each step. Gradients are taken as soon as
they are there, so that two copies of all of them never exist. The first of a step is kept as it came; from the second
on the sum is float32, so that cutting a step into micro-batches rounds nothing away. Where the model computes in
float32, its own parameters are the masters and there is no copy.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

LARGE_BYTES = 32 * 2**20  # from here on an allocator asks the system for fresh memory each time


class MasterWeights:
    """Owns the trainable parameters of a model that was loaded in float32, and their gradients."""

    def __init__(self, model: nn.Module, *, compute_dtype: torch.dtype) -> None:
        # named_parameters gives a tied parameter once, under its first name.
        self._compute = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._name_of = {id(p): name for name, p in self._compute.items()}
        self._is_copy = compute_dtype != torch.float32
        self._gradients: dict[str, Tensor] = {}
        # Of gradients that were let go, those whose memory is not to be had again quickly.
        self._rooms: dict[tuple[str, torch.dtype], Tensor] = {}
        self.masters: dict[str, Tensor] = dict(self._compute)
        if self._is_copy:
            self.masters = {name: p.detach().float().clone() for name, p in self._compute.items()}
            # Parameters alone: a cast of buffers would round the rotary frequencies, and with them every
            # position.
            for parameter in model.parameters():
                parameter.data = parameter.data.to(compute_dtype)
        for parameter in self._compute.values():
            parameter.register_post_accumulate_grad_hook(self._collect)

    @property
    def copies(self) -> Mapping[str, Tensor]:
        """The compute copy by name, to be written after each step; empty where the model holds the masters."""
        return {name: p.detach() for name, p in self._compute.items()} if self._is_copy else {}

    def named_gradients(self) -> dict[str, Tensor]:
        """The summed gradients, of the compute dtype where there is one part; zeros where there is none."""
        for name, master in self.masters.items():
            if name not in self._gradients:
                self._gradients[name] = torch.zeros_like(master, requires_grad=False)
        return self._gradients

    def add_gradient(self, parameter: nn.Parameter, gradient: Tensor, rows: Tensor | None = None) -> None:
        """Adds to the sum of a parameter of the model, or to these rows of it; whole gradients are given away."""
        name = self._name_of[id(parameter)]
        if rows is not None:
            if name not in self._gradients:
                self._gradients[name] = torch.zeros_like(self.masters[name], requires_grad=False)
            self._in_float32(name).index_add_(0, rows, gradient.float())
        elif name in self._gradients:
            self._in_float32(name).add_(gradient)
        else:
            self._gradients[name] = gradient

    def room(self, parameter: nn.Parameter) -> Tensor:
        """Where a gradient of the compute dtype may be written before it is added."""
        name = self._name_of[id(parameter)]
        return self._room(name, parameter.dtype)

    def zero_gradients(self) -> None:
        """Begin a new sum. Most are let go, so that they take no memory while others generate."""
        for name, gradient in self._gradients.items():
            self._keep_room(name, gradient)
        self._gradients = {}

    def in_dtype(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The weights by name; views where masters or compute copy have that dtype already."""
        source = self._compute if self._is_copy and next(iter(self._compute.values())).dtype == dtype else self.masters
        return {name: source[name].detach().to(dtype) for name in source}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Overwrite the masters in place, then make the copy anew."""
        with torch.no_grad():
            for name, master in self.masters.items():
                master.copy_(tensors[name])
            for name, copy in self.copies.items():
                copy.copy_(self.masters[name])

    def _in_float32(self, name: str) -> Tensor:
        gradient = self._gradients[name]
        if gradient.dtype not in (torch.float32, torch.float64):
            self._gradients[name] = self._room(name, torch.float32).copy_(gradient)
            self._keep_room(name, gradient)
        return self._gradients[name]

    def _room(self, name: str, dtype: torch.dtype) -> Tensor:
        room = self._rooms.pop((name, dtype), None)
        return torch.empty_like(self.masters[name], dtype=dtype, requires_grad=False) if room is None else room

    def _keep_room(self, name: str, gradient: Tensor) -> None:
        if gradient.nbytes >= LARGE_BYTES and gradient.is_contiguous():
            self._rooms[name, gradient.dtype] = gradient

    def _collect(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        assert parameter.grad is not None
        self.add_gradient(parameter, parameter.grad)
        parameter.grad = None
