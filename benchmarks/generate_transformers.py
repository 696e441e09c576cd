"""transformers' side of a comparison of generation: `generate` on left-padded rows, the prompt of each in every row.

    python -m benchmarks.generate_transformers WORK SETTINGS

It returns no log-probs; ours has to. Rows are generated in batches of `batch`, prompts of like length together.
"""

import json
import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from benchmarks.generation_work import GenerationWork, answer_length, facts_of
from benchmarks.turns import Turns

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def main() -> None:
    turns = Turns.from_pipes()
    work = GenerationWork.from_json(sys.argv[1])
    settings = json.loads(sys.argv[2])
    model: Any = AutoModelForCausalLM.from_pretrained(
        work.model, dtype=DTYPES[settings["dtype"]], attn_implementation="sdpa"
    ).eval()
    pad = work.end_ids[0]
    config = GenerationConfig(
        max_new_tokens=work.max_tokens,
        do_sample=True,
        temperature=work.temperature,
        top_k=0,
        top_p=1.0,
        eos_token_id=list(work.end_ids),
        pad_token_id=pad,
        cache_implementation="static" if settings["cache"] == "static" else None,
    )
    rows = sorted((ids for ids in work.prompts for _ in range(work.num_samples)), key=len)
    batches = [rows[at : at + settings["batch"]] for at in range(0, len(rows), settings["batch"])]

    def one_round(number: int) -> dict[str, Any]:
        torch.manual_seed(work.seed + number)
        lengths = []
        began = time.perf_counter()
        with torch.inference_mode():
            for batch in batches:
                width = max(map(len, batch))
                ids = torch.tensor([[pad] * (width - len(row)) + list(row) for row in batch])
                mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in batch])
                made = model.generate(input_ids=ids, attention_mask=mask, generation_config=config)[:, width:]
                lengths += [answer_length(row, work.end_ids) for row in made.tolist()]
        return facts_of(time.perf_counter() - began, lengths)

    turns.play({"threads": torch.get_num_threads()}, num_rounds=work.num_rounds, one_round=one_round)


if __name__ == "__main__":
    main()
