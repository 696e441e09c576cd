"""The work of the comparisons of generation: 16 prompts, 8 answers each, to the end of text or 128 new tokens.

Half of the prompts are the quickstart's sums, whose answers are short; the other half are chat, where answers go on
until they are cut off or end by themselves. Standard library only, since a peer's environment loads it as well.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

SYSTEM = "You are a calculator. Reply with the number only."
SUMS = ("23 + 45 =", "71 + 18 =", "60 + 39 =", "14 + 57 =", "88 + 11 =", "35 + 26 =", "92 + 47 =", "53 + 64 =")
CHAT = (
    "What is the capital of France?",
    "Name three colours.",
    "Write one sentence about the sea.",
    "Explain in two sentences why the sky is blue.",
    "Give me a recipe for pancakes.",
    "Is 17 a prime number? Answer with yes or no.",
    "Tell me a long story about rivers, mountains and cities far away.",
    "Write a short poem about autumn.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationWork:
    """What all sides do in a round; `prompts` are token ids, so that no side renders them differently."""

    model: str  # a folder
    prompts: tuple[tuple[int, ...], ...]
    end_ids: tuple[int, ...]  # tokens that end an answer
    num_rounds: int
    num_samples: int = 8  # answers to each prompt
    max_tokens: int = 128
    temperature: float = 1.0
    seed: int = 0  # each round draws with a seed of its own, from here on

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> "GenerationWork":
        fields = json.loads(text)
        fields["prompts"] = tuple(tuple(ids) for ids in fields["prompts"])
        return GenerationWork(**{**fields, "end_ids": tuple(fields["end_ids"])})

    def settings(self) -> dict[str, Any]:
        """What results.json says of it."""
        return {
            "prompts": f"{len(self.prompts)}, {min(map(len, self.prompts))} to {max(map(len, self.prompts))} tokens",
            "answers_per_prompt": self.num_samples,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "counted": "tokens up to the end of each answer, padding not",
        }


def answer_length(row: Sequence[int], end_ids: Sequence[int]) -> int:
    """Tokens of a row up to the first that ends it, this one included; what pads the row behind it does not count."""
    ends = set(end_ids)
    for place, token in enumerate(row):
        if token in ends:
            return place + 1
    return len(row)


def facts_of(seconds: float, lengths: Sequence[int]) -> dict[str, Any]:
    """A round as its player reports it."""
    return {"seconds": seconds, "tokens": sum(lengths), "rate": sum(lengths) / seconds, "longest": max(lengths)}
