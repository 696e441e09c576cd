"""Small tasks, answers and outcomes for the tests of the journal, each a function of its numbers."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from cauce.journal import Journal
from cauce.types import Completion, Outcome, Plan, Row, Task

GROUP_SIZE = 2


def make_task(number: int) -> Task:
    row = Row(id=f"train:{number}", prompt=f"What is {number} + 1?", columns={"answer": str(number + 1)})
    prompt_ids = np.arange(number, number + 3 + number % 4, dtype=np.int32)
    return Task(id=number, row=row, content_hash=f"hash-{number}", prompt_ids=prompt_ids)


def make_answer(task: int, index: int, *, attempt: int = 1, version: int = 0, salt: int = 0) -> Completion:
    """Another `salt` is another answer to the same (task, index)."""
    rng = np.random.default_rng([task, index, salt])
    length = 1 + int(rng.integers(6))
    return Completion(
        task=task,
        index=index,
        attempt=attempt,
        token_ids=rng.integers(0, 50_000, length).astype(np.int32),
        logps=-rng.random(length).astype(np.float32),
        versions=np.full(length, version, np.int32),
        mask=np.ones(length, np.uint8),
        finish_reason="stop",
    )


def scored(value: float) -> Outcome:
    return Outcome(status="scored", value=value, parts={"score": value}, detail="")


def make_plan(number: int, tasks: Sequence[int]) -> Plan:
    return Plan(number=number, tasks=tuple(tasks), mini_batches=(tuple(tasks),))


def assert_same_answer(found: Completion, expected: Completion) -> None:
    for field in ("task", "index", "attempt", "finish_reason"):
        assert getattr(found, field) == getattr(expected, field), field
    for field in ("token_ids", "logps", "versions", "mask"):
        a, b = getattr(found, field), getattr(expected, field)
        assert a.dtype == b.dtype, field
        np.testing.assert_array_equal(a, b, err_msg=field)


def new_journal(run_dir: Path, *, max_reuse: int = 1) -> Journal:
    meta = {"run_id": "test", "max_reuse": str(max_reuse), "group_size": str(GROUP_SIZE)}
    return Journal.create(run_dir, meta=meta)


def admit(journal: Journal, num: int) -> list[int]:
    first = journal.next_task_id
    ids = list(range(first, first + num))
    journal.admit([make_task(number) for number in ids])
    return ids


def make_ready(journal: Journal, task: int, *, version: int = 0) -> None:
    """Bring an admitted task all the way to `ready`, in one commit."""
    with journal.transaction():
        attempt = journal.lease(task, indices=range(GROUP_SIZE), worker="actor-0", version=version, until=1e12)
        answers = [make_answer(task, i, attempt=attempt, version=version) for i in range(GROUP_SIZE)]
        journal.record_answers(answers)
        journal.record_outcomes([(task, i, scored(float(i))) for i in range(GROUP_SIZE)])
        journal.mark_ready(task)
