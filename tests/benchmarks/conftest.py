"""Players whose process is a short script."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from benchmarks.trl_environment import ROOT
from benchmarks.turns import Player

StartPlayer = Callable[..., Player]


@pytest.fixture
def diary(tmp_path: Path) -> Path:
    """Where all players of a test write down when they work."""
    return tmp_path / "diary.txt"


@pytest.fixture
def start_player(tmp_path: Path, diary: Path) -> Iterator[StartPlayer]:
    """Starts scripted players and ends them with the test."""
    with ExitStack() as stack:

        def start(name: str, *, num_steps: int = 2, behaviour: str = "plays") -> Player:
            module = "tests.benchmarks.scripted"
            command = [sys.executable, "-m", module, name, str(diary), str(num_steps), behaviour]
            player = Player(name, command, env=os.environ, cwd=ROOT, log=tmp_path / f"{name}.log")
            stack.callback(player.close, grace_s=1.0)
            return player

        yield start
