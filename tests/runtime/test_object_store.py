"""What passes through Ray's object store leaves it again: requests and answers, batch after batch."""

import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray._private.internal_api import memory_summary

from cauce.runtime.ray_workers import RayWorkers
from cauce.runtime.world import Resources

STORE_BYTES = 100 * 2**20
BATCH_BYTES = 4 * 2**20
ROOM = Resources(cpus=0, gpus=0, memory_bytes=None, threads=1)


class Echo:
    """Answers with as much as it is given."""

    def work(self, *, given: np.ndarray) -> np.ndarray:
        return given + 1


@pytest.fixture
def store() -> Iterator[None]:
    folder = tempfile.mkdtemp(prefix="ct-", dir="/tmp")
    ray.init(
        address="local",
        num_cpus=2,
        object_store_memory=STORE_BYTES,
        include_dashboard=False,
        _temp_dir=folder,
        log_to_driver=False,
    )
    yield
    ray.shutdown()


def used_mb() -> float:
    text = memory_summary(stats_only=True)
    found = re.search(r"Plasma memory usage (\d+) MiB", text)
    assert found is not None, text
    assert "Spilled" not in text, text
    return float(found[1])


@pytest.mark.slow
def test_two_hundred_batches_leave_the_object_store_again(store: None, tmp_path: Path) -> None:
    """H15: 800 MB each way through a store of 100 MB, and nothing is spilled."""
    workers = RayWorkers(log_folder=tmp_path, env={})
    worker = workers.start(Echo, name="echo-0", role="rollout", resources=ROOM, kwargs={})
    for number in range(200):
        given: Any = np.full(BATCH_BYTES // 8, number, np.int64)
        call = workers.call(worker, Echo.work, given=given)
        while not workers.wait([call], timeout_s=10.0):
            pass
        assert int(workers.result(call)[0]) == number + 1
        assert number % 20 or used_mb() < STORE_BYTES / 2**20
    deadline = time.monotonic() + 20  # Ray frees in batches, a second or so later
    while used_mb() > 2 * BATCH_BYTES / 2**20 and time.monotonic() < deadline:
        time.sleep(0.5)
    assert used_mb() <= 2 * BATCH_BYTES / 2**20
    workers.kill(worker)
