"""Rounds in turns, and the choice of settings."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from benchmarks.rounds import alone, alternate, best_of, fastest
from benchmarks.turns import PlayerFailed

from tests.benchmarks.conftest import StartPlayer


def test_sides_take_turns_and_the_first_round_is_dropped(start_player: StartPlayer, diary: Path) -> None:
    ours, peer = (start_player(name, num_steps=3, behaviour="rounds") for name in ("cauce", "peer"))
    played = alternate(ours, peer, num_rounds=3, warm_up=1)
    assert [[facts["seconds"] for facts in side] for side in played] == [[2.0, 3.0], [2.0, 3.0]]
    assert all(facts["waiting_cpu_s"] < 1 for side in played for facts in side)
    assert diary.read_text().split("\n")[:-1] == [
        *("cauce 0", "peer 0"),
        *("peer 1", "cauce 1"),
        *("cauce 2", "peer 2"),
    ]


def test_one_side_alone(start_player: StartPlayer) -> None:
    rounds = alone(start_player("cauce", num_steps=2, behaviour="rounds"), num_rounds=2, warm_up=1)
    assert [facts["rate"] for facts in rounds] == [20.0]


def rate_table(rates: dict[str, float], asked: list[str]) -> Callable[[str], float]:
    def rate_of(settings: str) -> float:
        asked.append(settings)
        if settings not in rates:
            raise PlayerFailed("peer ended early; the end of its log:\nValueError: no such cache")
        return rates[settings]

    return rate_of


def test_the_fastest_settings_count_and_failures_are_listed(tmp_path: Path) -> None:
    cache, asked = tmp_path / "cache" / "rounds.json", list[str]()
    rate_of = rate_table({"a": 3.0, "b": 5.0}, asked)
    candidates = {"slow": "a", "fast": "b", "broken": "c"}
    best, tried = best_of(candidates, rate_of, key={"work": 1}, cache=cache)
    assert (best, tried) == ("fast", {"slow": 3.0, "fast": 5.0, "broken": "ValueError: no such cache"})
    assert best_of(candidates, rate_of, key={"work": 1}, cache=cache) == (best, tried)
    assert asked == ["a", "b", "c"]  # the second call took everything from the cache
    best_of(candidates, rate_of, key={"work": 2}, cache=cache)
    assert asked == ["a", "b", "c"] * 2
    assert len(json.loads(cache.read_text())) == 6


def test_without_a_cache_everything_is_tried_again() -> None:
    asked: list[str] = []
    for _ in range(2):
        best_of({"x": "a"}, rate_table({"a": 1.0}, asked), key={}, cache=None)
    assert asked == ["a", "a"]


def test_nothing_that_runs_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="no room"):
        fastest({"x": "OSError: no room"})
