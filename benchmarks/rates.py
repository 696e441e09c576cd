"""`decode_vs_gemm` and `learner_vs_gemm`: which part of the machine's rate at these products we reach."""

import os
import sys
from statistics import median
from typing import Any

from benchmarks.bench import Bench
from benchmarks.machine import num_cpus
from benchmarks.results import Result
from benchmarks.rounds import Facts, alone, spread
from benchmarks.trl_environment import ROOT
from benchmarks.turns import Player
from cauce.runtime.session import WORKER_ENV

WARM_UP = 3  # until memory that is kept has grown to what a step needs
COMMON = {
    "flops": "of linear weights: 2 per weight and row forward, 4 backward; attention, norms, loss, embeddings: none",
    "bound": "the fastest way of each group of products: plain torch, laid out or turned before; one by one or joint",
    "weights": "distinct in all layers and walked through in order, so as cold in the caches as in a real step",
}


def decode(bench: Bench) -> dict[str, Result]:
    """Batch of 64."""
    more = {"batch": 64, "ours": "whole steps: attention, sampling and bookkeeping included", "head": "every row"}
    return {"decode_vs_gemm": measure(bench, "decode", more)}


def learner(bench: Bench) -> dict[str, Result]:
    """At 44 prompt tokens, 24 answer tokens, 8 groups of 8."""
    more = {
        "cell": "44/24/8, 8 groups in one micro-batch",
        "ours": "forward_backward: packing, attention, entropy and loss included",
        "head": "trained tokens alone",
    }
    return {"learner_vs_gemm": measure(bench, "learner", more)}


def measure(bench: Bench, what: str, more: dict[str, Any]) -> Result:
    rounds = WARM_UP + bench.steps
    model = str(bench.model_folder.resolve())
    command = [sys.executable, "-m", "benchmarks.rate_process", what, model, bench.dtype, str(rounds)]
    env = {**os.environ, **WORKER_ENV, "OMP_NUM_THREADS": str(num_cpus())}
    with Player("cauce", command, env=env, cwd=ROOT, log=bench.log(f"{what}-rate")) as player:
        played = alone(player, num_rounds=rounds, warm_up=WARM_UP)
    settings = {"model": bench.model_folder.name, "threads": num_cpus(), **COMMON, **more}
    return as_result(played, dtype=bench.dtype, settings=settings)


def as_result(played: list[Facts], *, dtype: str, settings: dict[str, Any]) -> Result:
    """The figure of rounds that hold both rates."""
    ours, bound = ([facts[name] for facts in played] for name in ("rate", "gemm_rate"))
    return Result(
        ours=median(ours),
        peer=median(bound),
        unit="GFLOP/s",
        dtype=dtype,
        runs=len(played),
        better="higher",
        peer_is="matrix products alone",
        spread={
            "ours": spread(ours),
            "peer": spread(bound),
            "ratio": spread([own / best for own, best in zip(ours, bound, strict=True)]),
        },
        settings=settings,
        detail=played[0],
    )
