"""A tiny model, a session without Ray and a run of it, for the tests of whole runs."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.local_session import LocalSession, train_locally, use_local_session
from tests.runtime.straight_run import PLANS, SHAPE
from tests.tiny import tiny_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch) -> type[LocalSession]:
    return use_local_session(monkeypatch)


@pytest.fixture(scope="session")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that never stops; `model` lies beside it. To be copied, and never changed."""
    folder = tmp_path_factory.mktemp("straight")
    with pytest.MonkeyPatch.context() as patch:
        use_local_session(patch)
        train_locally(tiny_model(folder / "model"), folder / "run", run__plans=PLANS, **SHAPE)
    return folder / "run"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("model") / "tiny"))


@pytest.fixture(scope="module")
def shared_ray() -> Iterator[None]:
    """One Ray for the tests that may share one; runs attach to it because this process has started it."""
    import ray

    folder = tempfile.mkdtemp(prefix="ct-", dir="/tmp")
    ray.init(address="local", num_cpus=2, include_dashboard=False, _temp_dir=folder, log_to_driver=False)
    yield
    ray.shutdown()
