"""What decoders like Llama's consist of: the parts that a forward written out for them must know.

Whether a model really computes what its parts suggest is for a comparison with its own forward to say; a model with
another part is not even tried.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

BASE_PARTS = {"embed_tokens", "layers", "norm", "rotary_emb"}
LAYER_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj"}
HEAD_NORMS = {"q_norm", "k_norm"}  # Qwen 3 normalises each head
MLP_PARTS = {"gate_proj", "up_proj", "down_proj", "act_fn"}


def joint_bias(attention: Any) -> Tensor | None:
    """Of the product that makes queries, keys and values; None where they have none."""
    biases = [attention.q_proj.bias, attention.k_proj.bias, attention.v_proj.bias]
    return torch.cat([bias.detach() for bias in biases]) if all(bias is not None for bias in biases) else None


def has_known_parts(model: PreTrainedModel) -> bool:
    """Whether every module is one that such a forward computes."""
    base: Any = model.base_model
    if parts(base) != BASE_PARTS or not isinstance(model.get_output_embeddings(), nn.Linear):
        return False
    norms = [base.norm]
    for layer in base.layers:
        attention = parts(layer.self_attn)
        if attention not in (ATTENTION_PARTS, ATTENTION_PARTS | HEAD_NORMS):
            return False
        if parts(layer) != LAYER_PARTS or parts(layer.mlp) != MLP_PARTS:
            return False
        linears = [getattr(layer.self_attn, name) for name in sorted(ATTENTION_PARTS)]
        linears += [layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj]
        if not all(type(part) is nn.Linear for part in linears):
            return False
        if len({part.bias is None for part in linears[:1] + linears[2:4]}) > 1 or not _is_silu(layer.mlp.act_fn):
            return False
        norms += [layer.input_layernorm, layer.post_attention_layernorm]
        norms += [getattr(layer.self_attn, name) for name in sorted(attention & HEAD_NORMS)]
    return all(hasattr(norm, "variance_epsilon") and _names(norm) == {"weight"} for norm in norms)


def parts(module: nn.Module) -> set[str]:
    """Names of the direct children."""
    return {name for name, _ in module.named_children()}


def _names(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_parameters()}


def _is_silu(activation: nn.Module) -> bool:
    return isinstance(activation, nn.SiLU) or type(activation).__name__ == "SiLUActivation"
