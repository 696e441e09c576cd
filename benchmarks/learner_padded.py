"""The other side of the comparison of learners: padded rows in plain transformers, as trainers usually do it.

    python -m benchmarks.learner_padded WORK

Prompts are padded on the left, answers on the right, to the longest of the micro-batch; logits are made for answer
positions alone; weights and gradients are in the dtype of the forward, and no entropy is computed. Each round tries
every micro-batch size and the fastest counts.
"""

import sys
import time
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM

from benchmarks.learner_work import BEHAVIOUR_LOGP, Answer, LearnerWork, step_of, trained_tokens, useful_tokens
from benchmarks.turns import Turns
from cauce.learner.peak_memory import PeakMemory

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
MICRO_BATCHES = (1, 4, 8, 16, 32, 64)  # rows
ROW_TOKENS = 6144  # padded tokens in flight, beyond which memory is the limit
FEW = 512  # padded tokens; fewer only lose time
CLIP = 0.2


def micro_batches(answers: list[Answer]) -> list[int]:
    """Sizes worth trying: neither far too few tokens at once nor more than fit, and at least one."""
    width = max(len(answer.prompt_ids) + len(answer.token_ids) for answer in answers)
    sizes = sorted({min(size, len(answers)) for size in MICRO_BATCHES})
    fitting = [size for size in sizes if size * width <= ROW_TOKENS] or sizes[:1]
    return [size for size in fitting if size * width >= FEW] or fitting[-1:]


def loss_of(model: Any, rows: list[Answer], num_rows: int) -> tuple[Tensor, float]:
    """The clipped policy loss of one micro-batch, a mean per answer divided by the answers of the whole step, and the
    sum of |log p - log p of the sampler|.
    """
    prompt, answer = (max(len(ids) for ids in side) for side in _sides(rows))
    ids = torch.zeros(len(rows), prompt + answer, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for number, row in enumerate(rows):
        start, end = prompt - len(row.prompt_ids), prompt + len(row.token_ids)
        ids[number, start:prompt] = torch.from_numpy(row.prompt_ids)
        ids[number, prompt:end] = torch.from_numpy(row.token_ids)
        mask[number, start:end] = 1
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    made = model(
        input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False, logits_to_keep=answer + 1
    ).logits[:, :-1]
    target, is_trained = ids[:, prompt:], mask[:, prompt:] != 0
    logp = -functional.cross_entropy(made.flatten(0, 1).float(), target.flatten(), reduction="none").view_as(target)
    advantage = torch.tensor([[row.advantage] for row in rows])
    ratio = (logp - logp.detach()).exp()
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
    per_answer = (surrogate * is_trained).sum(-1) / is_trained.sum(-1)
    return -per_answer.sum() / num_rows, float(((logp.detach() - BEHAVIOUR_LOGP).abs() * is_trained).sum())


def forward_backward(model: Any, answers: list[Answer], *, size: int) -> dict[str, float]:
    """Adds the gradient of a step in micro-batches of `size` rows, in the order of the step."""
    total, log_ratio = 0.0, 0.0
    for at in range(0, len(answers), size):
        loss, part = loss_of(model, answers[at : at + size], len(answers))
        loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
        log_ratio += part
    return {"loss": total, "log_ratio": log_ratio / trained_tokens(answers)}


def _sides(rows: list[Answer]) -> tuple[list[Any], list[Any]]:
    return [row.prompt_ids for row in rows], [row.token_ids for row in rows]


def main() -> None:
    turns = Turns.from_pipes()
    work = LearnerWork.from_json(sys.argv[1])
    model: Any = AutoModelForCausalLM.from_pretrained(
        work.model, dtype=DTYPES[work.dtype], attn_implementation="sdpa"
    ).eval()

    memory = PeakMemory(torch.device("cpu"))

    def one_round(number: int) -> dict[str, Any]:
        answers = step_of(work.rounds[number], seed=number)
        useful, tried, metrics = useful_tokens(answers), dict[int, float](), dict[str, float]()
        memory.begin()
        for size in micro_batches(answers):
            model.zero_grad(set_to_none=True)
            began = time.perf_counter()
            metrics = forward_backward(model, answers, size=size)
            tried[size] = time.perf_counter() - began
        best = min(tried, key=lambda size: tried[size])
        return {
            "seconds": tried[best],
            "rate": useful / tried[best],
            "useful_tokens": useful,
            "micro_batch": best,
            "tried_s": tried,
            "peak_mb": memory.end(),
            **metrics,
        }

    turns.play({}, num_rounds=len(work.rounds), one_round=one_round)


if __name__ == "__main__":
    main()
