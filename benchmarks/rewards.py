"""The rewards that both sides of a comparison load from this very file, in TRL's signature. Standard library only.

correct   1 where the last number of the answer is the gold one: as it comes, some groups carry no signal
ramp      by the answer's place in its group: eight different rewards in every group, whatever was answered
"""

import re
from collections.abc import Sequence
from typing import Any

GROUP_SIZE = 8

_NUMBER = re.compile(r"\d+")

Completions = Sequence[str | Sequence[dict[str, Any]]]


def correct(completions: Completions, answer: Sequence[str], **_: Any) -> list[float]:
    """1.0 for a right last number, 0.0 for anything else."""
    found = [_NUMBER.findall(_text(completion).replace(",", "")) for completion in completions]
    return [float(bool(numbers) and numbers[-1] == gold) for numbers, gold in zip(found, answer, strict=True)]


def ramp(completions: Completions, **_: Any) -> list[float]:
    """0, 1/7, ..., 1 within each group. Says nothing about the answers: it is for timing, not for learning."""
    return [i % GROUP_SIZE / (GROUP_SIZE - 1) for i in range(len(completions))]


def _text(completion: str | Sequence[dict[str, Any]]) -> str:
    return completion if isinstance(completion, str) else str(completion[-1]["content"])
