"""Processes in turns: who waits, and what happens when one dies or falls silent."""

import time
from pathlib import Path

import pytest
from benchmarks.turns import PlayerFailed

from tests.benchmarks.conftest import StartPlayer


def test_a_player_works_only_when_called(start_player: StartPlayer, diary: Path) -> None:
    player = start_player("one")
    player.expect("ready", timeout_s=30)
    time.sleep(0.1)
    assert not diary.exists()
    player.go()
    assert player.expect("step", timeout_s=30)["seconds"] == 1.0
    assert diary.read_text().splitlines() == ["one begins 0", "one ends 0"]


def test_what_a_player_prints_goes_to_its_log(start_player: StartPlayer, tmp_path: Path) -> None:
    player = start_player("one", num_steps=0)
    assert player.expect("ready", timeout_s=30) == {"prompts": "same"}
    player.go()
    assert player.expect("end", timeout_s=30) == {"status": "finished"}
    player.close()
    assert "must not reach the conductor" in (tmp_path / "one.log").read_text()


def test_a_death_is_told_with_the_end_of_the_log(start_player: StartPlayer) -> None:
    player = start_player("one", behaviour="dies")
    player.expect("ready", timeout_s=30)
    player.go()
    with pytest.raises(PlayerFailed, match=r"(?s)one ended early with exit code 1.*this player gives up"):
        player.expect("step", timeout_s=30)


def test_silence_has_a_limit(start_player: StartPlayer) -> None:
    player = start_player("one", behaviour="sleeps")
    player.expect("ready", timeout_s=30)
    player.go()
    with pytest.raises(PlayerFailed, match="one said nothing for 0 s"):
        player.expect("step", timeout_s=0.2)


def test_another_line_than_expected_is_a_failure(start_player: StartPlayer) -> None:
    player = start_player("one")
    with pytest.raises(PlayerFailed, match="'step' was expected"):
        player.expect("step", timeout_s=30)


def test_a_waiting_player_ends_when_its_conductor_goes(start_player: StartPlayer, tmp_path: Path) -> None:
    player = start_player("one")
    player.expect("ready", timeout_s=30)
    began = time.monotonic()
    player.close(grace_s=20)
    assert time.monotonic() - began < 10
    assert "the conductor of this measurement has gone" in (tmp_path / "one.log").read_text()
