"""Admission number -> task: the order of the data, rendered. A pure function of (recipe, data), so that a resume goes
on where the run stopped without a position having been saved."""

import hashlib
import json
from collections.abc import Iterable
from typing import Protocol

import numpy as np

from cauce.data.order import row_index
from cauce.data.source import RowSource
from cauce.environments.single_turn import RenderedPrompt
from cauce.types import Row, Task


class Environment(Protocol):
    """What turns a row into a prompt, and an answer into text."""

    def render(self, row: Row) -> RenderedPrompt: ...

    def answer_text(self, token_ids: np.ndarray, eos_ids: Iterable[int]) -> str: ...


class TaskSource:
    """The rows of a run as tasks."""

    def __init__(
        self,
        rows: RowSource,
        environment: Environment,
        *,
        seed: int,
        shuffle: bool,
        max_prompt_tokens: int,
        eos_token_ids: Iterable[int],
    ) -> None:
        self._rows = rows
        self._environment = environment
        self._seed = seed
        self._shuffle = shuffle
        self._eos = frozenset(eos_token_ids)
        self.max_prompt_tokens = max_prompt_tokens

    def __len__(self) -> int:
        return len(self._rows)

    def task(self, number: int) -> Task:
        """The task with this admission number."""
        return self.of_row(number, self._rows[row_index(number, len(self._rows), self._seed, self._shuffle)])

    def of_row(self, number: int, row: Row) -> Task:
        """A task made of a given row; evaluation numbers its own below zero."""
        prompt = self._environment.render(row)
        return Task(id=number, row=row, content_hash=content_hash(row), prompt_ids=prompt.token_ids)

    def is_too_long(self, task: Task) -> bool:
        return len(task.prompt_ids) > self.max_prompt_tokens

    def answer_text(self, token_ids: np.ndarray) -> str:
        """The answer as the reward sees it."""
        return self._environment.answer_text(token_ids, self._eos)


def content_hash(row: Row) -> str:
    """16 hex digits over prompt and columns."""
    text = json.dumps([row.prompt, row.columns], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
