"""TRL in an environment of its own, made once under .bench/ and found again by the content of its requirements.

`CAUCE_BENCH_TRL_PYTHON` names the Python of an environment that exists already; its versions are checked.
"""

import json
import os
import subprocess
import sys
import venv
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.machine import num_cpus

VARIABLE = "CAUCE_BENCH_TRL_PYTHON"
REQUIREMENTS = Path(__file__).with_name("trl-requirements.txt")
ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".bench"

_ASK = "import importlib.metadata as m, json, sys; print(json.dumps({n: m.version(n) for n in sys.argv[1:]}))"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrlEnvironment:
    """The Python that runs TRL, and the versions it has."""

    python: Path
    versions: Mapping[str, str]

    @property
    def title(self) -> str:
        return f"TRL {self.versions['trl']}"

    def env(self) -> dict[str, str]:
        """Variables for its processes: all CPUs, and no look at any network."""
        settings = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "TOKENIZERS_PARALLELISM": "false"}
        return {"OMP_NUM_THREADS": str(num_cpus()), **os.environ, **settings}


def ensure() -> TrlEnvironment:
    """The environment, made first where there is none (some minutes)."""
    given = os.environ.get(VARIABLE)
    python = Path(given) if given else _made()
    return TrlEnvironment(python=python, versions=checked_versions(python, REQUIREMENTS, VARIABLE))


def checked_versions(python: Path, requirements: Path, variable: str) -> dict[str, str]:
    """The versions that an environment has of what a file pins; another one than pinned is an error."""
    wanted = read_requirements(requirements.read_text(encoding="utf-8"))
    found = _versions(python, wanted, requirements.name)
    for name, version in wanted.items():
        if found[name].partition("+")[0] != version:
            raise RuntimeError(
                f"{python} has {name} {found[name]}, {requirements.name} asks for {version}; install that there, or "
                f"unset {variable} to have an environment made under {CACHE.name}/"
            )
    return found


def read_requirements(text: str) -> dict[str, str]:
    """Name -> version of a file in which every package is pinned."""
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    return dict(line.split("==", 1) for line in lines if line)


def _made() -> Path:
    content = zlib.crc32(REQUIREMENTS.read_bytes())
    folder = CACHE / f"trl-{content:08x}"
    python, stamp = folder / "bin" / "python", folder / ".installed"
    if not stamp.exists():
        print(f"making an environment for TRL in {folder}", flush=True)
        venv.create(folder, with_pip=True, clear=folder.exists(), symlinks=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", "-r", str(REQUIREMENTS)], check=True)
        stamp.touch()
    return python


def _versions(python: Path, names: Mapping[str, str], file: str) -> dict[str, str]:
    asked = subprocess.run([str(python), "-c", _ASK, *names], capture_output=True, text=True, check=False, timeout=60)
    if asked.returncode != 0:
        raise RuntimeError(f"{python} lacks a package of {file}: {asked.stderr.strip()[-300:]}")
    found: dict[str, str] = json.loads(asked.stdout)
    return found


if __name__ == "__main__":
    print(ensure().python, file=sys.stdout)
