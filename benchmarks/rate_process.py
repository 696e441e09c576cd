"""The process of `decode_vs_gemm` and `learner_vs_gemm`: ours and the bound, one after the other in each round.

    python -m benchmarks.rate_process decode|learner MODEL DTYPE NUM_ROUNDS

One process, so that both have the same threads, memory and clock. FLOPs are those of the linear weights: 2 per weight
and row forward, 4 backward; the look-up of embeddings, attention, norms and the loss are counted nowhere, though ours
spends its time on them as well.
"""

import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.gemm import backward_products, fastest, forward_flops, forward_products, groups_of
from benchmarks.generation_work import CHAT
from benchmarks.learner_ours import batch_of, learner_of
from benchmarks.learner_work import Cell, LearnerWork, step_of, trained_tokens
from benchmarks.turns import Turns
from cauce.engine.native import NativeEngine
from cauce.models.load import DTYPES, load_model
from cauce.types import GenerationRequest, Sampling

ROWS = 64  # samples decoded together
STEPS = 32  # decode steps that count in a round
REPEATS = 3  # walks through all products, of which the best counts
CELL = Cell(prompt=44, answer=24, group_size=8, num_groups=8)

OneRound = Callable[[int], dict[str, Any]]


def decode(model: str, dtype: str) -> OneRound:
    """Decode steps with all slots filled, whole: attention, sampling and bookkeeping included."""
    loaded = load_model(model, dtype=DTYPES[dtype], attention="sdpa")
    groups = groups_of(loaded.model, rows=ROWS, head_rows=ROWS)
    products, flops = forward_products(groups), forward_flops(groups)
    engine = NativeEngine(loaded, slots=ROWS)
    ids: Any = loaded.tokenizer.apply_chat_template(
        [{"role": "user", "content": CHAT[6]}], add_generation_prompt=True, return_dict=False
    )

    def one_round(number: int) -> dict[str, Any]:
        for place in range(8):
            engine.submit(
                GenerationRequest(
                    task=number * 8 + place,
                    attempt=0,
                    indices=tuple(range(ROWS // 8)),
                    prompt_ids=np.array(ids, dtype=np.int32),
                    sampling=Sampling(max_tokens=STEPS + 8, temperature=1.0, stop_token_ids=(), seed=number),
                )
            )
        engine.step()  # prefills
        taken = []
        while engine.status()["live"] == ROWS and len(taken) < STEPS:
            began = time.perf_counter()
            engine.step()
            taken.append(time.perf_counter() - began)
        for place in range(8):
            engine.cancel(number * 8 + place)
        engine.step()
        seconds = median(taken)
        return _facts(seconds, flops, products, steps=len(taken))

    return one_round


def learner(model: str, dtype: str, num_rounds: int) -> OneRound:
    """forward_backward of one step in which every group carries signal."""
    work = LearnerWork(model=model, dtype=dtype, rounds=(CELL,) * num_rounds)
    answers = step_of(CELL, seed=0)
    batch, trained = batch_of(answers), trained_tokens(answers)
    ours = learner_of(work)
    packed = int(ours.forward_backward(batch)["learner/packed_tokens"])
    ours.optim_step()
    loaded = load_model(model, dtype=DTYPES[dtype], attention="sdpa")
    groups = groups_of(loaded.model, rows=packed, head_rows=trained)
    products, flops = forward_products(groups) + backward_products(groups), 3 * forward_flops(groups)

    def one_round(number: int) -> dict[str, Any]:
        began = time.perf_counter()
        ours.forward_backward(batch)
        seconds = time.perf_counter() - began
        ours.optim_step()
        return _facts(seconds, flops, products, packed_tokens=packed, trained_tokens=trained)

    return one_round


def _facts(seconds: float, flops: int, products: Any, **more: int) -> dict[str, Any]:
    bound, ways = fastest(products, repeats=REPEATS)
    return {
        "seconds": seconds,
        "rate": flops / seconds / 1e9,
        "gemm_s": bound,
        "gemm_rate": flops / bound / 1e9,
        "ways": ways,
        "gflop": flops / 1e9,
        **more,
    }


def main() -> None:
    turns = Turns.from_pipes()
    what, model, dtype, rounds = sys.argv[1:]
    one_round = decode(model, dtype) if what == "decode" else learner(model, dtype, int(rounds))
    turns.play({"threads": torch.get_num_threads()}, num_rounds=int(rounds), one_round=one_round)


if __name__ == "__main__":
    main()
