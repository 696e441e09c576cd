"""A Llama-like decoder over packed rows with its backward pass written out, for CPUs.

Autograd runs a layer of a small model in some hundred operations, each of which wakes all threads and walks through
memory that the one before has just left; they took three quarters of a step of 2,000 tokens. Here a layer is its
matrix products and eight kernels (learner/kernels.py), queries, keys and values are one product, and so are gate and
up. What a layer keeps for its backward pass is 6 hidden widths and two of the gate per token; norms and the gate's
output are made again. Of a micro-batch that packing.py marks as remade it keeps its input alone, a tenth of that; the
rest is made again. Each weight's gradient goes to the sums as soon as it is there.

`PackedDecoder.of` looks at the structure, takes from a run of the model itself what each layer asks of attention, and
then compares its log-probabilities with the model's: whatever has another part, or gives other numbers, trains through
autograd. Left out: norms of heads, biases but those of queries, keys and values, and devices other than the CPU.

    y = x + A(norm(x)) Wo^T                        A: rotary positions and attention of packed rows
    z = y + silu(norm(y) Wg^T) * (norm(y) Wu^T) Wd^T

Letters: N packed token, M trained token, D hidden width, F width of the gate, V vocabulary.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface, PreTrainedModel

from cauce.engine.kernels import SUFFIXES
from cauce.learner.kernels import SPARE_ROWS, HeadShape, PackedRows, TrainingKernels
from cauce.models import packed_attention
from cauce.models.forward import check_tokens, shares_prompts, token_logps, vocabulary_size
from cauce.models.llama_like import HEAD_NORMS, has_known_parts, joint_bias, parts
from cauce.models.probe import TOLERANCE, probe_sequences
from cauce.packing import PackedBatch, pack

KEEP_BYTES = 256 * 2**20  # logits held for the backward pass; beyond, they are made again
CHUNK_BYTES = 24 * 2**20  # of logits made at a time where they are not held: memory that the allocator keeps
TOLERANCE_HALF = 0.15  # on the mean difference in bf16


class Gradients(Protocol):
    """Where gradients go: MasterWeights."""

    def add_gradient(self, parameter: nn.Parameter, gradient: Tensor, rows: Tensor | None = None) -> None: ...

    def room(self, parameter: nn.Parameter) -> Tensor: ...


@dataclass(slots=True, kw_only=True)
class _Layer:
    attention: Any
    mlp: Any
    norms: tuple[Any, Any]
    head_norms: tuple[Any, Any] | None  # of queries and keys, where heads are normalised
    shape: HeadShape
    qkv: Tensor  # [(H + 2 Hk) E, D]: storage of the three weights
    gate_up: Tensor  # [2 F, D]


@dataclass(slots=True, kw_only=True)
class _Kept:
    """What one layer's backward pass reads."""

    x: Tensor  # [N, D]
    joint: Tensor  # queries, keys and values; turned, unless heads are normalised
    attended: tuple[Tensor, Tensor]
    y: Tensor  # [N, D]
    gates: Tensor  # [N, 2 F]


@dataclass(slots=True, kw_only=True)
class _Pass:
    """One micro-batch on its way through."""

    packed: PackedBatch
    rows: PackedRows
    turn: tuple[Tensor, Tensor]
    ids_N: Tensor
    predictor_M: Tensor
    target_M: Tensor
    temperature: float
    last_ND: Tensor
    layers: list[_Kept | Tensor]  # a tensor: the input of a layer whose rest is made again
    logits_MV: Tensor | None = None
    normaliser_M: Tensor | None = None


