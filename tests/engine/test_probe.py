"""The probe at load: every kind of tiny model passes; what the engine cannot run, or runs wrongly, is refused."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, BloomConfig, MambaConfig, PreTrainedConfig

from cauce.engine.probe import TOLERANCE_FP32, TOLERANCE_HALF, largest_difference, probed_engine
from cauce.errors import ModelError
from cauce.models.load import load_model
from tests.engine.asking import ask, engine_of, random_prompt, same
from tests.tiny import EOS_ID, KINDS, VOCAB, byte_tokenizer, tiny_model


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_passes_and_generates_as_if_it_had_not_been_probed(
    tmp_path: Path, kind: str, deterministic: bool
) -> None:
    folder = tiny_model(tmp_path / kind, kind)
    loaded = load_model(str(folder), dtype=torch.float32, attention="sdpa")
    engine = probed_engine(loaded, slots=4, deterministic=deterministic)
    assert largest_difference(engine, plain_attention="sdpa") < TOLERANCE_FP32 / 10
    assert engine.is_idle
    requests = [ask(n, random_prompt(5 + n), samples=2) for n in range(3)]
    unprobed = engine_of(folder, slots=4, deterministic=deterministic)
    for ours, theirs in zip(engine.generate(requests), unprobed.generate(requests), strict=True):
        assert same(ours, theirs)


def test_bf16_is_compared_more_loosely(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "llama")
    engine = probed_engine(load_model(str(folder), dtype=torch.bfloat16, attention="sdpa"), slots=4)
    assert 0 < largest_difference(engine, plain_attention="sdpa") < TOLERANCE_HALF


IDS = {"eos_token_id": EOS_ID, "pad_token_id": 256, "bos_token_id": None}


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4, **IDS), "BloomForCausalLM"),  # ALiBi
        (MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, state_size=4, **IDS), "MambaForCausalLM"),
    ],
    ids=["bloom", "mamba"],
)
def test_a_model_that_the_engine_cannot_run_is_refused_by_name(
    tmp_path: Path, config: PreTrainedConfig, name: str
) -> None:
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), dtype=torch.float32, attention="eager")
    with pytest.raises(ModelError, match=rf"the native engine .*{name}.* set model\.path") as error:
        probed_engine(loaded, slots=4)
    assert "\n" not in str(error.value)  # one line, as it arrives from a worker's constructor


def test_an_engine_that_decodes_with_other_weights_differs(tmp_path: Path) -> None:
    """Weights changed behind its back: its packed copies are old, and the plain forward shows it."""
    engine = engine_of(tiny_model(tmp_path / "llama"), slots=4)
    if engine.status()["forward"] != "lean":
        pytest.skip("this build has no packed products")
    assert largest_difference(engine, plain_attention="sdpa") < TOLERANCE_FP32
    with torch.no_grad():
        engine._model.base_model.layers[0].mlp.up_proj.weight.mul_(1.1)
    assert largest_difference(engine, plain_attention="sdpa") > 10 * TOLERANCE_FP32


class Biased(torch.nn.Embedding):
    """Looks at how many tokens come at once, as recurrent state would: decode is not what a whole row is."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) + 0.1 * (ids.shape[1] > 1)


def test_a_model_whose_decode_is_not_its_forward_is_refused_with_the_difference(tmp_path: Path) -> None:
    loaded = load_model(str(tiny_model(tmp_path / "llama")), dtype=torch.float32, attention="sdpa")
    embedding = loaded.model.get_input_embeddings()
    loaded.model.set_input_embeddings(Biased(*embedding.weight.shape, _weight=embedding.weight.detach()))
    with pytest.raises(ModelError, match=r"differ by \d\.\de[+-]\d\d from those of LlamaForCausalLM.*above 0\.001"):
        probed_engine(loaded, slots=4)


def test_numbers_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    loaded = load_model(str(tiny_model(tmp_path / "llama")), dtype=torch.float32, attention="sdpa")
    with torch.no_grad():
        loaded.model.get_input_embeddings().weight.fill_(np.nan)
    with pytest.raises(ModelError, match="LlamaForCausalLM"):
        probed_engine(loaded, slots=4)
