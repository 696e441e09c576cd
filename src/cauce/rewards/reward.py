"""Scoring: calls every reward function on a set of answers and adds their values up to one outcome per
answer.

An answer is `failed` if any function failed on it, `abstained` if every function did, and otherwise scored
with the weighted sum over those that answered. A failure is never a 0. Leaves out time limits and processes,
which belong to the runtime; a Reward is plain data and functions, so that it can be sent to the process that
scores.
"""

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from cauce.rewards.adapters import Answers, Failure, Log, RewardFunction, TrainerState, Value, describe
from cauce.types import Outcome, Row


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardResult:
    """One outcome per answer. The means per function come from `Outcome.parts`; `metrics` holds what the
    functions themselves reported (mean per name), `extras` the columns they logged."""

    outcomes: list[Outcome]
    metrics: dict[str, float]
    extras: dict[str, list[Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """One or several reward functions with their weights."""

    functions: tuple[RewardFunction, ...]
    weights: tuple[float, ...]
    notes: tuple[str, ...] = ()  # choices that were made in finding them, for people to read

    @property
    def names(self) -> tuple[str, ...]:
        """Metric names of the functions."""
        return tuple(function.name for function in self.functions)

    def require(self, columns: Collection[str]) -> None:
        """Raise a RewardError if a function needs a column that the data does not have."""
        for function in self.functions:
            function.require(columns)

    def score(
        self,
        *,
        rows: Sequence[Row],
        texts: Sequence[str],
        token_ids: Sequence[Sequence[int]],
        step: int,
        max_steps: int,
        epoch: float = 0.0,
        prompt_texts: Sequence[str] | None = None,
    ) -> RewardResult:
        """Score answers, in order. Answers to one row are expected side by side.

        Args:
            prompt_texts: the rendered prompts, for OpenRLHF's convention; left out, the rows' own text
            serves.
        """
        answers = Answers(
            rows=rows,
            texts=texts,
            token_ids=token_ids,
            prompt_texts=prompt_texts if prompt_texts is not None else [_plain_prompt(row) for row in rows],
            state=TrainerState(global_step=step, max_steps=max_steps, epoch=epoch),
        )
        self.require({name for row in rows for name in row.columns})
        log = Log()
        values = [
            self._apart_by_row(function, answers, found, log) if _all_failed(function, found) else found
            for function, found in zip(self.functions, _evaluate(self.functions, answers, log), strict=True)
        ]
        outcomes = [self._combine([column[i] for column in values]) for i in range(len(texts))]
        metrics = {name: sum(numbers) / len(numbers) for name, numbers in log.metrics.items()}
        return RewardResult(outcomes=outcomes, metrics=metrics, extras=log.extras)

    def _apart_by_row(self, function: RewardFunction, answers: Answers, found: list[Value], log: Log) -> list[Value]:
        """A call for several groups that raised is made again for each: only the bad group is lost."""
        ids = [row.id for row in answers.rows]
        starts = [i for i in range(len(ids)) if i == 0 or ids[i] != ids[i - 1]]
        if len(starts) == 1:
            return found
        values: list[Value] = []
        for start, stop in zip(starts, [*starts[1:], len(ids)], strict=True):
            values += _evaluate([function], answers.slice(start, stop), log)[0]
        return values

    def _combine(self, values: list[Value]) -> Outcome:
        parts: dict[str, float | None] = {}
        total, has_answer, detail = 0.0, False, ""
        for name, weight, value in zip(self.names, self.weights, values, strict=True):
            parts[name] = None if isinstance(value, Failure) else value
            if isinstance(value, Failure):
                detail = detail or f"{name}: {value.detail}"
            elif value is not None:
                total, has_answer = total + weight * value, True
        if detail:
            return Outcome(status="failed", value=None, parts=parts, detail=detail)
        if not has_answer:
            return Outcome(status="abstained", value=None, parts=parts, detail="")
        return Outcome(status="scored", value=total, parts=parts, detail="")


def _evaluate(functions: Sequence[RewardFunction], answers: Answers, log: Log) -> list[list[Value]]:
    """Values per function and answer. Coroutines of all run side by side, plain functions in turn."""
    if not answers.texts:
        return [[] for _ in functions]
    started = [function.start(answers, log) for function in functions]
    settled = iter(_settle([result for results in started for result in results]))
    return [
        function.finish(answers, [next(settled) for _ in results], log)
        for function, results in zip(functions, started, strict=True)
    ]


def _settle(results: list[Any]) -> list[Any]:
    """Await what is awaitable; what it raises becomes a Failure."""
    waiting = [i for i, result in enumerate(results) if inspect.isawaitable(result)]
    if not waiting:
        return results
    settled = list(results)
    for i, result in zip(waiting, _run_all([results[i] for i in waiting]), strict=True):
        settled[i] = result
    return settled


def _run_all(awaitables: list[Awaitable[Any]]) -> list[Any]:
    async def settle_one(awaitable: Awaitable[Any]) -> Any:
        try:
            return await awaitable
        except (Exception, SystemExit) as error:  # the same boundary as around plain functions
            return Failure(describe(error))

    async def settle_all() -> list[Any]:
        return list(await asyncio.gather(*(settle_one(awaitable) for awaitable in awaitables)))

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(settle_all())
    # A loop already runs in this thread (a notebook, an async actor), so the coroutines get a thread of their
    # own.
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.extend(asyncio.run(settle_all())), name="cauce-reward")
    thread.start()
    thread.join()
    return results


def _all_failed(function: RewardFunction, values: list[Value]) -> bool:
    return function.kind == "native" and bool(values) and all(isinstance(value, Failure) for value in values)


def _plain_prompt(row: Row) -> str:
    if isinstance(row.prompt, str):
        return row.prompt
    return "\n".join(str(message.get("content") or "") for message in row.prompt)
