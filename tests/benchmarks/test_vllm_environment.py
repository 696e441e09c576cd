"""vLLM's environment: what is installed, and that a wrong one is refused."""

import sys

import pytest
from benchmarks.vllm_environment import PACKAGE, REQUIREMENTS, VARIABLE, ensure, needed


def test_extras_images_and_sound_are_left_out() -> None:
    wanted = [
        "numpy",
        "torchvision==0.25; platform_machine == 'x86_64'",
        "torchaudio",
        "ray ; extra == 'ray'",
        "torch-x",
    ]
    assert needed(wanted) == ["numpy", "torch-x"]


def test_an_environment_without_vllm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, sys.executable)
    with pytest.raises(RuntimeError, match=rf"(?s)lacks a package of {REQUIREMENTS.name}.*{PACKAGE}"):
        ensure()
