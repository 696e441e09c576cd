"""vLLM's side of a comparison of generation, run by the Python of vLLM's own environment.

    python -m benchmarks.generate_vllm WORK SETTINGS

One request per prompt with n answers, prefix caching on, and the log-prob of each sampled token, as training needs
it. The work is given as token ids and taken back as token ids: nothing is rendered to text.
"""

import json
import sys
import time
from typing import Any

from vllm import LLM, SamplingParams  # type: ignore[import-not-found]  # lives in an environment of its own

from benchmarks.generation_work import GenerationWork, answer_length, facts_of
from benchmarks.turns import Turns

DTYPES = {"bf16": "bfloat16", "fp32": "float32"}


def main() -> None:
    turns = Turns.from_pipes()
    work = GenerationWork.from_json(sys.argv[1])
    settings = json.loads(sys.argv[2])
    llm = LLM(
        model=work.model,
        dtype=DTYPES[settings["dtype"]],
        max_model_len=max(map(len, work.prompts)) + work.max_tokens,
        max_num_seqs=settings["max_num_seqs"],
        enforce_eager=settings["eager"],
        enable_prefix_caching=True,
        seed=work.seed,
        disable_log_stats=True,
    )
    prompts = [{"prompt_token_ids": list(ids)} for ids in work.prompts]

    def one_round(number: int) -> dict[str, Any]:
        params = SamplingParams(
            n=work.num_samples,
            max_tokens=work.max_tokens,
            temperature=work.temperature,
            logprobs=0,  # the sampled token's own
            stop_token_ids=list(work.end_ids),
            detokenize=False,
        )
        began = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        answers = [answer for output in outputs for answer in output.outputs]
        missing = [answer for answer in answers if len(answer.logprobs) != len(answer.token_ids)]
        if missing or len(answers) != len(prompts) * work.num_samples:
            raise RuntimeError(f"{len(answers)} answers, {len(missing)} without the log-probs asked for")
        return facts_of(seconds, [answer_length(answer.token_ids, work.end_ids) for answer in answers])

    turns.play({}, num_rounds=work.num_rounds, one_round=one_round)


if __name__ == "__main__":
    main()
