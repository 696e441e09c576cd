"""vLLM's environment: what is installed, and that a wrong one is refused."""

import sys
from importlib import metadata
from pathlib import Path

import pytest
from benchmarks.trl_environment import read_requirements
from benchmarks.vllm_environment import PACKAGE, REQUIREMENTS, VARIABLE, ensure, link, needed

from cauce.engine.vllm_python import MADE, RELEASE


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


def test_what_is_installed_fits_the_engine() -> None:
    pinned = read_requirements(REQUIREMENTS.read_text("utf-8"))
    assert pinned[PACKAGE].startswith(f"{RELEASE}.")
    assert pinned["ray"] == metadata.version("ray")


def test_the_link_leads_to_the_environment_made_last(tmp_path: Path) -> None:
    for name in ("first", "second"):
        python = tmp_path / name / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(name)
        link(python, tmp_path)
        assert (tmp_path / MADE).read_text() == name
