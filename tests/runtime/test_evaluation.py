"""Evaluation: greedy, one answer a task, nothing of it in the record; losses, failures and what cannot be asked."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cauce.errors import TrainingStopped
from cauce.rewards.reward import RewardResult
from cauce.runtime.evaluation import EvalResult, Evaluation, write_records
from cauce.types import GenerationRequest, Outcome, Row, Sampling, Task
from tests.fakes import ScriptedRollout, request
from tests.runtime.rig import PoolRig

SAMPLING = Sampling(max_tokens=4, temperature=0.0, stop_token_ids=(0,), seed=0)


class Source:
    """Prompts as long as the row says, at most 8 tokens."""

    def of_row(self, number: int, row: Row) -> Task:
        return Task(id=number, row=row, content_hash="h", prompt_ids=np.arange(row.columns["length"], dtype=np.int32))

    def is_too_long(self, task: Task) -> bool:
        return len(task.prompt_ids) > 8

    def answer_text(self, token_ids: np.ndarray) -> str:
        return "text"


class Scorer:
    """The row's own reward; a text stands for a failure."""

    def score(self, *, rows: Sequence[Row], texts: Sequence[str], step: int, max_steps: int, **_: Any) -> RewardResult:
        assert (step, max_steps) == (3, 9)
        value = rows[0].columns["reward"]
        if isinstance(value, str):
            return RewardResult(outcomes=[Outcome(status="failed", value=None, parts={}, detail=value)], metrics={})
        return RewardResult(outcomes=[Outcome(status="scored", value=value, parts={}, detail="")], metrics={})

    def score_many(self, *, jobs: Sequence[dict[str, Any]]) -> list[RewardResult]:
        return [self.score(**job) for job in jobs]


class Rig(PoolRig):
    def __init__(self, scripts: dict[str, list[str]] | None = None, *, actors: int = 1) -> None:
        self.rollouts: list[ScriptedRollout] = []
        self.phases: list[Any] = []
        self.scripts = scripts or {}
        super().__init__(self.make, actors=actors, timeout_s=5, stall_s=600)

    def make(self, name: str) -> Any:
        if name.startswith("reward"):
            return Scorer()
        self.rollouts.append(ScriptedRollout(self.scripts.get(name, self.scripts.get("*", []))))
        return self.rollouts[-1]

    def evaluate(self, *rewards: float | str, lengths: dict[int, int] | None = None) -> EvalResult:
        rows = [
            Row(id=f"test:{i}", prompt=f"p{i}", columns={"reward": r, "length": (lengths or {}).get(i, 3)})
            for i, r in enumerate(rewards)
        ]
        return Evaluation(
            self.exchange,
            Source(),  # type: ignore[arg-type]
            rows=rows,
            sampling=SAMPLING,
            step=3,
            max_steps=9,
            on_phase=lambda name, done, total: self.phases.append((name, done, total)),
        ).run()


class Asked(ScriptedRollout):
    """Keeps every request."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[GenerationRequest] = []

    def work(self, *, requests: Sequence[GenerationRequest], **kwargs: Any):
        self.all += requests
        return super().work(requests=requests, **kwargs)


def test_the_accuracy_is_the_mean_reward_and_each_answer_is_kept(tmp_path: Path) -> None:
    rig = Rig()
    result = rig.evaluate(1.0, 0.0, 0.5, 1.0)
    assert (result.accuracy, result.num_scored, result.num_unscored) == (0.625, 4, 0)
    assert [(r["task"], r["row"], r["reward"]) for r in result.records] == [
        (0, "test:0", 1.0), (1, "test:1", 0.0), (2, "test:2", 0.5), (3, "test:3", 1.0),
    ]  # fmt: skip
    write_records(result, tmp_path / "eval" / "before.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "eval" / "before.jsonl").read_text().splitlines()]
    assert lines == [dict(record) for record in result.records]
    assert (lines[0]["prompt"], lines[0]["num_tokens"], lines[0]["finish_reason"]) == ("p0", 3, "stop")
    assert rig.phases[-1] == ("evaluate", 4, 4)
    assert rig.exchange.evaluation is None


def test_it_is_greedy_one_answer_a_task_under_ids_that_no_training_task_has() -> None:
    """C4, J12: sampling of its own."""
    rig = Rig()
    rig.make = lambda name: Scorer() if name.startswith("reward") else asked  # type: ignore[method-assign]
    rig.workers.make = rig.make
    asked = Asked()
    rig.evaluate(1.0, 0.0)
    assert [(r.task, r.indices) for r in asked.all] == [(-1, (0,)), (-2, (0,))]
    assert {r.sampling for r in asked.all} == {SAMPLING}


def test_training_goes_on_at_its_own_desk() -> None:
    rig = Rig()
    seen: list[int] = []

    class Desk:
        def on_answers(self, completions: Sequence[Any]) -> None:
            seen.extend(c.task for c in completions)

        def on_progress(self, tasks: set[int]) -> None: ...

    rig.exchange.training = Desk()  # type: ignore[assignment]
    rig.pool.submit(request(5))
    assert rig.evaluate(1.0).num_scored == 1
    assert seen == [5, 5]


def test_a_death_asks_again_and_the_third_leaves_the_task_out() -> None:
    again = Rig({"rollout-0": ["die"]})
    assert again.evaluate(1.0, 0.0).num_scored == 2
    rig = Rig({"rollout-0": ["die"], "rollout-1": ["die"], "rollout-2": ["die"]}, actors=1)
    with pytest.raises(TrainingStopped, match="none of the 1 held-out answers could be scored: no task was left"):
        rig.evaluate(1.0)


def test_what_cannot_be_asked_or_scored_is_counted_and_never_a_zero() -> None:
    """C20, E5."""
    result = Rig().evaluate(1.0, "ValueError: no", 1.0, 1.0, lengths={3: 99})
    assert (result.accuracy, result.num_scored, result.num_unscored) == (1.0, 2, 2)
    assert [record["reward"] for record in result.records] == [1.0, None, 1.0]
    assert result.records[1]["status"] == "failed"


def test_prompts_that_the_engine_refuses_are_left_out() -> None:
    """E7, C20."""
    rig = Rig({"rollout-0": ["abort"]})
    with pytest.raises(TrainingStopped, match="no task was left"):
        rig.evaluate(1.0)


def test_no_score_at_all_is_an_error_with_the_first_cause() -> None:
    """E1."""
    rig = Rig()
    with pytest.raises(TrainingStopped, match="none of the 2 held-out answers could be scored: KeyError: 'gold'"):
        rig.evaluate("KeyError: 'gold'", "other")
    assert rig.exchange.evaluation is None  # the desk is cleared whatever happens
