"""Samples of a run by what a person wants to see of them, across all plans: by task, plan, reward and status.

Reads the database, and the arrays of the samples that it returns; works beside a running owner. Texts are not here:
a prompt is in its row, an answer is token ids.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from cauce.errors import DataError, JournalError
from cauce.journal.encoding import row_from_json
from cauce.journal.payloads import FOLDER_NAME, AnswerArrays, PayloadRef, read_answer
from cauce.journal.queries import JournalReader
from cauce.types import Row

STATUSES = ("scored", "abstained", "failed", "timed_out", "unscored")
_COMPARED = re.compile(r"(>=|<=|!=|==|=|>|<)?\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)", re.IGNORECASE)
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_EQUAL = 1e-6  # rewards are typed by people

Comparison = Literal[">=", "<=", "!=", "=", ">", "<"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleFilter:
    """Which samples; what is None does not matter."""

    task: int | None = None
    plans: tuple[int, int] | None = None  # first and last
    reward: tuple[Comparison, float] | None = None
    status: str | None = None
    limit: int = 20  # 0: all


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundSample:
    """One answer with everything that its record says."""

    task: int
    index: int
    plans: tuple[int, ...]  # that use it; none yet, or never
    row: Row
    task_state: str
    drop_reason: str
    status: str  # of the outcome; "unscored" until there is one
    reward: float | None
    parts: dict[str, float | None]
    detail: str
    attempt: int
    finish_reason: str
    num_tokens: int
    versions: tuple[int, int]  # oldest and newest policy version of its tokens
    arrays: AnswerArrays | None  # None where its payload cannot be read any more

    @property
    def logp_mean(self) -> float | None:
        """Mean log-probability of the tokens that the policy sampled."""
        if self.arrays is None or not self.arrays.mask.any():
            return None
        return float(self.arrays.logps[self.arrays.mask != 0].mean())


def parse_reward(text: str) -> tuple[Comparison, float]:
    """'>=1', '<0.5', '0': how a reward is compared, and with what."""
    match = _COMPARED.fullmatch(text.strip())
    if match is None:
        raise DataError(f"--reward {text!r}: write a number, or one after >=, <=, >, <, = or !=, such as '>=1'")
    sign = match[1] or "="
    comparison: Comparison = "=" if sign == "==" else sign  # type: ignore[assignment]  # one of the pattern's
    return comparison, float(match[2])


def parse_plans(text: str) -> tuple[int, int]:
    """'7' or '3-9': first and last plan."""
    match = _RANGE.fullmatch(text.strip())
    if match is None:
        raise DataError(f"--plan {text!r}: write a number such as 7, or a range such as 3-9")
    first = int(match[1])
    return first, int(match[2]) if match[2] else first


def find_samples(journal: JournalReader, wanted: SampleFilter) -> Iterator[FoundSample]:
    """Samples in the order of their tasks, read one by one."""
    conditions, values = _conditions(wanted)
    query = f"""
        SELECT sample.task, idx, attempt, finish_reason, num_tokens, min_version, max_version, sample.file,
               sample.offset, status, value, parts, sample.detail, task.row, task.state, task.reason,
               (SELECT group_concat(plan) FROM plan_use WHERE plan_use.task = sample.task)
        FROM sample JOIN task ON task.id = sample.task
        WHERE {" AND ".join(["1", *conditions])} ORDER BY sample.task, idx LIMIT ?"""
    for row in journal.select(query, *values, wanted.limit or -1):
        yield _found(journal, row)


def _conditions(wanted: SampleFilter) -> tuple[list[str], list[Any]]:
    conditions: list[str] = []
    values: list[Any] = []
    if wanted.task is not None:
        conditions.append("sample.task = ?")
        values.append(wanted.task)
    if wanted.plans is not None:
        conditions.append("sample.task IN (SELECT task FROM plan_use WHERE plan BETWEEN ? AND ?)")
        values += wanted.plans
    if wanted.status is not None:
        if wanted.status not in STATUSES:
            raise DataError(f"--status {wanted.status!r}: write one of {', '.join(STATUSES)}")
        conditions.append("COALESCE(status, 'unscored') = ?")
        values.append(wanted.status)
    if wanted.reward is not None:
        comparison, number = wanted.reward
        if comparison in ("=", "!="):
            conditions.append(f"ABS(value - ?) {'<=' if comparison == '=' else '>'} {_EQUAL}")
        else:
            conditions.append(f"value {comparison} ?")
        values.append(number)
    return conditions, values


def _found(journal: JournalReader, row: tuple[Any, ...]) -> FoundSample:
    task, index, attempt, finish_reason, num_tokens, oldest, newest, file, offset = row[:9]
    status, value, parts, detail, task_row, task_state, reason, plans = row[9:]
    try:
        arrays = read_answer(journal.run_dir / FOLDER_NAME, PayloadRef(file, offset), task=task, index=index)
    except JournalError:
        arrays = None
    return FoundSample(
        task=task,
        index=index,
        plans=tuple(sorted(map(int, plans.split(",")))) if plans else (),
        row=row_from_json(task_row),
        task_state=task_state,
        drop_reason=reason,
        status=status or "unscored",
        reward=value,
        parts=json.loads(parts) if parts else {},
        detail=detail or "",
        attempt=attempt,
        finish_reason=finish_reason,
        num_tokens=num_tokens,
        versions=(oldest, newest),
        arrays=arrays,
    )
