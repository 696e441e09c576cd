"""The forward of Llama-like decoders in few, large operations, for CPUs.

A model's own forward spends more time between its matrix products than in them: some forty small operations per layer,
each of which wakes all threads. Here one product makes queries, keys and values, activation, product and residual sum
happen inside the products that need them, and weights lie packed for oneDNN. That halves a decode step.

`LeanDecoder.of` looks at the structure, takes from a run of the model itself what each layer asks of attention, and
then compares its own logits with the model's; whatever has another part, or gives other numbers, is left to the
model's own forward. Rotary angles come from the model's own module, embeddings and norms from its own parameters.
Left out: biases of norms, activations other than SiLU, and devices other than the CPU.

Letters: B rows, T tokens, D hidden width, H query heads, Hk key heads, E width of a head, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from cauce.engine.attention import PLAN, AttentionPlan, Heads, PrefillPlan
from cauce.engine.kernel_plan import Asked, KernelPlan
from cauce.engine.kernels import Kernels, can_tile
from cauce.engine.prepack import can_pack
from cauce.engine.products import OneDnnProducts, Products, TileProducts
from cauce.models.forward import vocabulary_size
from cauce.models.llama_like import HEAD_NORMS, has_known_parts, joint_bias, parts

PROBE_TOKENS = 12
TOLERANCE_FP32 = 1e-3  # on the largest difference of the logits' log-softmax
TOLERANCE_HALF = 0.15  # on the mean difference


@dataclass(slots=True, kw_only=True)
class _Layer:
    """One decoder layer: its modules, how it attends, and its packed weights."""

    attention: Any
    mlp: Any
    norms: tuple[Any, Any]
    scaling: float
    window: int | None
    has_head_norms: bool
    qkv_bias: Tensor | None
    packed: dict[str, Tensor] = field(default_factory=dict)


class LeanDecoder:
    """Logits of a decoder whose attention is computed by an engine's plan."""

    def __init__(
        self, model: PreTrainedModel, *, rows: int, asked: Sequence[Heads], kernels: Kernels | None = None
    ) -> None:
        base: Any = model.base_model
        self._kernels = kernels
        self._products = _products(model, rows=rows, kernels=kernels)
        self._embed, self._rotary, self._norm = base.embed_tokens, base.rotary_emb, base.norm
        self._head = model.get_output_embeddings()
        self._heads = (asked[0].query.shape[1], asked[0].key.shape[1], asked[0].query.shape[3])
        self._layers = [
            _Layer(
                attention=layer.self_attn,
                mlp=layer.mlp,
                norms=(layer.input_layernorm, layer.post_attention_layernorm),
                scaling=heads.scaling,
                window=heads.window,
                has_head_norms=parts(layer.self_attn) >= HEAD_NORMS,
                qkv_bias=joint_bias(layer.self_attn),
            )
            for layer, heads in zip(base.layers, asked, strict=True)
        ]
        self._packed_head = torch.empty(0)
        self.repack()

    @classmethod
    def of(cls, model: PreTrainedModel, *, rows: int, kernels: Kernels | None = None) -> Self | None:
        """For this model, whose attention setting is the engine's; None where it has to run its own forward."""
        if not can_pack(next(model.parameters())) or not has_known_parts(model):
            return None
        ids = torch.from_numpy(np.random.default_rng(0).integers(0, vocabulary_size(model), (1, PROBE_TOKENS)))
        positions, plan = torch.arange(PROBE_TOKENS)[None], _Recorder(lengths=[PROBE_TOKENS])
        with torch.inference_mode():
            expected = model(input_ids=ids, position_ids=positions, use_cache=False, **{PLAN: plan})
            if any(heads.softcap is not None for heads in plan.asked):
                return None
            decoder = cls(model, rows=rows, asked=plan.asked, kernels=kernels)
            found = decoder(ids, positions, PrefillPlan(lengths=[PROBE_TOKENS]), keep=0)
        difference = (expected.logits.float().log_softmax(-1) - found.float().log_softmax(-1)).abs()
        is_fp32 = model.dtype == torch.float32
        worst, tolerance = (difference.max(), TOLERANCE_FP32) if is_fp32 else (difference.mean(), TOLERANCE_HALF)
        return decoder if bool(worst <= tolerance) else None

    def repack(self, given: Mapping[nn.Parameter, Tensor] | None = None) -> None:
        """Lays weights out anew: the given ones, and where none is given what the model holds."""

        def weight(module: nn.Module) -> Tensor:
            parameter: Any = module.weight
            return parameter if given is None else given[parameter].to(parameter.dtype)

        with torch.no_grad():
            for layer in self._layers:
                attention, mlp = layer.attention, layer.mlp
                weights = {
                    "qkv": torch.cat([weight(part) for part in (attention.q_proj, attention.k_proj, attention.v_proj)]),
                    "o": weight(attention.o_proj),
                    "gate": weight(mlp.gate_proj),
                    "up": weight(mlp.up_proj),
                    "down": weight(mlp.down_proj),
                }
                layer.packed = {name: self._products.pack(each) for name, each in weights.items()}
                layer.qkv_bias = joint_bias(attention)
            self._packed_head = self._products.pack(weight(self._head))

    def release_unpacked(self) -> None:
        """Gives back the memory of weights of which only the packed form is read; the model cannot run alone then."""
        for layer in self._layers:
            attention, mlp = layer.attention, layer.mlp
            for module in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj):
                module.weight.data = module.weight.data.new_empty(0)
            for module in (mlp.gate_proj, mlp.up_proj, mlp.down_proj):
                module.weight.data = module.weight.data.new_empty(0)

    @property
    def attends_in_kernel(self) -> bool:
        """Whether a decode step may hand this forward a KernelPlan."""
        return self._kernels is not None

    def __call__(
        self, ids_BT: Tensor, position_BT: Tensor, plan: AttentionPlan | KernelPlan, *, keep: Tensor | int
    ) -> Tensor:
        """Logits [B, kept, V] of the positions `keep` (0: all)."""
        hidden = self._embed(ids_BT)
        turn = self._rotary(hidden, position_BT)
        if not isinstance(plan, KernelPlan):
            turn = _halves(*turn)
        for number, layer in enumerate(self._layers):
            hidden = self._layer(number, layer, hidden, turn, plan)
        if isinstance(keep, Tensor):
            hidden = hidden[:, keep]
        return self._products.linear(self._rms_norm(hidden, self._norm), self._packed_head, self._head.bias)

    def _layer(
        self,
        number: int,
        layer: _Layer,
        hidden: Tensor,
        turn: tuple[Tensor, Tensor],
        plan: AttentionPlan | KernelPlan,
    ) -> Tensor:
        products, packed, attention, mlp = self._products, layer.packed, layer.attention, layer.mlp
        joint = products.linear(self._rms_norm(hidden, layer.norms[0]), packed["qkv"], layer.qkv_bias)
        if isinstance(plan, KernelPlan):
            attended = plan.attend_joint(self._asked(number, layer), joint, *turn)
        else:
            attended = self._attend(number, layer, joint, turn, plan)
        hidden = products.add(attended, packed["o"], attention.o_proj.bias, hidden)
        normed = self._rms_norm(hidden, layer.norms[1])
        product = products.gate(normed, packed["gate"], packed["up"], mlp.gate_proj.bias, mlp.up_proj.bias)
        return products.add(product, packed["down"], mlp.down_proj.bias, hidden)

    def _asked(self, number: int, layer: _Layer) -> Asked:
        num_heads, num_keys, width = self._heads
        norms = (layer.attention.q_norm, layer.attention.k_norm) if layer.has_head_norms else None
        return Asked(
            layer=number,
            heads=num_heads,
            key_heads=num_keys,
            width=width,
            scaling=layer.scaling,
            window=layer.window,
            norms=norms,
        )

    def _attend(
        self, number: int, layer: _Layer, joint: Tensor, turn: tuple[Tensor, Tensor], plan: AttentionPlan
    ) -> Tensor:
        """The attention output [B, T, H E] by torch's operations."""
        num_heads, num_keys, width = self._heads
        attention = layer.attention
        joint = joint.unflatten(-1, (num_heads + 2 * num_keys, width))
        turned = joint[:, :, : num_heads + num_keys]
        if layer.has_head_norms:
            query, key = turned.split((num_heads, num_keys), dim=2)
            turned = torch.cat((_rms_norm(query, attention.q_norm), _rms_norm(key, attention.k_norm)), dim=2)
        turned = turned.unflatten(-1, (2, width // 2))
        # rotate_half, with its sign in the sine
        turned = torch.addcmul(turned * turn[0], turned.flip(3), turn[1]).flatten(3)
        attended = plan.attend(
            Heads(
                layer=number,
                query=turned[:, :, :num_heads].transpose(1, 2),
                key=turned[:, :, num_heads:].transpose(1, 2),
                value=joint[:, :, num_heads + num_keys :].transpose(1, 2),
                scaling=layer.scaling,
                window=layer.window,
                softcap=None,
            )
        )
        return attended.flatten(2)

    def _rms_norm(self, hidden: Tensor, norm: Any) -> Tensor:
        if self._kernels is None:
            return _rms_norm(hidden, norm)
        return self._kernels.rms_norm(hidden, norm.weight, norm.variance_epsilon)


class _Recorder(PrefillPlan):
    """Attends, and keeps how each layer asked for it."""

    def __init__(self, *, lengths: Sequence[int]) -> None:
        super().__init__(lengths=lengths)
        self.asked: list[Heads] = []

    def attend(self, heads: Heads) -> Tensor:
        self.asked.append(heads)
        return super().attend(heads)


def _products(model: PreTrainedModel, *, rows: int, kernels: Kernels | None) -> Products:
    """Tiles where every weight of this model fits into them."""
    parts = [part for part in model.modules() if isinstance(part, nn.Linear)]
    if kernels is not None and kernels.has_tiles and all(can_tile(part.weight) for part in parts):
        return TileProducts(kernels)
    return OneDnnProducts(rows=rows)


def _halves(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """[B, T, E] -> [B, T, 1, 2, E / 2], the sign of rotate_half in the sine."""
    shape = (2, cos.shape[-1] // 2)
    signs = sin.new_tensor([-1.0, 1.0])[:, None]
    return cos[:, :, None].unflatten(-1, shape), sin[:, :, None].unflatten(-1, shape) * signs


def _rms_norm(hidden: Tensor, norm: Any) -> Tensor:
    return functional.rms_norm(hidden, norm.weight.shape, norm.weight, norm.variance_epsilon)
