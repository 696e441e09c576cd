"""The weight store of one node: `publish(version)` writes, `pull(version)` reads; no group has to form.

A version is one safetensors file, written beside and renamed, in shared memory where there is room and on disk
otherwise. Its header carries version, lineage and a checksum of the content; a reader recomputes the checksum from
the bytes it read, so that a sync is proven by content and not by a counter. The newest `keep` versions stay; older
ones are unlinked (a map that is still open survives that). Left out: other nodes.
"""

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from cauce.errors import VersionGoneError, WeightsError
from cauce.models.weights_hash import checksum
from cauce.weights.file import write_weights

SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedWeights:
    """What a reader gets: tensors by name, and what they are."""

    tensors: dict[str, torch.Tensor]
    version: int
    lineage: str
    checksum: str


class WeightStore:
    """One folder of published versions. The learner's process publishes; any process of the node pulls."""

    def __init__(self, folder: Path, *, keep: int) -> None:
        if keep < 1:
            raise WeightsError(f"a weight store keeps at least 1 version, not {keep}")
        self.folder = folder
        self._keep = keep

    def publish(self, tensors: Mapping[str, torch.Tensor], *, version: int, lineage: str) -> str:
        """Writes one version and returns the checksum of its content."""
        self.folder.mkdir(parents=True, exist_ok=True)
        others = [old for old in self.versions() if old != version]
        spare = max(0, len(others) - max(1, self._keep - 1))
        for old in others[:spare]:  # before the new one is written: shared memory is memory
            self._path(old).unlink(missing_ok=True)
        beside = self.folder / f".writing-{os.getpid()}.safetensors"
        try:
            digest = write_weights(beside, tensors, metadata={"version": str(version), "lineage": lineage})
            os.replace(beside, self._path(version))
        except OSError as error:
            raise WeightsError(f"cannot publish version {version} into {self.folder}: {error}") from error
        finally:
            beside.unlink(missing_ok=True)
        for old in self.versions()[: -self._keep]:
            self._path(old).unlink(missing_ok=True)
        return digest

    def pull(self, version: int) -> PublishedWeights:
        """Reads one version and checks its content against the checksum its writer stated."""
        path = self._path(version)
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a mapping)
        except FileNotFoundError:
            raise VersionGoneError(f"version {version} is not in {self.folder}; there are {self.versions()}") from None
        found = checksum(tensors)
        if found != metadata.get("checksum") or int(metadata.get("version", -1)) != version:
            raise WeightsError(
                f"{path} does not hold what was published: content {found}, header {metadata}; it is torn or foreign"
            )
        return PublishedWeights(tensors=tensors, version=version, lineage=metadata["lineage"], checksum=found)

    def versions(self) -> list[int]:
        """Versions that can be pulled, oldest first."""
        return sorted(int(path.stem.removeprefix("version_")) for path in self.folder.glob("version_*.safetensors"))

    def _path(self, version: int) -> Path:
        return self.folder / f"version_{version:06d}.safetensors"


def versions_kept(max_staleness: int) -> int:
    """Published versions that stay: in a synchronous run nobody reads an old one while a new one is written."""
    return max_staleness + 2 if max_staleness else 1


def choose_folder(run_dir: Path, *, run_id: str, bytes_needed: int) -> Path:
    """Shared memory where the versions that are kept fit with room to spare, else RUN/weights."""
    if SHARED_MEMORY.is_dir() and os.access(SHARED_MEMORY, os.W_OK):
        free = shutil.disk_usage(SHARED_MEMORY).free
        if free > 1.5 * bytes_needed:
            return SHARED_MEMORY / f"cauce-{run_id}-{os.getpid()}"
    return run_dir / f"weights-{os.getpid()}"


def sweep_orphans() -> list[Path]:
    """Removes weight folders in shared memory whose owner no longer lives; called when a run starts."""
    removed = []
    for folder in SHARED_MEMORY.glob("cauce-*"):
        owner = folder.name.rpartition("-")[2]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists() and os.access(folder, os.W_OK):
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(folder)
    return removed
