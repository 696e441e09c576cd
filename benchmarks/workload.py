"""The work that both sides of a comparison do, in one record that travels to either process as JSON.

Standard library only, since TRL's environment loads it as well.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """GRPO on two-digit addition: plain AdamW at a constant rate, no KL term, one optimizer step per batch."""

    model: str  # a folder
    rows: str  # a file of JSON lines, in the order in which they are trained on
    reward: Literal["correct", "ramp"]
    num_steps: int
    num_prompts: int = 8  # per step
    group_size: int = 8
    max_tokens: int = 48
    temperature: float = 1.0
    lr: float = 1e-5
    seed: int = 0

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> "Workload":
        return Workload(**json.loads(text))

    def read_rows(self) -> list[dict[str, str]]:
        """The rows, as {"prompt": ..., "answer": ...}."""
        return [json.loads(line) for line in Path(self.rows).read_text(encoding="utf-8").splitlines()]

    def settings(self) -> dict[str, Any]:
        """What results.json says of it; folders are of this machine and stay out."""
        skipped = ("model", "rows")
        return {key: value for key, value in asdict(self).items() if key not in skipped}


def prompt_digest(prompts: Iterable[Sequence[int]]) -> str:
    """A digest of rendered prompts, to prove that both sides train on the same tokens."""
    digest = hashlib.sha256()
    for ids in prompts:
        digest.update(json.dumps([int(i) for i in ids]).encode())
    return digest.hexdigest()[:16]
