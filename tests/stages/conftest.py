"""A tiny model and a session without Ray, for the tests of whole runs."""

from pathlib import Path

import pytest

from tests.local_session import LocalSession, use_local_session
from tests.tiny import tiny_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch) -> type[LocalSession]:
    return use_local_session(monkeypatch)
