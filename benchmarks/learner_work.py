"""The work of the comparisons of learners: steps of random tokens in the shapes of a cell. NumPy only.

A cell says how long prompts and answers are and how many answers share a prompt. Prompts have exactly that length;
answers are drawn evenly from half of theirs to one and a half, so that rows differ as they do in training.
"""

import json
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

USEFUL_TOKENS = 2000  # a step has as many groups as come close to this, at least one
BEHAVIOUR_LOGP = -1.0  # of every token, as if a sampler had recorded it
VOCABULARY = 256  # token ids stay below what any model has


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One point of the surface."""

    prompt: int
    answer: int
    group_size: int
    num_groups: int

    @staticmethod
    def of(prompt: int, answer: int, group_size: int) -> "Cell":
        """With as many groups as a step of the surface has."""
        return Cell(
            prompt=prompt,
            answer=answer,
            group_size=group_size,
            num_groups=max(1, round(USEFUL_TOKENS / (group_size * (prompt + answer)))),
        )

    @property
    def label(self) -> str:
        return f"{self.prompt}/{self.answer}/{self.group_size}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One sample of a step: its group's prompt, its tokens and its advantage."""

    group: int
    prompt_ids: np.ndarray  # int32 [P]
    token_ids: np.ndarray  # int32 [T]
    advantage: float  # never 0, so that nothing can be skipped


def step_of(cell: Cell, seed: int) -> list[Answer]:
    """The samples of one optimizer step, groups in order."""
    rng = np.random.default_rng(seed)
    answers = []
    for group in range(cell.num_groups):
        prompt = rng.integers(1, VOCABULARY, cell.prompt).astype(np.int32)
        for place in range(cell.group_size):
            length = int(rng.integers(max(1, cell.answer // 2), cell.answer + cell.answer // 2 + 1))
            answers.append(
                Answer(
                    group=group,
                    prompt_ids=prompt,
                    token_ids=rng.integers(1, VOCABULARY, length).astype(np.int32),
                    advantage=1.0 if place % 2 == 0 else -0.5,
                )
            )
    return answers


def useful_tokens(answers: list[Answer]) -> int:
    """Prompt and answer tokens of all samples: what a step is about, whoever shares or pads."""
    return sum(len(answer.prompt_ids) + len(answer.token_ids) for answer in answers)


def trained_tokens(answers: list[Answer]) -> int:
    return sum(len(answer.token_ids) for answer in answers)


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerWork:
    """Cells in the order in which they are played, one a round."""

    model: str  # a folder
    dtype: str  # "bf16" or "fp32"
    rounds: tuple[Cell, ...]
    token_budget: int = 4096  # of our packed micro-batches: the recipe's default

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> "LearnerWork":
        fields: dict[str, Any] = json.loads(text)
        return LearnerWork(**{**fields, "rounds": tuple(Cell(**cell) for cell in fields["rounds"])})