class PackedDecoder:
    """Log-probabilities of packed rows, whose gradient goes to `gradients` (None: there is none)."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        kernels: TrainingKernels,
        shapes: list[HeadShape],
        gradients: Gradients | None,
    ) -> None:
        base: Any = model.base_model
        self._model, self._kernels, self._gradients = model, kernels, gradients
        self._embed, self._rotary, self._norm = base.embed_tokens, base.rotary_emb, base.norm
        self._head: Any = model.get_output_embeddings()
        self._spare_logits: Tensor | None = None  # a step's, for the next: fresh memory costs more than the product
        self._layers = [
            _Layer(
                attention=layer.self_attn,
                mlp=layer.mlp,
                norms=(layer.input_layernorm, layer.post_attention_layernorm),
                head_norms=_head_norms(layer.self_attn),
                shape=shape,
                qkv=_join(layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj),
                gate_up=_join(layer.mlp.gate_proj, layer.mlp.up_proj),
            )
            for layer, shape in zip(base.layers, shapes, strict=True)
        ]

    @classmethod
    def of(
        cls, model: PreTrainedModel, kernels: TrainingKernels, *, gradients: Gradients | None = None
    ) -> tuple[Self | None, str]:
        """For this model, which reads packed rows; or None and why it trains through autograd."""
        weight = next(model.parameters())
        if weight.device.type != "cpu" or weight.dtype not in SUFFIXES:
            return None, f"no kernels for {weight.dtype} on {weight.device.type}"
        if not shares_prompts(model) or not _is_known(model):
            return None, f"{type(model).__name__} has parts that the kernels do not know"
        (packed,) = pack(probe_sequences(vocabulary_size(model)), 1_000)
        with torch.no_grad(), _recorded() as shapes:
            expected_M, _ = token_logps(model, packed, 1.0)
        decoder = cls(model, kernels=kernels, shapes=shapes, gradients=gradients)
        with torch.no_grad():
            difference_M = (decoder.token_logps(packed, 1.0)[0] - expected_M).abs()
        is_fp32 = weight.dtype == torch.float32
        found, allowed = (difference_M.max(), TOLERANCE) if is_fp32 else (difference_M.mean(), TOLERANCE_HALF)
        if not bool(found <= allowed):
            return None, f"the kernels' log-probs differ by {float(found):.1e} from the model's, over {allowed:g}"
        return decoder, ""

    def token_logps(self, packed: PackedBatch, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy of each trained token, float32 [M]; only the first carries gradient."""
        check_tokens(packed, vocabulary_size(self._model))
        if self._gradients is None or not torch.is_grad_enabled():
            with torch.no_grad():
                return self._forward(packed, temperature, keep=False)[:2]
        anchor = torch.zeros((), requires_grad=True)  # autograd calls back only where something wants a gradient
        logp_M, entropy_M = _TokenLogps.apply(anchor, self, packed, temperature)
        return logp_M, entropy_M

    def _forward(self, packed: PackedBatch, temperature: float, *, keep: bool) -> tuple[Tensor, Tensor, _Pass]:
        ids_N = torch.from_numpy(packed.token_ids_N)
        hidden_ND = self._embed.weight.detach().index_select(0, ids_N)
        cosine, sine = self._rotary(hidden_ND[None], torch.from_numpy(packed.position_ids_N)[None])
        turn = cosine[0].contiguous(), sine[0].contiguous()
        rows, layers = PackedRows(packed), list[_Kept | Tensor]()
        for layer in self._layers:
            kept = self._inside(layer, hidden_ND, rows, turn)
            hidden_ND = self._output(layer, kept)
            if keep:
                layers.append(kept.x if packed.is_remade else kept)
        run = _Pass(
            packed=packed,
            rows=rows,
            turn=turn,
            ids_N=ids_N,
            predictor_M=torch.from_numpy(packed.predictor_M),
            target_M=torch.from_numpy(packed.target_M),
            temperature=temperature,
            last_ND=hidden_ND,
            layers=layers,
        )
        logp_M, entropy_M = self._logps(run, keep=keep)
        return logp_M, entropy_M, run

    def _inside(self, layer: _Layer, x: Tensor, rows: PackedRows, turn: tuple[Tensor, Tensor]) -> _Kept:
        """All but the last product."""
        kernels, shape = self._kernels, layer.shape
        joint = _with_spare(len(x), shape.joint, x.dtype)
        bias = joint_bias(layer.attention)
        if bias is None:
            torch.mm(self._rms_norm(x, layer.norms[0]), layer.qkv.t(), out=joint)
        else:
            torch.addmm(bias, self._rms_norm(x, layer.norms[0]), layer.qkv.t(), out=joint)
        attended = kernels.attend(rows, self._turned(layer, joint, turn), shape)
        y = torch.addmm(x, attended[0], layer.attention.o_proj.weight.detach().t())
        gates = torch.mm(self._rms_norm(y, layer.norms[1]), layer.gate_up.t())
        return _Kept(x=x, joint=joint, attended=attended, y=y, gates=gates)

    def _output(self, layer: _Layer, kept: _Kept) -> Tensor:
        return torch.addmm(kept.y, self._kernels.gate(kept.gates), layer.mlp.down_proj.weight.detach().t())

    def _logps(self, run: _Pass, *, keep: bool) -> tuple[Tensor, Tensor]:
        """Keeps the logits where all fit, so that the backward pass need not make them again."""
        weight_VD = self._head.weight.detach()
        normed_MD = self._rms_norm(run.last_ND.index_select(0, run.predictor_M), self._norm)
        chunks, found = self._chunks(len(normed_MD), keep=keep), []
        if keep and len(chunks) == 1:
            run.logits_MV = self._room_for_logits(len(normed_MD))
        for chunk in chunks:
            logits = torch.mm(normed_MD[chunk], weight_VD.t(), out=run.logits_MV)
            found.append(self._kernels.token_logps(logits, run.target_M[chunk], run.temperature))
        logp_M, entropy_M, run.normaliser_M = (torch.cat(part) for part in zip(*found, strict=True))
        return logp_M, entropy_M

    def _chunks(self, num: int, *, keep: bool) -> list[slice]:
        """Rows of logits that are made at a time: all, where they are to be kept and may."""
        weight = self._head.weight
        row_bytes = len(weight) * weight.element_size()
        step = num if keep and num * row_bytes <= KEEP_BYTES else max(1, CHUNK_BYTES // row_bytes)
        return [slice(at, min(num, at + step)) for at in range(0, num, step)]

    def _room_for_logits(self, num: int) -> Tensor:
        """For rows of logits, until `_head_backward` gives it back."""
        spare, self._spare_logits = self._spare_logits, None
        if spare is None or len(spare) < num:
            weight = self._head.weight
            spare = torch.empty(num, len(weight), dtype=weight.dtype)
        return spare[:num]

    def _backward(self, run: _Pass, grad_M: Tensor) -> None:
        grad_ND = self._head_backward(run, grad_M)
        for layer in reversed(self._layers):
            kept = run.layers.pop()
            if isinstance(kept, Tensor):
                kept = self._inside(layer, kept, run.rows, run.turn)
            grad_ND = self._layer_backward(layer, kept, run, grad_ND)
        self._give(self._embed.weight, grad_ND, run.ids_N)

    def _head_backward(self, run: _Pass, grad_M: Tensor) -> Tensor:
        """The gradient of the last layer's output [N, D]."""
        kernels, weight_VD = self._kernels, self._head.weight.detach()
        selected_MD = run.last_ND.index_select(0, run.predictor_M)
        normed_MD = self._rms_norm(selected_MD, self._norm)
        grad_normed_MD = torch.empty_like(normed_MD)
        for chunk in self._chunks(len(normed_MD), keep=True):
            logits = run.logits_MV if run.logits_MV is not None else torch.mm(normed_MD[chunk], weight_VD.t())
            assert run.normaliser_M is not None
            kernels.token_logps_grad(
                logits, run.target_M[chunk], run.normaliser_M[chunk], grad_M[chunk], run.temperature
            )
            torch.mm(logits, weight_VD, out=grad_normed_MD[chunk])
            self._give_product(self._head.weight, logits.t(), normed_MD[chunk])
        run.logits_MV, self._spare_logits = None, run.logits_MV
        grad_MD = torch.zeros_like(selected_MD)
        self._norm_backward(self._norm, selected_MD, grad_normed_MD, grad_MD)
        # In float32: the end of a prompt predicts the first token of every answer.
        grad_ND = torch.zeros(run.last_ND.shape).index_add_(0, run.predictor_M, grad_MD.float())
        return grad_ND.to(run.last_ND.dtype)

    def _layer_backward(self, layer: _Layer, kept: _Kept, run: _Pass, grad: Tensor) -> Tensor:
        """From the gradient of z, which is overwritten, to the gradient of x."""
        kernels, attention, mlp = self._kernels, layer.attention, layer.mlp
        product = torch.mm(grad, mlp.down_proj.weight.detach())
        kernels.gate_grad(kept.gates, product)
        self._give_product(mlp.down_proj.weight, kernels.turned(grad), product)
        self._give_joint(
            (mlp.gate_proj.weight, mlp.up_proj.weight),
            torch.mm(kernels.turned(kept.gates), self._rms_norm(kept.y, layer.norms[1])),
        )
        self._norm_backward(layer.norms[1], kept.y, torch.mm(kept.gates, layer.gate_up), grad)

        self._give_product(attention.o_proj.weight, grad.t(), kept.attended[0])
        grad_attended = torch.mm(grad, attention.o_proj.weight.detach())
        turned = kept.joint if layer.head_norms is None else self._turned(layer, kept.joint, run.turn)
        grad_joint = kernels.attend_grad(run.rows, turned, layer.shape, kept.attended, grad_attended)
        kernels.rotate(grad_joint, layer.shape, run.turn, back=True)
        for norm, columns in _normed_columns(layer):
            x, given = (_heads(each, columns, layer.shape.width) for each in (kept.joint, grad_joint))
            into = torch.zeros_like(x)
            self._norm_backward(norm, x, given, into)
            grad_joint[:, columns] = into.view(len(grad_joint), -1)
        modules = (attention.q_proj, attention.k_proj, attention.v_proj)
        self._give_joint(
            tuple(module.weight for module in modules),
            torch.mm(grad_joint.t(), self._rms_norm(kept.x, layer.norms[0])),
        )
        if attention.q_proj.bias is not None:
            self._give_joint(tuple(module.bias for module in modules), grad_joint.float().sum(0))
        self._norm_backward(layer.norms[0], kept.x, torch.mm(grad_joint, layer.qkv), grad)
        return grad

    def _turned(self, layer: _Layer, joint: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        """Queries and keys normalised, where the model does that, and in their positions; in place otherwise."""
        if layer.head_norms is not None:
            given, joint = joint, _with_spare(len(joint), joint.shape[1], joint.dtype).copy_(joint)
            for norm, columns in _normed_columns(layer):
                normed = self._rms_norm(_heads(given, columns, layer.shape.width), norm)
                joint[:, columns] = normed.view(len(joint), -1)
        self._kernels.rotate(joint, layer.shape, turn)
        return joint

    def _rms_norm(self, x: Tensor, norm: Any) -> Tensor:
        return self._kernels.rms_norm(x, norm.weight, norm.variance_epsilon)

    def _norm_backward(self, norm: Any, x: Tensor, given: Tensor, into: Tensor) -> None:
        self._give(norm.weight, self._kernels.rms_norm_grad(x, norm.weight, norm.variance_epsilon, given, into))

    def _give(self, parameter: nn.Parameter, gradient: Tensor, rows: Tensor | None = None) -> None:
        assert self._gradients is not None
        if parameter.requires_grad:
            self._gradients.add_gradient(parameter, gradient, rows)

    def _give_product(self, parameter: nn.Parameter, given: Tensor, x: Tensor) -> None:
        """The gradient of a weight from the turned gradient [out, N] of its product with x [N, in]."""
        assert self._gradients is not None
        if parameter.requires_grad:
            self._gradients.add_gradient(parameter, torch.mm(given, x, out=self._gradients.room(parameter)))

    def _give_joint(self, parameters: tuple[nn.Parameter, ...], gradient: Tensor) -> None:
        for parameter, part in zip(parameters, gradient.split([len(each) for each in parameters]), strict=True):
            self._give(parameter, part)


class _TokenLogps(torch.autograd.Function):
    """Ties the pass to autograd: the loss's gradient comes in, the parameters' go to MasterWeights."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, decoder: PackedDecoder, packed: PackedBatch, temperature: float
    ) -> tuple[Tensor, Tensor]:
        logp_M, entropy_M, ctx.run = decoder._forward(packed, temperature, keep=True)
        ctx.decoder = decoder
        ctx.mark_non_differentiable(entropy_M)
        return logp_M, entropy_M

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_M: Tensor, _: Tensor) -> tuple[None, None, None, None]:
        run, ctx.run = ctx.run, None
        ctx.decoder._backward(run, grad_M)
        return None, None, None, None


def _with_spare(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Empty, with rows behind it that the attention may read."""
    room = torch.empty(rows + SPARE_ROWS, columns, dtype=dtype)
    room[rows:].zero_()
    return room[:rows]


def _head_norms(attention: Any) -> tuple[Any, Any] | None:
    return (attention.q_norm, attention.k_norm) if parts(attention) >= HEAD_NORMS else None


def _normed_columns(layer: _Layer) -> list[tuple[Any, slice]]:
    """The norms of heads, each with its columns of the joint rows."""
    if layer.head_norms is None:
        return []
    queries, keys = (heads * layer.shape.width for heads in (layer.shape.heads, layer.shape.key_heads))
    return list(zip(layer.head_norms, (slice(0, queries), slice(queries, queries + keys)), strict=True))


def _heads(joint: Tensor, columns: slice, width: int) -> Tensor:
    """One row for each token and head."""
    return joint[:, columns].reshape(-1, width)


def _join(*modules: Any) -> Tensor:
    """One storage for these modules' weights, which become views of it and may be written to as before."""
    joint = torch.cat([module.weight.detach() for module in modules])
    for module, part in zip(modules, joint.split([len(module.weight) for module in modules]), strict=True):
        module.weight.data = part
    return joint


def _is_known(model: PreTrainedModel) -> bool:
    if not has_known_parts(model) or model.get_output_embeddings().bias is not None:
        return False
    base: Any = model.base_model
    for layer in base.layers:
        modules = (layer.self_attn.o_proj, layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj)
        if any(module.bias is not None for module in modules):
            return False
    return True


@contextmanager
def _recorded() -> Iterator[list[HeadShape]]:
    """Filled, by a run of the model, with how each layer attends."""
    shapes: list[HeadShape] = []

    def attend(module: nn.Module, query: Tensor, key: Tensor, *rest: Any, **asked: Any) -> Any:
        shapes.append(
            HeadShape(
                heads=query.shape[1],
                key_heads=key.shape[1],
                width=query.shape[3],
                scaling=asked.get("scaling") or query.shape[3] ** -0.5,
                window=asked.get("sliding_window"),
            )
        )
        return packed_attention.packed_attention(module, query, key, *rest, **asked)

    AttentionInterface.register(packed_attention.NAME, attend)
    try:
        yield shapes
    finally:
        AttentionInterface.register(packed_attention.NAME, packed_attention.packed_attention)
