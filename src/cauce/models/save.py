"""Saving a model as an ordinary Hugging Face folder.

The folder holds config.json, generation_config.json, safetensors and the tokenizer with its chat template, so
that `from_pretrained` of transformers, or any server, loads it. Tensors keep their dtype: fp32 masters stay
fp32.
"""

from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cauce.models.load import without_progress_bar


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write `model` and `tokenizer` to `folder`, which is created; files of the same names are replaced."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    # A quantised origin must not make the loader look for a quantiser: these are plain tensors.
    if getattr(model.config, "quantization_config", None) is not None:
        del model.config.quantization_config
    with without_progress_bar():
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
