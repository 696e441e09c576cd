"""Loading a causal language model and its tokenizer for an engine or a learner.

A path is a folder (safetensors, or one GGUF file), a GGUF file, a name that `cauce model pull` stored, or a
hub id. What a folder lacks is an error here: a tensor that is missing would otherwise stay random without a
word. Left out on purpose: sharding, quantised weights (a GGUF file is dequantised) and adapters.
"""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.utils import logging as transformers_logging

from cauce.errors import ModelError

WEIGHT_SUFFIXES = (".safetensors", ".gguf", ".bin")
HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken"]
SIGNS = ("config.json", "tokenizer.json", "tokenizer_config.json")  # a folder without any of them is another one
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
NO_LIMIT = 1 << 20  # context of a model whose config names none


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model in evaluation mode with what generation and training must know of it."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    eos_token_ids: tuple[int, ...]
    context_length: int
    path: str


def load_model(path: str, *, dtype: torch.dtype, attention: str) -> LoadedModel:
    """Load `path` in `dtype` with a registered attention function ("sdpa", "eager", or one of Cauce's)."""
    folder = local_folder(path)
    tokenizer = _tokenizer_of(folder)
    gguf = _gguf_file(folder)
    with without_progress_bar():
        model = _load_gguf(gguf, dtype, attention) if gguf else _load_folder(folder, dtype, attention)
    model.eval()
    context = getattr(model.config, "max_position_embeddings", None)
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        eos_token_ids=eos_token_ids(model.generation_config, tokenizer),
        context_length=int(context) if context else NO_LIMIT,
        path=str(folder),
    )


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model, without its weights."""
    return _tokenizer_of(local_folder(path))


def resolve_path(name: str) -> Path:
    """A folder or file as given, else a pulled model of that name, else the hub id itself."""
    given = Path(name).expanduser()
    if given.exists():
        return given
    pulled = models_dir() / name
    return pulled if pulled.is_dir() else Path(name)


def models_dir() -> Path:
    """Where `cauce model pull` keeps models: $CAUCE_HOME/models, by default ~/.cache/cauce/models."""
    home = os.environ.get("CAUCE_HOME")
    return (Path(home).expanduser() if home else Path.home() / ".cache" / "cauce") / "models"


def local_folder(name: str) -> Path:
    """Like resolve_path, but a hub id is fetched first, so that what comes back exists."""
    if not name:
        raise ModelError("model.path is empty; give a folder, a pulled name or a hub id")
    path = resolve_path(name)
    if path.is_dir() and not any(path.glob("*.gguf")) and not any((path / file).is_file() for file in SIGNS):
        raise ModelError(f"model {name!r}: the folder holds no model, neither {SIGNS[0]} nor a GGUF file")
    if path.exists():
        return path
    if path.is_absolute() or name.count("/") > 1 or name.startswith((".", "~")):
        raise ModelError(f"model {name!r}: no such folder; give a folder with config.json and safetensors")
    return download_from_hub(name)


def download_from_hub(name: str) -> Path:
    """The local snapshot of a hub id."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=HUB_FILES))
    except Exception as error:  # the hub client raises a dozen unrelated types; all mean "not to be had"
        raise ModelError(
            f"model {name!r}: no folder of that name, nothing pulled in {models_dir()}, and {_hub_refusal(error)}; "
            f"give a folder, or run `cauce model pull {name}` where there is a network"
        ) from error


def _hub_refusal(error: Exception) -> str:
    """Why the hub did not give a model, in words; its own texts are pages long and speak of its client."""
    from huggingface_hub.errors import GatedRepoError, HFValidationError, LocalEntryNotFoundError
    from huggingface_hub.errors import RepositoryNotFoundError as NotFound

    if isinstance(error, GatedRepoError):
        return "the hub gives it only to those who are logged in and have accepted its terms"
    if isinstance(error, NotFound | HFValidationError):
        return "the hub has no public model of that name"
    if isinstance(error, LocalEntryNotFoundError):
        return "the hub cannot be reached from here"
    return f"the hub did not give it ({type(error).__name__})"


