"""Ours and TRL on the same work, in turns, in one run: starts both processes and lets them step alternately.

While one steps, the other waits; the CPU seconds that it uses meanwhile are measured, so that a reader can see that it
did wait. Which one begins changes from round to round.
"""

import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.bench import START_TIMEOUT_S, STEP_TIMEOUT_S, Bench
from benchmarks.trl_environment import ROOT, TrlEnvironment
from benchmarks.trl_settings import Trial, TrlSettings
from benchmarks.turns import Player, PlayerFailed
from benchmarks.workload import Workload
from cauce.runtime.session import WORKER_ENV

WARM_UP = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of one side."""

    seconds: float
    reward: float
    silent_groups: float  # share of groups with equal rewards
    length: float  # mean tokens of an answer
    waiting_cpu_s: float  # CPU seconds that the other side used meanwhile
    split: dict[str, float]  # ours only: where the seconds went


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """What one side did, warm-up left out."""

    ready: dict[str, Any]
    steps: tuple[Step, ...]
    end: dict[str, Any]

    @property
    def seconds(self) -> list[float]:
        return [step.seconds for step in self.steps]

    def summary(self) -> dict[str, Any]:
        """The numbers beside the time that a reader needs."""
        facts: dict[str, Any] = {
            "seconds": self.seconds,
            "rewards": [step.reward for step in self.steps],
            "silent_groups": mean([step.silent_groups for step in self.steps]),
            "answer_tokens": mean([step.length for step in self.steps]),
            "waiting_cpu_s": mean([step.waiting_cpu_s for step in self.steps]),
        }
        names = sorted({name for step in self.steps for name in step.split})
        if names:
            facts["split"] = {name: median(step.split[name] for step in self.steps) for name in names}
        return facts


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def duel(
    bench: Bench,
    workload: Workload,
    *,
    name: str,
    environment: TrlEnvironment,
    settings: TrlSettings,
    dtype: str,
    warm_up: int = WARM_UP,
) -> tuple[Side, Side]:
    """Both sides of a comparison: ours, TRL's."""
    with (
        tempfile.TemporaryDirectory(dir=_folder(bench)) as folder,
        start_ours(bench, workload, name=name, dtype=dtype, run_folder=Path(folder)) as ours,
        start_trl(bench, workload, name=name, environment=environment, settings=settings) as peer,
    ):
        return take_turns(ours, peer, num_steps=workload.num_steps, warm_up=warm_up)


def take_turns(ours: Player, peer: Player, *, num_steps: int, warm_up: int) -> tuple[Side, Side]:
    """Plays all steps; what the first `warm_up` of each side took is dropped."""
    ready = [player.expect("ready", timeout_s=START_TIMEOUT_S) for player in (ours, peer)]
    if ready[0]["prompts"] != ready[1]["prompts"]:
        raise PlayerFailed(
            f"{ours.name} and {peer.name} render the prompts differently ({ready[0]['prompts']} and "
            f"{ready[1]['prompts']}), so their steps cannot be compared"
        )
    played: dict[str, list[Step]] = {ours.name: [], peer.name: []}
    for number in range(num_steps):
        order = ((ours, peer), (peer, ours)) if number % 2 == 0 else ((peer, ours), (ours, peer))
        for player, other in order:
            played[player.name].append(_step(player, other))
            print(f"  step {number + 1}: {player.name} {played[player.name][-1].seconds:.2f} s", flush=True)
    ends = []
    for player in (ours, peer):
        player.go()
        ends.append(player.expect("end", timeout_s=STEP_TIMEOUT_S))
    return (
        Side(ready=ready[0], steps=tuple(played[ours.name][warm_up:]), end=ends[0]),
        Side(ready=ready[1], steps=tuple(played[peer.name][warm_up:]), end=ends[1]),
    )


def try_trl(bench: Bench, workload: Workload, *, environment: TrlEnvironment, settings: TrlSettings) -> Trial:
    """TRL alone with these settings: the fastest step after the warm-up, or why it failed."""
    seconds = []
    try:
        with start_trl(bench, workload, name="trl-trial", environment=environment, settings=settings) as peer:
            peer.expect("ready", timeout_s=START_TIMEOUT_S)
            for _ in range(workload.num_steps):
                seconds.append(_step(peer, None).seconds)
            peer.go()
            peer.expect("end", timeout_s=STEP_TIMEOUT_S)
    except PlayerFailed as failure:
        print(f"  TRL with {settings.label}: {failure}", flush=True)
        return Trial(settings=settings, seconds=None, failure=_last_line(str(failure)))
    print(f"  TRL with {settings.label}: {min(seconds[WARM_UP:]):.2f} s", flush=True)
    return Trial(settings=settings, seconds=min(seconds[WARM_UP:]))


def start_ours(bench: Bench, workload: Workload, *, name: str, dtype: str, run_folder: Path) -> Player:
    command = [sys.executable, "-m", "benchmarks.ours", workload.to_json(), str(run_folder), dtype]
    return Player("cauce", command, env=os.environ, cwd=ROOT, log=bench.log(f"{name}-cauce"))


def start_trl(
    bench: Bench, workload: Workload, *, name: str, environment: TrlEnvironment, settings: TrlSettings
) -> Player:
    command = [str(environment.python), "-m", "benchmarks.peer_trl", workload.to_json(), settings.to_json()]
    env = environment.env() | ({"GLIBC_TUNABLES": WORKER_ENV["GLIBC_TUNABLES"]} if settings.malloc else {})
    return Player("TRL", command, env=env, cwd=ROOT, log=bench.log(f"{name}-trl"))


def _step(player: Player, other: Player | None) -> Step:
    before = other.cpu_s() if other else 0.0
    player.go()
    facts = player.expect("step", timeout_s=STEP_TIMEOUT_S)
    return Step(
        seconds=facts["seconds"],
        reward=facts["reward"],
        silent_groups=facts["silent_groups"],
        length=facts["length"],
        waiting_cpu_s=other.cpu_s() - before if other else 0.0,
        split=facts.get("split", {}),
    )


def _folder(bench: Bench) -> Path:
    folder = bench.cache / "runs"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _last_line(text: str) -> str:
    """The error itself, from the end of a traceback."""
    return text.strip().splitlines()[-1][:200]
