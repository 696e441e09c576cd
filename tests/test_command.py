"""The command in what a person is told to type next can be typed."""

import sys
from pathlib import Path

import pytest

from cauce.command import command


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment with the script, in the folder that a person is in; not on PATH."""
    folder = tmp_path / ".venv" / "bin"
    folder.mkdir(parents=True)
    for name in ("python", "cauce"):
        (folder / name).write_text("#!/bin/sh\n")
        (folder / name).chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    return folder


def test_on_the_path_its_name_is_enough(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{installed}:/usr/bin")
    assert command() == "cauce"


def test_elsewhere_it_is_a_path(installed: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert command() == ".venv/bin/cauce"
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    assert command() == str(installed / "cauce")


def test_another_installation_on_the_path_is_not_meant(
    installed: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "cauce").write_text("#!/bin/sh\n")
    (foreign / "cauce").chmod(0o755)
    monkeypatch.setenv("PATH", str(foreign))
    assert command() == ".venv/bin/cauce"


def test_without_a_script_the_module_is_run(installed: Path) -> None:
    (installed / "cauce").unlink()
    assert command() == f"{installed / 'python'} -m cauce"
