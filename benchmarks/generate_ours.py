"""Our side of the comparisons of generation: the native engine, with log-probs and versions of every token.

python -m benchmarks.generate_ours WORK SETTINGS
"""

import json
import sys
import time
from typing import Any

import numpy as np
import torch

from benchmarks.generation_work import GenerationWork, facts_of
from benchmarks.turns import Turns
from cauce.engine.native import NativeEngine
from cauce.models.load import DTYPES, load_model
from cauce.types import GenerationRequest, Sampling


def main() -> None:
    turns = Turns.from_pipes()
    work = GenerationWork.from_json(sys.argv[1])
    settings = json.loads(sys.argv[2])
    model = load_model(work.model, dtype=DTYPES[settings["dtype"]], attention="sdpa")
    if not set(work.end_ids) <= set(model.eos_token_ids):
        raise ValueError(f"the model ends at {model.eos_token_ids}, the work at {work.end_ids}")
    engine = NativeEngine(model, slots=settings["slots"])

    def one_round(number: int) -> dict[str, Any]:
        sampling = Sampling(
            max_tokens=work.max_tokens, temperature=work.temperature, stop_token_ids=(), seed=work.seed + number
        )
        requests = [
            GenerationRequest(
                task=number * len(work.prompts) + place,
                attempt=0,
                indices=tuple(range(work.num_samples)),
                prompt_ids=np.array(ids, dtype=np.int32),
                sampling=sampling,
            )
            for place, ids in enumerate(work.prompts)
        ]
        began = time.perf_counter()
        answers = engine.generate(requests)
        return facts_of(time.perf_counter() - began, [len(answer.token_ids) for answer in answers])

    turns.play({"threads": torch.get_num_threads()}, num_rounds=work.num_rounds, one_round=one_round)


if __name__ == "__main__":
    main()
