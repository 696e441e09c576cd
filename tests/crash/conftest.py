"""A nursery for runs that are killed, and the run that never is."""

import os
from pathlib import Path

import pytest

from tests.crash import power
from tests.crash.lives import Nursery, train
from tests.tiny import tiny_model


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Nursery:
    folder = tmp_path_factory.mktemp("nursery")
    return Nursery(folder=folder, preload=power.build(folder))


@pytest.fixture(scope="session")
def needs_power(nursery: Nursery) -> None:
    if nursery.preload is None:
        reason = "no C compiler (cc) on the PATH: losses of power are not tried (apt-get install gcc)"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def straight(nursery: Nursery, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that never stops."""
    run = tmp_path_factory.mktemp("straight") / "run"
    assert nursery.live(train, str(model), str(run)) == 0
    return run
