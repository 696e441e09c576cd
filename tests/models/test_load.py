"""Loading models: folders, GGUF, incomplete checkpoints, names, and saving them again."""

import json
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from cauce.engine.attention import ENGINE_ATTENTION
from cauce.errors import ModelError
from cauce.models.load import (
    _hub_refusal,
    load_model,
    load_tokenizer,
    parameter_names,
    resolve_dtype,
    resolve_path,
    weights_digest,
)
from cauce.models.save import save_model
from tests.models.gguf_wheel import GGUF_VOCAB, write_gguf
from tests.tiny import EOS_ID, KINDS, tiny_model


@pytest.mark.parametrize("kind", KINDS)
def test_loads_every_kind(tmp_path: Path, kind: str) -> None:
    loaded = load_model(str(tiny_model(tmp_path, kind, context=64)), dtype=torch.float32, attention="sdpa")
    assert loaded.context_length == 64
    assert loaded.eos_token_ids == (EOS_ID,)
    assert not loaded.model.training


def test_eos_ids_of_generation_config_and_tokenizer_are_joined(tmp_path: Path) -> None:
    tiny_model(tmp_path)
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token_id": [9, 11]}))
    assert load_model(str(tmp_path), dtype=torch.float32, attention="sdpa").eos_token_ids == (9, 11, EOS_ID)


def test_gguf_folder_equals_the_safetensors_it_was_made_from(tmp_path: Path) -> None:
    original = tiny_model(tmp_path / "original", vocab=GGUF_VOCAB)
    (tmp_path / "gguf").mkdir()
    write_gguf(original, tmp_path / "gguf" / "m.gguf")
    ours = load_model(str(tmp_path / "gguf"), dtype=torch.float32, attention="sdpa")
    theirs = load_model(str(original), dtype=torch.float32, attention="sdpa")
    assert parameter_names(ours.model) == parameter_names(theirs.model)
    for name, tensor in theirs.model.state_dict().items():
        assert torch.equal(ours.model.state_dict()[name], tensor), name


def test_missing_tensor_is_an_error_that_names_it(tmp_path: Path) -> None:
    file = tiny_model(tmp_path) / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(str(tmp_path), dtype=torch.float32, attention="sdpa")


def test_no_such_folder_is_said_without_asking_the_hub(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such folder"):
        load_model(str(tmp_path / "absent"), dtype=torch.float32, attention="sdpa")
    with pytest.raises(ModelError, match=r"model\.path is empty"):
        load_tokenizer("")


def test_pulled_name_wins_over_the_hub_and_a_folder_over_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAUCE_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    assert resolve_path("some-model") == Path("some-model")
    pulled = tmp_path / "home" / "models" / "some-model"
    pulled.mkdir(parents=True)
    assert resolve_path("some-model") == pulled
    (tmp_path / "some-model").mkdir()
    assert resolve_path("some-model") == Path("some-model")


@pytest.mark.parametrize("kind", ["llama_tied", "gpt2"])
def test_a_folder_in_bf16_is_loaded_in_the_dtype_that_is_asked_for(tmp_path: Path, kind: str) -> None:
    """A hub's folder keeps the dtype it has; a learner asks for fp32 and gets it."""
    tiny_model(tmp_path / "fp32", kind)
    stored = load_model(str(tmp_path / "fp32"), dtype=torch.bfloat16, attention="sdpa")
    save_model(stored.model, stored.tokenizer, tmp_path / "bf16")
    assert {t.dtype for t in load_file(tmp_path / "bf16" / "model.safetensors").values()} == {torch.bfloat16}
    loaded = load_model(str(tmp_path / "bf16"), dtype=torch.float32, attention="sdpa")
    assert {p.dtype for p in loaded.model.parameters()} == {torch.float32}
    for name, tensor in stored.model.named_parameters():
        assert torch.equal(loaded.model.get_parameter(name), tensor.float())


def test_why_the_hub_gave_nothing_is_said_in_words() -> None:
    assert _hub_refusal(LocalEntryNotFoundError("a page of text")) == "the hub cannot be reached from here"
    assert _hub_refusal(ValueError("a page of text")) == "the hub did not give it (ValueError)"


def test_tied_parameters_are_named_once(tmp_path: Path) -> None:
    tied = load_model(str(tiny_model(tmp_path / "a", "llama_tied")), dtype=torch.float32, attention="sdpa").model
    untied = load_model(str(tiny_model(tmp_path / "b", "llama")), dtype=torch.float32, attention="sdpa").model
    assert "lm_head.weight" not in parameter_names(tied)
    assert set(parameter_names(untied)) == {*parameter_names(tied), "lm_head.weight"}
    assert set(parameter_names(untied)) == set(untied.state_dict())


def test_dtypes_are_words(tmp_path: Path) -> None:
    assert resolve_dtype("fp32") is torch.float32
    assert resolve_dtype("bf16") is torch.bfloat16
    assert resolve_dtype("auto") in (torch.float32, torch.bfloat16)
    with pytest.raises(ModelError, match="fp16"):
        resolve_dtype("fp16")
    model = load_model(str(tiny_model(tmp_path)), dtype=torch.bfloat16, attention="sdpa").model
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("kind", ["llama_tied", "gpt2"])
def test_saved_folder_loads_with_transformers_alone(tmp_path: Path, kind: str) -> None:
    # G14: a model whose attention function is ours must leave a folder that knows nothing of it.
    loaded = load_model(str(tiny_model(tmp_path / "a", kind)), dtype=torch.float32, attention=ENGINE_ATTENTION)
    save_model(loaded.model, loaded.tokenizer, tmp_path / "b")
    assert ENGINE_ATTENTION not in (tmp_path / "b" / "config.json").read_text()
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "b")
    assert stock.dtype == torch.float32
    for name, tensor in loaded.model.state_dict().items():
        assert torch.equal(stock.state_dict()[name], tensor), name
    assert AutoTokenizer.from_pretrained(tmp_path / "b").chat_template == loaded.tokenizer.chat_template
    assert weights_digest(tmp_path / "b") == weights_digest(tmp_path / "a")
