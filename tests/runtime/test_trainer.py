"""When a run without Ray saves, evaluates and ends, and what is left beside its record."""

import signal
from pathlib import Path

import pytest

from cauce.journal import Journal
from cauce.stages import rl
from tests.local_session import (
    ROWS,
    Killed,
    LocalSession,
    Watcher,
    checksums,
    local_recipe,
    resume_locally,
    train_locally,
)


def test_a_run_that_is_asked_to_stop_ends_after_its_plan_with_a_checkpoint(
    local: type[LocalSession], tiny: Path, tmp_path: Path
) -> None:
    class Stopper(Watcher):
        def on_plan(self, plan: int, metrics: dict[str, float]) -> None:
            super().on_plan(plan, metrics)
            if plan == 2:
                signal.raise_signal(signal.SIGTERM)

    run, straight = tmp_path / "run", tmp_path / "straight"
    summary = train_locally(tiny, run, run__plans=4, observer=Stopper())
    assert (summary["status"], summary["plans"]) == ("stopped", 2)
    with Journal.read_only(run) as journal:
        assert [c.plan for c in journal.checkpoints()] == [2]
        assert journal.counts()["ready"] == 0  # synchronous: nothing was begun in vain
    watcher = Watcher()
    assert resume_locally(run, observer=watcher)["status"] == "finished"
    assert not any("trained again" in note for note in watcher.notes)
    train_locally(tiny, straight, run__plans=4)
    assert checksums(run) == checksums(straight)


def test_evaluation_is_due_every_n_plans_and_at_both_ends(
    local: type[LocalSession], tiny: Path, tmp_path: Path
) -> None:
    run, watcher = tmp_path / "run", Watcher()
    shape = {"run__plans": 5, "eval__every": 2, "eval__at_start": True, "eval__tasks": 3}
    summary = train_locally(tiny, run, test_rows=ROWS[:6], observer=watcher, **shape)
    assert [plan for plan, _ in watcher.evals] == [0, 2, 4, 5]
    assert (summary["eval_before"], summary["eval_after"]) == (watcher.evals[0][1], watcher.evals[-1][1])
    names = {file.name: len(file.read_text().splitlines()) for file in (run / "eval").iterdir()}
    assert names == {"before.jsonl": 3, "plan_000002.jsonl": 3, "plan_000004.jsonl": 3, "after.jsonl": 3}
    with Journal.read_only(run) as journal:
        assert journal.next_task_id == 10  # evaluation enters no record


def test_a_plan_is_saved_before_it_is_evaluated(local: type[LocalSession], tiny: Path, tmp_path: Path) -> None:
    """An evaluation that fails, after minutes perhaps, takes no plan with it."""

    class Fails(Watcher):
        def on_eval(self, plan: int, name: str, accuracy: float) -> None:
            raise Killed

    run = tmp_path / "run"
    with pytest.raises(Killed):
        train_locally(tiny, run, test_rows=ROWS[:2], observer=Fails(), run__plans=4, eval__every=2, checkpoint__every=2)
    with Journal.read_only(run) as journal:
        assert [record.plan for record in journal.checkpoints()] == [2]
    watcher = Watcher()
    assert resume_locally(run, test_rows=ROWS[:2], observer=watcher)["status"] == "finished"
    assert not any("trained again" in note for note in watcher.notes)


def test_a_stop_during_an_evaluation_still_ends_with_a_checkpoint(
    local: type[LocalSession], tiny: Path, tmp_path: Path
) -> None:
    class Stopper(Watcher):
        def on_eval(self, plan: int, name: str, accuracy: float) -> None:
            signal.raise_signal(signal.SIGTERM)

    run = tmp_path / "run"
    summary = train_locally(tiny, run, test_rows=ROWS[:2], observer=Stopper(), run__plans=4, eval__every=2)
    assert (summary["status"], summary["plans"]) == ("stopped", 2)
    with Journal.read_only(run) as journal:
        assert [record.plan for record in journal.checkpoints()] == [2]


def test_a_recipe_of_a_run_is_beside_its_record(local: type[LocalSession], tiny: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train_locally(tiny, run, run__plans=1)
    assert rl.changed_recipe(run, []) == local_recipe(tiny, run, run__plans=1)


def test_checkpoints_and_evaluations_are_in_the_split_of_the_plan_after_them(
    local: type[LocalSession], tiny: Path, tmp_path: Path
) -> None:
    """Of the last plan, after which none comes, in the summary."""
    watcher = Watcher()
    shape = {"run__plans": 3, "checkpoint__every": 2, "eval__every": 1, "eval__at_start": True}
    summary = train_locally(tiny, tmp_path / "run", test_rows=ROWS[:4], observer=watcher, **shape)
    assert [watcher.plans[n]["time/checkpoint"] > 0 for n in (1, 2, 3)] == [False, False, True]
    assert all(watcher.plans[n]["time/eval"] > 0 for n in (1, 2, 3))
    assert all(summary["time_after_last_plan_s"][part] > 0 for part in ("checkpoint", "eval"))
    split = summary["time_s"]
    assert split["eval"] == pytest.approx(sum(watcher.plans[n]["time/eval"] for n in (1, 2, 3)), abs=1e-2)
    assert split["checkpoint"] > 0
