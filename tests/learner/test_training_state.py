"""Stopping and going on: bit for bit, into folders that any loader reads, and never into another model."""

import json
import random

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cauce.algorithms.advantages import make_batch
from cauce.errors import CheckpointError
from cauce.learner.learner import Learner
from tests.learner.cases import algorithm, loaded, random_sequences, settings


def learner(folder, kind="llama_tied", **changes):
    chosen = settings(lr=0.01, schedule="cosine", weight_decay=0.1, **changes)
    return Learner(loaded(folder, kind), algorithm=algorithm(), settings=chosen, temperature=1.0, total_steps=10)


def train(each, steps):
    for step in steps:
        each.forward_backward(make_batch(random_sequences(step, groups=2)))
        each.optim_step()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_stopping_at_step_five_of_ten_is_bit_equal(tmp_path, dtype):
    """G3."""
    straight = learner(tmp_path / "model", dtype=dtype)
    train(straight, range(5))
    straight.save(tmp_path / "saved")
    train(straight, range(5, 10))
    resumed = learner(tmp_path / "model", dtype=dtype)
    resumed.load(tmp_path / "saved")
    assert resumed.status()["optim_step"] == 5
    train(resumed, range(5, 10))
    assert resumed.checksum() == straight.checksum()
    for name, weight in resumed.weights(torch.float32).items():
        assert torch.equal(weight, straight.weights(torch.float32)[name])
    for name, moment in resumed._optimizer.moments().items():
        assert torch.equal(moment, straight._optimizer.moments()[name])


def test_without_the_moments_it_would_not_be_equal(tmp_path):
    """G3."""
    # What the test above would miss if AdamW's state were lost on the way: this must differ.
    straight = learner(tmp_path / "model")
    train(straight, range(5))
    straight.save(tmp_path / "saved")
    forgetful = learner(tmp_path / "saved")
    train(straight, range(5, 7))
    train(forgetful, range(5, 7))
    assert forgetful.checksum() != straight.checksum()


def test_random_generators_go_on(tmp_path):
    """G8."""
    each = learner(tmp_path / "model")
    torch.manual_seed(3), np.random.seed(4), random.seed(5)
    np.random.standard_normal(), random.gauss(0, 1)  # both keep a second number back
    each.save(tmp_path / "saved")
    expected = (
        torch.rand(3).tolist(),
        np.random.standard_normal(3).tolist(),
        random.gauss(0, 1),
        random.random(),
    )
    torch.manual_seed(0), np.random.seed(0), random.seed(0)
    each.load(tmp_path / "saved")
    found = torch.rand(3).tolist(), np.random.standard_normal(3).tolist(), random.gauss(0, 1), random.random()
    assert found == expected


@pytest.mark.parametrize("kind", ["llama_tied", "gpt2"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_folder_loads_anywhere_in_float32_and_says_the_same(tmp_path, kind, dtype):
    """G14."""
    each = learner(tmp_path / "model", kind, dtype=dtype)
    train(each, range(2))
    each.save_model(tmp_path / "final")
    config = json.loads((tmp_path / "final" / "config.json").read_text())
    assert config["architectures"]
    assert "cauce" not in json.dumps(config)
    served = AutoModelForCausalLM.from_pretrained(tmp_path / "final").eval()
    assert served.dtype == torch.float32
    saved = dict(served.named_parameters())
    for name, weight in each.weights(torch.float32).items():
        assert torch.equal(saved[name], weight)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "final")
    prompt = tokenizer("2 + 3 =", return_tensors="pt").input_ids
    answer = served.generate(prompt, max_new_tokens=8, do_sample=False)
    if dtype == "fp32":
        own = each._model
        own.set_attn_implementation("sdpa")
        assert torch.equal(own.generate(prompt, max_new_tokens=8, do_sample=False), answer)


def test_another_models_checkpoint_is_refused_by_name(tmp_path):
    """G6."""
    each = learner(tmp_path / "small", "llama")
    each.save(tmp_path / "saved")
    loaded(tmp_path / "wide", "llama", hidden=64)
    other = learner(tmp_path / "wide", "llama")
    before = other.checksum()
    with pytest.raises(CheckpointError, match=r"saved.*another model than .*wide.*\[260, 32\].*\[260, 64\]"):
        other.load(tmp_path / "saved")
    assert other.checksum() == before


def test_a_folder_without_training_state_is_refused(tmp_path):
    """G3."""
    each = learner(tmp_path / "model")
    each.save_model(tmp_path / "saved")
    with pytest.raises(CheckpointError, match=r"lacks trainer_state\.safetensors"):
        each.load(tmp_path / "saved")
    with pytest.raises(CheckpointError, match=r"holds no model\.safetensors"):
        each.load(tmp_path / "nowhere")
