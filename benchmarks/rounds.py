"""Two processes that play the same rounds in turns, each round timed by the one that plays it.

What duel.py is to steps of training, this is to anything that can be repeated: one side computes while the other
waits, and which one begins changes from round to round.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.bench import START_TIMEOUT_S, STEP_TIMEOUT_S
from benchmarks.settings_cache import digest, read, write
from benchmarks.turns import Player, PlayerFailed

Facts = dict[str, Any]


def alternate(ours: Player, peer: Player, *, num_rounds: int, warm_up: int) -> tuple[list[Facts], list[Facts]]:
    """Plays all rounds and returns what each side said of its own, those to warm up left out."""
    for player in (ours, peer):
        player.expect("ready", timeout_s=START_TIMEOUT_S)
    played: dict[str, list[Facts]] = {ours.name: [], peer.name: []}
    for number in range(num_rounds):
        for player, other in ((ours, peer), (peer, ours)) if number % 2 == 0 else ((peer, ours), (ours, peer)):
            before = other.cpu_s()
            facts = one_round(player)
            played[player.name].append({**facts, "waiting_cpu_s": other.cpu_s() - before})
            print(f"  round {number + 1}: {player.name} {facts['seconds']:.2f} s", flush=True)
    for player in (ours, peer):
        finish(player)
    return played[ours.name][warm_up:], played[peer.name][warm_up:]


def alone(player: Player, *, num_rounds: int, warm_up: int) -> list[Facts]:
    """The rounds of one side without another; those to warm up left out."""
    player.expect("ready", timeout_s=START_TIMEOUT_S)
    rounds = [one_round(player) for _ in range(num_rounds)]
    finish(player)
    return rounds[warm_up:]


def one_round(player: Player) -> Facts:
    player.go()
    return player.expect("round", timeout_s=STEP_TIMEOUT_S)


def finish(player: Player) -> None:
    player.go()
    player.expect("end", timeout_s=STEP_TIMEOUT_S)


def best_of(
    candidates: Mapping[str, Any], rate_of: Callable[[Any], float], *, key: Mapping[str, Any], cache: Path | None
) -> tuple[str, dict[str, float | str]]:
    """The label of the candidate with the highest rate, and the rate of each, or why it could not be run.

    With a cache, a candidate that was tried under the same key is not tried again: trying all takes minutes.
    """
    kept = read(cache) if cache else {}
    tried: dict[str, float | str] = {}
    for label, settings in candidates.items():
        name = digest({**key, "label": label, "settings": settings})
        if name not in kept:
            try:
                kept[name] = rate_of(settings)
            except PlayerFailed as failure:
                kept[name] = str(failure).strip().splitlines()[-1][:200]
            print(f"  tried {label}: {kept[name]}", flush=True)
            if cache:
                write(cache, kept)
        tried[label] = kept[name]
    return fastest(tried), tried


def fastest(tried: Mapping[str, float | str]) -> str:
    """The label of the highest rate."""
    usable = {label: rate for label, rate in tried.items() if not isinstance(rate, str)}
    if not usable:
        raise RuntimeError(f"no settings could be run: {json.dumps(dict(tried))}")
    return max(usable, key=lambda label: usable[label])


def spread(values: Sequence[float]) -> list[float]:
    """Smallest and largest."""
    return [min(values), max(values)]
