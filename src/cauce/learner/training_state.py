"""What a learner writes to a folder and reads back: a Hugging Face folder, and beside it the state of
training.

    model.safetensors, config.json, tokenizer files    float32 weights; any server loads the folder
    trainer_state.safetensors                          AdamW's moments by parameter name
    trainer_state.json                                 optimizer step, schedule, random generators

No pickle: a checkpoint holds numbers and text only. Atomicity and naming are checkpoint.py's.
"""

import base64
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from cauce.errors import CheckpointError
from cauce.learner.optimizer import Optimizer
from cauce.models.load import LoadedModel

MOMENTS_FILE = "trainer_state.safetensors"
STATE_FILE = "trainer_state.json"


def save_model(folder: Path, loaded: LoadedModel, weights: Mapping[str, Tensor]) -> None:
    """Write the model with these trainable weights in place of its own, which may be a bf16 copy of them."""
    model = loaded.model
    folder.mkdir(parents=True, exist_ok=True)
    tied = {parameter.data_ptr() for parameter in model.parameters() if parameter.requires_grad}
    others = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if name not in weights and tensor.data_ptr() not in tied
    }
    if getattr(model.config, "quantization_config", None) is not None:
        del model.config.quantization_config  # weights that came from GGUF are plain numbers now
    model.save_pretrained(folder, state_dict={**others, **weights})
    # The file holds float32 whatever the model computes in; a loader follows the word in the config.
    config = json.loads((folder / "config.json").read_text())
    config["dtype"] = "float32"
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    loaded.tokenizer.save_pretrained(folder)


def load_weights(folder: Path, *, expected: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """The trainable weights of a saved folder, which must have the shapes of `expected`."""
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder} holds no model.safetensors: not a checkpoint of Cauce")
    tensors: dict[str, Tensor] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            names = set(opened.keys())
            tensors.update({key: opened.get_tensor(key) for key in expected if key in names})
    if set(tensors) != set(expected):
        # Some architectures name parameters otherwise on disk; transformers knows how to translate.
        saved = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        tensors = {key: p.detach() for key, p in saved.named_parameters() if key in expected}
    for key, wanted in expected.items():
        found = tensors.get(key)
        if found is None or found.shape != wanted.shape:
            shape = "nothing" if found is None else f"shape {list(found.shape)}"
            raise CheckpointError(
                f"the checkpoint {folder} is of another model than {name}: {key} has {shape} there and "
                f"shape {list(wanted.shape)} here; resume with the run's own model, or start a new run folder"
            )
    return tensors


def save(folder: Path, *, optimizer: Optimizer) -> None:
    """Write moments, counters and random generators into an existing folder."""
    save_file({name: t.contiguous() for name, t in optimizer.moments().items()}, folder / MOMENTS_FILE)
    state = {
        "optim_step": optimizer.num_steps,
        "total_steps": optimizer.total_steps,
        "next_lr": optimizer.next_lr,
        "random": random_state(),
    }
    (folder / STATE_FILE).write_text(json.dumps(state) + "\n")


def load(folder: Path, *, optimizer: Optimizer) -> None:
    """Put back what `save` wrote."""
    for name in (MOMENTS_FILE, STATE_FILE):
        if not (folder / name).is_file():
            raise CheckpointError(
                f"{folder} lacks {name}: training cannot go on from a model alone; give it as model.path of a new run"
            )
    state = json.loads((folder / STATE_FILE).read_text())
    optimizer.load(load_file(folder / MOMENTS_FILE), num_steps=int(state["optim_step"]))
    set_random_state(state["random"])


def random_state() -> dict[str, Any]:
    """The generators of Python, NumPy and torch as JSON-safe data."""
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    version, numbers, gauss = random.getstate()
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [kind, np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
        "torch": base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode(),
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Let all three generators go on where `random_state` was called."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.array(keys, np.uint32), position, has_gauss, cached))
    raw = np.frombuffer(base64.b64decode(state["torch"]), np.uint8).copy()
    torch.set_rng_state(torch.from_numpy(raw))
