"""Evaluation on held-out tasks: greedy, one answer a task, through the same engines and the same reward.

Nothing of it enters the journal; a worker's death only means that its tasks are asked for again. Its requests carry
ids below zero. The weights are those the engines serve when it starts, and no plan is made while it runs.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cauce.errors import TrainingStopped
from cauce.runtime.exchange import Exchange
from cauce.runtime.pool import Lost
from cauce.runtime.reward_pool import ScoredJob, ScoreJob
from cauce.runtime.tasks import TaskSource
from cauce.types import Completion, GenerationRequest, Row, Sampling, Task

MAX_LOSSES = 3  # of one task, before the evaluation leaves it out


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """Mean reward over the tasks that could be scored, and each answer."""

    accuracy: float
    num_scored: int
    num_unscored: int
    records: tuple[dict[str, Any], ...]


class Evaluation:
    """The desk of one evaluation."""

    def __init__(
        self,
        exchange: Exchange,
        source: TaskSource,
        *,
        rows: Sequence[Row],
        sampling: Sampling,
        step: int,
        max_steps: int,
        on_phase: Callable[[str, int, int], None],
    ) -> None:
        self._exchange = exchange
        self._source = source
        self._sampling = sampling
        self._step = step
        self._max_steps = max_steps
        self._on_phase = on_phase
        tasks = [source.of_row(-(i + 1), row) for i, row in enumerate(rows)]
        self._tasks: dict[int, Task] = {t.id: t for t in tasks if not source.is_too_long(t)}
        self._too_long = len(tasks) - len(self._tasks)
        self._answers: dict[int, Completion] = {}
        self._scored: dict[int, ScoredJob] = {}
        self._losses: dict[int, int] = {}
        self._left_out: set[int] = set()

    def run(self) -> EvalResult:
        """Generates and scores everything, then returns."""
        self._exchange.evaluation = self
        try:
            for task in self._tasks.values():
                self._ask(task)
            while len(self._scored) + len(self._left_out) < len(self._tasks):
                self._exchange.turn()
        finally:
            self._exchange.evaluation = None
        return self._result()

    def on_answers(self, completions: Sequence[Completion]) -> None:
        for completion in completions:
            task = self._tasks[completion.task]
            if completion.finish_reason == "aborted":  # the prompt leaves no room in the context
                self._left_out.add(task.id)
                continue
            self._answers[task.id] = completion
            self._exchange.rewards.submit(
                ScoreJob(
                    key=task.id,
                    row=task.row,
                    texts=(self._source.answer_text(completion.token_ids),),
                    token_ids=(tuple(int(t) for t in completion.token_ids),),
                    step=self._step,
                    max_steps=self._max_steps,
                )
            )

    def on_scored(self, scored: Sequence[ScoredJob]) -> None:
        for item in scored:
            self._scored[item.job.key] = item
        self._on_phase("evaluate", len(self._scored), len(self._tasks))

    def on_lost(self, lost: Sequence[Lost]) -> None:
        for item in lost:
            task = self._tasks[item.request.task]
            self._losses[task.id] = self._losses.get(task.id, 0) + 1
            if self._losses[task.id] >= MAX_LOSSES:
                self._left_out.add(task.id)
            else:
                self._ask(task)

    def on_progress(self, tasks: set[int]) -> None:
        """Evaluation has no leases."""

    def _ask(self, task: Task) -> None:
        self._exchange.pool.submit(
            GenerationRequest(
                task=task.id, attempt=0, indices=(0,), prompt_ids=task.prompt_ids, sampling=self._sampling
            )
        )

    def _result(self) -> EvalResult:
        values, records = [], []
        for key in sorted(self._scored, reverse=True):
            job, completion = self._scored[key], self._answers[key]
            outcome, task = job.outcomes[0], self._tasks[key]
            if outcome.value is not None:
                values.append(outcome.value)
            records.append(
                {
                    "task": -key - 1,
                    "row": task.row.id,
                    "prompt": task.row.prompt,
                    "columns": task.row.columns,
                    "completion": job.job.texts[0],
                    "reward": outcome.value,
                    "status": outcome.status,
                    "finish_reason": completion.finish_reason,
                    "num_tokens": len(completion.token_ids),
                }
            )
        if not values:
            detail = next((j.outcomes[0].detail for j in self._scored.values()), "no task was left")
            raise TrainingStopped(f"none of the {len(self._tasks)} held-out answers could be scored: {detail}")
        return EvalResult(
            accuracy=sum(values) / len(values),
            num_scored=len(values),
            num_unscored=len(self._tasks) - len(values) + self._too_long,
            records=tuple(records),
        )


def write_records(result: EvalResult, path: Path) -> None:
    """One JSON line per answer."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for record in result.records:
            file.write(json.dumps(record, ensure_ascii=False, default=str) + "\n")
