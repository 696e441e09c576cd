"""Which Ray a run uses: one this process already started, one at an address that was given, or our own.

Never a stranger's by accident: "local" ignores RAY_ADDRESS and whatever else runs on this machine, and has a folder
of its own. Ray 2.60 switches token authentication on for local clusters and listens on all interfaces with its own
ports, so the token is never switched off here; the dashboard stays on loopback.
"""

import logging
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import ray
import torch

from cauce.errors import ResourceError
from cauce.recipe.models import ClusterSettings
from cauce.runtime.placement import NodeRoom
from cauce.runtime.process import available_cpus
from cauce.runtime.reaper import Reaper

OBJECT_STORE_BYTES = 200 * 2**20  # weights travel by file; only requests and answers pass through the object store


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A Ray that this run may use."""

    how: str  # for people: which Ray this is, and why
    dashboard: str | None
    ours: bool  # we started it, so we shut it down
    folder: Path | None
    reaper: Reaper | None

    def describe(self) -> str:
        if not self.dashboard:
            return self.how
        return f"{self.how}; dashboard http://{self.dashboard} (it asks for the token that `ray get-auth-token` prints)"


def start_cluster(settings: ClusterSettings, *, object_store: int | Literal["auto"] = "auto") -> Cluster:
    """Attaches to Ray or starts it, and says which.

    Raises:
        ResourceError: when an address that was given cannot be joined; the text names the likely cause.
    """
    if ray.is_initialized():
        context = ray.get_runtime_context()
        return _joined(f"the Ray that this process had already started ({context.gcs_address})")
    if settings.address != "local":
        return _join(settings)
    cpus = _own_cpus(settings)
    folder = Path(tempfile.mkdtemp(prefix="cauce-", dir=_short_temp()))
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    ray.init(
        address="local",
        num_cpus=cpus,
        object_store_memory=OBJECT_STORE_BYTES if object_store == "auto" else object_store,
        include_dashboard=settings.dashboard,
        dashboard_host="127.0.0.1",
        namespace=settings.namespace or None,
        _temp_dir=str(folder),
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    return Cluster(
        how=f"a Ray of its own on this machine, {cpus} CPUs",
        dashboard=_dashboard(),
        ours=True,
        folder=folder,
        reaper=Reaper() if Path("/proc/self/stat").exists() else None,
    )


def stop_cluster(cluster: Cluster) -> None:
    """Shuts down what we started; leaves a Ray of somebody else alone."""
    if not cluster.ours:
        return
    ray.shutdown()
    if cluster.reaper is not None:
        cluster.reaper.dismiss()
    if cluster.folder is not None:
        shutil.rmtree(cluster.folder, ignore_errors=True)


def own_room(settings: ClusterSettings) -> NodeRoom | None:
    """The most that a Ray of our own will offer, known before it starts; None where another will be used."""
    if ray.is_initialized() or settings.address != "local":
        return None
    return NodeRoom(
        name="this machine",
        cpus=_own_cpus(settings),
        gpus=torch.cuda.device_count(),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    )


def node_rooms() -> list[NodeRoom]:
    """Every live node with what it offers in all."""
    rooms = []
    for node in ray.nodes():
        if not node["Alive"]:
            continue
        offer = node["Resources"]
        rooms.append(
            NodeRoom(
                name=node["NodeManagerHostname"],
                cpus=offer.get("CPU", 0.0),
                gpus=offer.get("GPU", 0.0),
                memory_bytes=offer.get("memory", 0.0),
            )
        )
    return rooms


def _join(settings: ClusterSettings) -> Cluster:
    try:
        ray.init(
            address=settings.address,
            namespace=settings.namespace or None,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except ConnectionError as error:
        token = os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH")
        seen = "RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH is set" if token else "neither RAY_AUTH_TOKEN nor _PATH is set"
        raise ResourceError(
            f"cannot join the Ray at cluster.address={settings.address!r}: {error}. Ray gives the same message for a "
            f"wrong token: {seen}, mode {os.environ.get('RAY_AUTH_MODE', 'not set')!r}. All nodes need one token: "
            'copy what `ray get-auth-token` prints there into RAY_AUTH_TOKEN here, or set cluster.address="local"'
        ) from error
    context = ray.get_runtime_context()
    return _joined(f"the Ray at {context.gcs_address}, as cluster.address={settings.address!r} asks")


def _joined(how: str) -> Cluster:
    return Cluster(how=how, dashboard=_dashboard(), ours=False, folder=None, reaper=None)


def _own_cpus(settings: ClusterSettings) -> int:
    return available_cpus() if settings.cpus == "auto" else int(settings.cpus)


def _dashboard() -> str | None:
    worker = ray._private.worker
    return worker.get_dashboard_url() or None


def _short_temp() -> str:
    """Socket paths below it have a limit of about 107 bytes, so a deep TMPDIR cannot serve."""
    folder = tempfile.gettempdir()
    return folder if len(folder) <= 20 else "/tmp"
