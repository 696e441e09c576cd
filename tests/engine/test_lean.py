"""The lean forward against the models' own: which models it takes, and that it computes what they do."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import GraniteConfig, PreTrainedConfig

from cauce.engine.native import NativeEngine
from cauce.errors import ModelError
from cauce.models.load import load_model
from tests.engine.asking import ask, engine_of, mixed_requests, plain_logps, plain_model, random_prompt
from tests.tiny import EOS_ID, VOCAB, byte_tokenizer, tiny_model

LEAN = ("llama", "llama_tied", "qwen2", "qwen3", "mistral")
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "eos_token_id": EOS_ID,
    "bos_token_id": None,
    "pad_token_id": 256,
}


def save(folder: Path, config: PreTrainedConfig) -> Path:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def own_and_lean(folder: Path, dtype: torch.dtype) -> tuple[NativeEngine, NativeEngine]:
    """Two engines for the same model: one made to run the model's own forward."""
    own, lean = engine_of(folder, slots=6, dtype=dtype), engine_of(folder, slots=6, dtype=dtype)
    if lean.status()["forward"] != "lean":
        pytest.skip("this build has no packed products")
    own._lean = None
    return own, lean


@pytest.mark.parametrize("kind", LEAN)
def test_same_tokens_as_the_models_own_forward(tmp_path: Path, kind: str) -> None:
    own, lean = own_and_lean(tiny_model(tmp_path, kind), torch.float32)
    requests = mixed_requests(6)
    for expected, found in zip(own.generate(requests), lean.generate(requests), strict=True):
        assert expected.token_ids.tolist() == found.token_ids.tolist()
        np.testing.assert_allclose(found.logps, expected.logps, atol=1e-5)


@pytest.mark.parametrize("kind", LEAN)
def test_in_bf16_no_further_from_float32_than_the_models_own(tmp_path: Path, kind: str) -> None:
    folder = tiny_model(tmp_path, kind)
    own, lean = own_and_lean(folder, torch.bfloat16)
    reference = plain_model(folder)
    errors = {}
    for name, engine in (("own", own), ("lean", lean)):
        requests = [ask(n, random_prompt(12, n), samples=3, max_tokens=16) for n in range(8)]
        asked = {request.task: request for request in requests}
        found = engine.generate(requests)
        errors[name] = np.concatenate(
            [np.abs(c.logps - plain_logps(reference, asked[c.task], c)) for c in found]
        ).mean()
    assert errors["lean"] < 1.25 * errors["own"]


@pytest.mark.parametrize("bias", [True, False])
def test_biases_of_attention_and_mlp_count(tmp_path: Path, bias: bool) -> None:
    folder = tiny_model(tmp_path, "llama", attention_bias=bias, mlp_bias=bias)
    engine = engine_of(folder)
    assert engine.status()["forward"] == "lean"
    request = ask(0, random_prompt(9), samples=2, max_tokens=12)
    for completion in engine.generate([request]):
        np.testing.assert_allclose(completion.logps, plain_logps(plain_model(folder), request, completion), atol=1e-5)


def test_other_models_run_their_own_forward(tmp_path: Path) -> None:
    # GPT-2 has other parts; GeGLU instead of SwiGLU is another activation; Granite has the same parts as Llama and
    # scales what passes between them, which only the numbers show.
    folders = [
        tiny_model(tmp_path / "gpt2", "gpt2"),
        tiny_model(tmp_path / "gelu", "llama", hidden_act="gelu"),
        save(tmp_path / "granite", GraniteConfig(**SHAPE, residual_multiplier=0.3, embedding_multiplier=7.0)),
    ]
    for folder in folders:
        engine = engine_of(folder)
        assert engine.status()["forward"] == "model", folder.name
        request = ask(0, random_prompt(9), samples=2, max_tokens=12)
        for completion in engine.generate([request]):
            expected = plain_logps(plain_model(folder), request, completion)
            np.testing.assert_allclose(completion.logps, expected, atol=1e-5)


def test_weights_arrive_in_an_engine_that_kept_only_the_packed_ones(tmp_path: Path) -> None:
    old, new = tiny_model(tmp_path / "old"), tiny_model(tmp_path / "new", seed=1)
    engine, request = engine_of(old), ask(0, random_prompt(9), samples=3, max_tokens=12)
    engine.release_unpacked()
    tensors = {name: parameter.detach() for name, parameter in plain_model(new).named_parameters()}
    engine.load_state(tensors, version=1, lineage="0")
    for completion in engine.generate([request]):
        np.testing.assert_allclose(completion.logps, plain_logps(plain_model(new), request, completion), atol=1e-5)
    assert sum(parameter.numel() for parameter in engine._model.parameters()) < sum(t.numel() for t in tensors.values())
    with pytest.raises(ModelError, match="given back"), engine.plain_model("sdpa"):
        pass


def test_a_wrong_shape_is_refused_with_released_weights_too(tmp_path: Path) -> None:
    from cauce.errors import WeightsError

    engine = NativeEngine(load_model(str(tiny_model(tmp_path)), dtype=torch.float32, attention="sdpa"), slots=2)
    tensors = {name: parameter.detach().clone() for name, parameter in engine._model.named_parameters()}
    engine.release_unpacked()
    name = "model.layers.0.self_attn.q_proj.weight"
    with pytest.raises(WeightsError, match=name):
        engine.load_state({**tensors, name: tensors[name][:-1]}, version=1, lineage="0")
    assert engine.version == 0