def resolve_dtype(name: str) -> torch.dtype:
    """The torch dtype of a recipe's word; "auto" is bf16 where the hardware multiplies it, else fp32."""
    if name in DTYPES:
        return DTYPES[name]
    if name != "auto":
        raise ModelError(f"dtype {name!r}: choose auto, fp32 or bf16")
    return torch.bfloat16 if _has_native_bf16() else torch.float32


@contextmanager
def without_progress_bar() -> Iterator[None]:
    """A model that fits into one process loads in seconds; a bar for it only tears up what commands print."""
    was_enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            transformers_logging.enable_progress_bar()


def parameter_names(model: nn.Module) -> tuple[str, ...]:
    """Names of the trainable parameters as in state_dict; a tied one appears once, under its first name."""
    return tuple(name for name, parameter in model.named_parameters() if parameter.requires_grad)


def weights_digest(path: Path) -> str:
    """sha256 over names and bytes of the weight files of a folder, or of one file."""
    files = [path] if path.is_file() else sorted(f for f in path.iterdir() if f.suffix in WEIGHT_SUFFIXES)
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + b"\0")
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def _has_native_bf16() -> bool:
    """Of the CPU: engine and learner compute there, whatever else the machine has."""
    facts = (
        torch.backends.cpu.get_cpu_capability(),
        torch.cpu._is_avx512_bf16_supported(),
        torch.cpu._is_amx_tile_supported(),
    )
    return facts[0] == "AVX512" and (facts[1] or facts[2])


def _gguf_file(path: Path) -> Path | None:
    if path.suffix == ".gguf":
        return path
    files = sorted(path.glob("*.gguf"))
    if not files or any(path.glob("*.safetensors")):
        return None
    if len(files) > 1:
        names = ", ".join(f.name for f in files)
        raise ModelError(f"model {str(path)!r}: several GGUF files ({names}); name one of them")
    return files[0]


def _tokenizer_of(path: Path) -> PreTrainedTokenizerBase:
    gguf = _gguf_file(path)
    try:
        if gguf:
            return AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"model {str(path)!r}: no usable tokenizer ({str(error).splitlines()[0]})") from error


def _load_folder(folder: Path, dtype: torch.dtype, attention: str) -> PreTrainedModel:
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation=attention, output_loading_info=True
        )
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        raise ModelError(f"model {str(folder)!r} cannot be loaded: {str(error).splitlines()[0]}") from error
    model, info = loaded
    _check_complete(folder, info)
    return cast(PreTrainedModel, model)


def _load_gguf(file: Path, dtype: torch.dtype, attention: str) -> PreTrainedModel:
    """Read a GGUF file without accelerate, which transformers' own from_pretrained would ask for."""
    try:
        config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
        tensors = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model, torch_dtype=dtype)[
            "tensors"
        ]
    except (OSError, ValueError, NotImplementedError) as error:
        raise ModelError(f"model {str(file)!r} cannot be read as GGUF: {str(error).splitlines()[0]}") from error
    result = model.load_state_dict(tensors, strict=False)
    missing = set(result.missing_keys) & set(parameter_names(model))
    _check_complete(file, {"missing_keys": missing, "unexpected_keys": result.unexpected_keys})
    model.tie_weights()
    return model


def _check_complete(path: Path, info: dict[str, Any]) -> None:
    missing, wrong = sorted(map(str, info["missing_keys"])), sorted(map(str, info.get("mismatched_keys", ())))
    if missing or wrong:
        raise ModelError(
            f"model {str(path)!r}: {len(missing)} parameters are missing and {len(wrong)} have another "
            f"shape, the first being {(missing + wrong)[0]}; they would be random; use a complete one"
        )


def eos_token_ids(generation_config: Any, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Token ids that end an answer: those of generation_config.json, which may be None, and the tokenizer's own."""
    configured = None if generation_config is None else generation_config.eos_token_id
    ids = [] if configured is None else [configured] if isinstance(configured, int) else list(configured)
    if tokenizer.eos_token_id is not None:
        ids.append(tokenizer.eos_token_id)
    return tuple(sorted(set(map(int, ids))))
