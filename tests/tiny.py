"""Tiny random models and a byte tokenizer, saved as ordinary Hugging Face folders; shared by all tests.

A tiny model has two layers, float32 weights and a vocabulary of the 256 bytes and a few special tokens, so
that every test runs on a CPU in milliseconds and reads as text what a model samples.
"""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

KINDS = ("llama", "llama_tied", "qwen2", "qwen3", "mistral", "gpt2")
SPECIAL_TOKENS = ("<|pad|>", "<|im_start|>", "<|im_end|>", "<|endoftext|>")
VOCAB = 256 + len(SPECIAL_TOKENS)
EOS_ID = 256 + SPECIAL_TOKENS.index("<|im_end|>")
SLIDING_WINDOW = 8

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte (ids 0-255, in the order of the byte-level alphabet) and four special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<|pad|>",
        eos_token="<|im_end|>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def tiny_model(
    folder: Path,
    kind: str = "llama",
    seed: int = 0,
    vocab: int = VOCAB,
    layers: int = 2,
    hidden: int = 32,
    heads: int = 4,
    kv_heads: int = 2,
    context: int = 256,
    scale: float = 0.25,
    **config: Any,
) -> Path:
    """Save a random model of one of KINDS with the byte tokenizer and return its folder.

    `scale` is the spread of the random weights: large enough that logits differ clearly between tokens.
    """
    settings = tiny_config(kind, vocab, layers, hidden, heads, kv_heads, context, config)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(settings, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(0.0, scale)
                else:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
    folder = Path(folder)
    model.generation_config.eos_token_id = settings.eos_token_id
    model.generation_config.pad_token_id = settings.pad_token_id
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def tiny_config(
    kind: str,
    vocab: int,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    context: int,
    config: dict[str, Any],
) -> PreTrainedConfig:
    """The transformers config of one kind of tiny model."""
    ids = {"eos_token_id": EOS_ID, "pad_token_id": 256, "bos_token_id": None}
    if kind == "gpt2":
        widths = {"n_embd": hidden, "n_layer": layers, "n_head": heads, "n_positions": context}
        return GPT2Config(vocab_size=vocab, **{**widths, **ids, **config})
    shape = {
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": context,
        "tie_word_embeddings": False,
    }
    if kind == "llama":
        return LlamaConfig(vocab_size=vocab, **{**shape, **ids, **config})
    if kind == "llama_tied":
        return LlamaConfig(vocab_size=vocab, **{**shape, **ids, "tie_word_embeddings": True, **config})
    if kind == "qwen2":
        # The first layer attends to everything, the others through a window: two kinds of mask in one model.
        window = {"use_sliding_window": True, "sliding_window": SLIDING_WINDOW, "max_window_layers": 1}
        return Qwen2Config(vocab_size=vocab, **{**shape, **window, **ids, **config})
    if kind == "qwen3":
        return Qwen3Config(vocab_size=vocab, head_dim=hidden // heads, **{**shape, **ids, **config})
    if kind == "mistral":
        return MistralConfig(vocab_size=vocab, sliding_window=SLIDING_WINDOW, **{**shape, **ids, **config})
    raise ValueError(f"kind {kind!r}: choose one of {', '.join(KINDS)}")
