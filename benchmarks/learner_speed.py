"""`learner_vs_padded` and `learner_surface`: useful tokens a second through forward and backward, packed and padded.

Useful tokens are the prompt and answer tokens of all samples, however often a side has to compute a prompt and
whatever it pads. Loss, dtype and samples are the same on both sides; optimizer steps are not timed.
"""

import os
import sys
from typing import Any

from benchmarks.bench import Bench
from benchmarks.generation import as_result
from benchmarks.learner_work import Cell, LearnerWork
from benchmarks.machine import describe, num_cpus
from benchmarks.results import Result
from benchmarks.rounds import Facts, alternate
from benchmarks.trl_environment import ROOT
from benchmarks.turns import Player
from cauce.runtime.session import WORKER_ENV

WARM_UP = 3  # until memory that is kept has grown to what a step needs
HEADLINE = Cell(prompt=44, answer=24, group_size=8, num_groups=8)
PROMPTS, ANSWERS, GROUPS = (16, 44, 256, 1024), (24, 128, 512), (1, 4, 8, 16)
TOLERANCE = 0.02  # relative, of what both sides compute; bf16 rounds differently in other layouts


def headline(bench: Bench) -> dict[str, Result]:
    """At prompts of 44 tokens, answers of 24 and 8 answers to each prompt."""
    name = "learner_vs_padded"
    ours, peer = play(bench, (HEADLINE,) * (WARM_UP + bench.steps), warm_up=WARM_UP)
    settings = {**settings_of(bench), "cell": HEADLINE.label, "groups": HEADLINE.num_groups}
    return {name: as_result(ours, peer, dtype=bench.dtype, title=title(), settings=settings)}


def surface(bench: Bench) -> dict[str, Result]:
    """Over lengths and group sizes; the figure is the cell at which we are ahead by the least."""
    cells = [Cell.of(prompt, answer, size) for size in GROUPS for prompt in PROMPTS for answer in ANSWERS]
    return surface_over(bench, cells)


def surface_over(bench: Bench, cells: list[Cell]) -> dict[str, Result]:
    """Each cell once, after the rounds to warm up."""
    ours, peer = play(bench, (HEADLINE,) * WARM_UP + tuple(cells), warm_up=WARM_UP)
    ratios = {cell.label: own["rate"] / other["rate"] for cell, own, other in zip(cells, ours, peer, strict=True)}
    worst = min(range(len(cells)), key=lambda place: ratios[cells[place].label])
    return {
        "learner_surface": Result(
            ours=ours[worst]["rate"],
            peer=peer[worst]["rate"],
            unit="useful tokens/s",
            dtype=bench.dtype,
            runs=1,
            better="higher",
            peer_is=title(),
            spread={"ratio": [min(ratios.values()), max(ratios.values())]},
            settings={**settings_of(bench), "cell": f"{cells[worst].label}, the one with the smallest ratio"},
            detail={
                "ratio": ratios,
                "ours": {cell.label: facts["rate"] for cell, facts in zip(cells, ours, strict=True)},
                "peer": {cell.label: facts["rate"] for cell, facts in zip(cells, peer, strict=True)},
                "micro_batch": {cell.label: facts["micro_batch"] for cell, facts in zip(cells, peer, strict=True)},
            },
        )
    }


def play(bench: Bench, cells: tuple[Cell, ...], *, warm_up: int) -> tuple[list[Facts], list[Facts]]:
    """Both sides, a cell a round; their losses and log-probs must agree, or they did not do the same work."""
    work = LearnerWork(model=str(bench.model_folder.resolve()), dtype=bench.dtype, rounds=cells)
    with start(bench, work, "ours") as ours, start(bench, work, "padded") as peer:
        played = alternate(ours, peer, num_rounds=len(cells), warm_up=warm_up)
    for own, other in zip(*played, strict=True):
        apart = max(abs(own[name] - other[name]) / abs(other[name]) for name in ("loss", "log_ratio"))
        if apart > TOLERANCE or own["useful_tokens"] != other["useful_tokens"]:
            raise RuntimeError(f"the sides did not do the same work: {own} against {other}")
    return played


def start(bench: Bench, work: LearnerWork, side: str) -> Player:
    """Both in the surroundings that a run gives its learner."""
    env = {**os.environ, **WORKER_ENV, "OMP_NUM_THREADS": str(num_cpus()), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", f"benchmarks.learner_{side}", work.to_json()]
    name = "cauce" if side == "ours" else "padded"
    return Player(name, command, env=env, cwd=ROOT, log=bench.log(f"learner-{side}"))


def title() -> str:
    return f"transformers {describe()['transformers']}, padded rows"


def settings_of(bench: Bench) -> dict[str, Any]:
    return {
        "model": bench.model_folder.name,
        "cell_is": "prompt tokens / mean answer tokens / answers to a prompt",
        "answers": "drawn evenly from half to one and a half of the mean",
        "counted": "prompt and answer tokens of all samples",
        "ours": {"token_budget": LearnerWork(model="", dtype="", rounds=()).token_budget, "entropy": "computed"},
        "peer": {
            "padding": "prompts left, answers right, to the longest of the micro-batch",
            "logits": "answer positions alone",
            "micro_batch": "the fastest of those that fit, at each round",
            "malloc": "tuned as ours",
            "gradient_checkpointing": False,
        },
        "threads": num_cpus(),
    }
