"""Our side of the comparison of learners: `Learner.forward_backward` with its packing.

python -m benchmarks.learner_ours WORK
"""

import sys
import time
from typing import Any

import numpy as np
import torch

from benchmarks.learner_work import BEHAVIOUR_LOGP, Answer, LearnerWork, step_of, useful_tokens
from benchmarks.turns import Turns
from cauce.algorithms.advantages import make_batch
from cauce.algorithms.table import resolve
from cauce.learner.learner import Learner
from cauce.models.load import load_model
from cauce.recipe.load import recipe_from_tables
from cauce.types import Batch, TrainSequence


def learner_of(work: LearnerWork) -> Learner:
    """The learner as a run makes it."""
    # Steps of 0: the other side takes none, and on random tokens a few of any size move log-probs beyond the tolerance.
    learner = {"dtype": work.dtype, "token_budget": work.token_budget, "lr": 0.0}
    recipe = recipe_from_tables({"model": {"path": work.model}, "learner": learner})
    return Learner(
        load_model(work.model, dtype=torch.float32, attention="sdpa"),
        algorithm=resolve(recipe.algorithm, max_tokens=1, correction_needed=False),
        settings=recipe.learner,
        temperature=1.0,
        total_steps=len(work.rounds),
    )


def batch_of(answers: list[Answer]) -> Batch:
    """The samples as the learner takes them."""
    return make_batch(
        [
            TrainSequence(
                group=answer.group,
                prompt_ids=answer.prompt_ids,
                token_ids=answer.token_ids,
                mask=np.ones(len(answer.token_ids), np.uint8),
                advantages=np.full(len(answer.token_ids), answer.advantage, np.float32),
                behaviour_logps=np.full(len(answer.token_ids), BEHAVIOUR_LOGP, np.float32),
                proximal_logps=None,
                reference_logps=None,
            )
            for answer in answers
        ]
    )


def main() -> None:
    turns = Turns.from_pipes()
    work = LearnerWork.from_json(sys.argv[1])
    learner = learner_of(work)

    def one_round(number: int) -> dict[str, Any]:
        answers = step_of(work.rounds[number], seed=number)
        batch = batch_of(answers)
        began = time.perf_counter()
        metrics = learner.forward_backward(batch)
        seconds = time.perf_counter() - began
        step = learner.optim_step()  # lets the gradients go; not timed on either side
        useful = useful_tokens(answers)
        return {
            "seconds": seconds,
            "rate": useful / seconds,
            "useful_tokens": useful,
            "peak_mb": step["learner/peak_memory_mb"],
            "packed_tokens": int(metrics["learner/packed_tokens"]),
            "loss": metrics["loss/total"],
            "log_ratio": metrics["sampler/log_ratio_abs_mean"],
        }

    turns.play({"packing": learner.packing.path}, num_rounds=len(work.rounds), one_round=one_round)


if __name__ == "__main__":
    main()
