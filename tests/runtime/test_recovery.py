"""Killed at any point and resumed, a run equals the one that never stopped: whole runs without Ray, bit for bit."""

import json
import shutil
import sqlite3
from pathlib import Path
from typing import Any, ClassVar

import pytest

from cauce import checkpoint
from cauce.errors import JournalError
from cauce.journal import Journal
from cauce.runtime.recovery import newest_checkpoint
from cauce.runtime.roles import LearnerWorker
from cauce.runtime.world import WorkerDied
from cauce.stages import rl
from tests.local_session import (
    Killed,
    LocalSession,
    Watcher,
    answers,
    assert_equal_runs,
    checksums,
    dying,
    resume_locally,
    train_locally,
    trained_rows,
)
from tests.runtime.straight_run import KILLS, PLANS, ROWS, SHAPE, killed_run, told


@pytest.mark.parametrize("kill", KILLS)
def test_killed_anywhere_it_resumes_to_the_same_weights(
    local: type[LocalSession], straight: Path, tmp_path: Path, kill: str
) -> None:
    """G2, G3: the same rows in the same order, the same answers and, after AdamW, the same bits."""
    run = tmp_path / "run"
    killed_run(local, straight, run, kill)
    before, decided = answers(run), checksums(run)
    assert len(decided) < PLANS
    summary = resume_locally(run, rows=ROWS)
    assert summary["status"] == "finished"
    assert_equal_runs(run, straight)
    assert before.items() <= answers(run).items()  # nothing acknowledged was made again
    result = rl.replay(run)
    assert (result.plans, result.divergent_plan) == (PLANS, None)


def test_killed_at_the_end_of_an_epoch_it_goes_on_with_the_next(
    local: type[LocalSession], straight: Path, tmp_path: Path
) -> None:
    """G1: plan 2 ends the first epoch of four rows; the resumed run trains on all four again, in their new order."""
    run = tmp_path / "run"
    with pytest.raises(Killed):
        train_locally(straight.parent / "model", run, run__plans=PLANS, observer=Watcher(kill_after=2), **SHAPE)
    assert len(checksums(run)) == 2
    resume_locally(run, rows=ROWS)
    assert_equal_runs(run, straight)
    first, second = ([row for plan in trained_rows(run)[a : a + 2] for row in plan] for a in (0, 2))
    assert sorted(first) == sorted(second) == [f"train:{i}" for i in range(4)]
    assert first != second


def test_a_redo_starts_from_the_newest_checkpoint_that_is_whole(
    local: type[LocalSession], straight: Path, tmp_path: Path
) -> None:
    """G7: numbers in order, damaged ones passed over; without any, the record gives the same weights from the start."""
    run = tmp_path / "run"
    shutil.copytree(straight, run)
    with Journal.open(run) as journal:
        assert newest_checkpoint(run, journal) == (4, run / "checkpoints" / "plan_000004")
        (run / "checkpoints" / "plan_000004" / checkpoint.MARKER).unlink()
        assert newest_checkpoint(run, journal) == (2, run / "checkpoints" / "plan_000002")
    watcher, both = Watcher(), Watcher()
    resume_locally(run, rows=ROWS, observer=watcher)
    assert told(watcher, "2 plans after checkpoint plan_000002 were trained again")
    shutil.rmtree(run / "checkpoints")
    resume_locally(run, rows=ROWS, observer=both)
    assert told(both, "4 plans after the initial weights were trained again")
    assert_equal_runs(run, straight)


def falsify(run: Path, plan: int) -> None:
    with sqlite3.connect(run / "journal.db") as db:
        db.execute("UPDATE plan SET checksum = 'false' || substr(checksum, 6) WHERE number = ?", (plan,))


def begin_elsewhere(local: type[LocalSession], straight: Path, run: Path) -> None:
    """A run killed after plan 3, whose plan 3 was made under another fingerprint and has other weights."""
    with pytest.raises(Killed):
        train_locally(straight.parent / "model", run, run__plans=PLANS, observer=Watcher(kill_after=3), **SHAPE)
    falsify(run, 3)
    with Journal.open(run) as journal:
        recorded = json.loads(journal.meta["fingerprint"])
        journal.set_meta("fingerprint", json.dumps({**recorded, "threads": "64"}))


class Lineages(LearnerWorker):
    """Keeps what it publishes: versions with their lineage."""

    published: ClassVar[list[tuple[int, str]]] = []

    def publish(self, **kwargs: Any) -> str:
        self.published.append((kwargs["version"], kwargs["lineage"]))
        return super().publish(**kwargs)


def test_a_new_lineage_is_gone_on_with_before_and_after_its_next_checkpoint(
    local: type[LocalSession], straight: Path, tmp_path: Path
) -> None:
    """Its first weights are saved and recorded with it, so that what is redone later is its own."""
    run = tmp_path / "run"
    begin_elsewhere(local, straight, run)
    with pytest.raises(Killed):
        resume_locally(run, rows=ROWS, observer=Watcher(kill_after=4))  # no checkpoint is due before that
    with Journal.read_only(run) as journal:
        assert (journal.meta["lineage"], journal.meta["fingerprint_since"]) == ("1", "3")
        assert [record.plan for record in journal.checkpoints()] == [2, 3]
        assert newest_checkpoint(run, journal) == (3, run / "checkpoints" / "plan_000003")
    watcher, Lineages.published = Watcher(), []
    local.learner = Lineages
    assert resume_locally(run, rows=ROWS, observer=watcher)["status"] == "finished"
    assert told(watcher, "1 plans after checkpoint plan_000003 were trained again")
    assert Lineages.published == [(4, "1")]
    assert checksums(run)[3] == checksums(straight)[3]
    shutil.rmtree(run / "checkpoints")  # plan 3's record is of an older fingerprint: no fault of ours even now
    assert resume_locally(run, rows=ROWS)["status"] == "finished"
    with Journal.read_only(run) as journal:
        assert journal.meta["lineage"] == "2"
    result = rl.replay(run, observer=watcher)
    assert (result.divergent_plan, result.lineages) == (3, 3)
    assert any("the record has 3 lineages" in note and "plan 3, plan 3" in note for note in watcher.notes)


def test_a_learner_that_dies_in_a_new_lineage_is_rebuilt_in_it(
    local: type[LocalSession], straight: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    begin_elsewhere(local, straight, run)
    death = WorkerDied("learner learner-0 on here died: SIGKILL")
    local.learner = dying(LearnerWorker, "optim_step", call=2, error=death)  # the first is the redo of plan 3
    assert resume_locally(run, rows=ROWS)["status"] == "finished"
    with Journal.read_only(run) as journal:
        assert journal.meta["lineage"] == "1"
        assert len(journal.events("learner_died")) == 1


@pytest.mark.parametrize("after", [False, True])
def test_a_kill_at_the_birth_of_a_lineage_leaves_the_old_record(
    local: type[LocalSession], straight: Path, tmp_path: Path, after: bool
) -> None:
    """Neither its fingerprint nor its weights may count while the other is missing."""
    run = tmp_path / "run"
    begin_elsewhere(local, straight, run)
    with Journal.open(run) as journal:
        journal.record_checkpoint(3, run / "checkpoints" / "plan_000003")  # of the old lineage, and lost since
        before = journal.meta
    local.learner = dying(LearnerWorker, "save_checkpoint", call=1, after=after)
    with pytest.raises(Killed):
        resume_locally(run, rows=ROWS)
    with Journal.read_only(run) as journal:
        assert [journal.meta[key] for key in ("lineage", "fingerprint")] == [before["lineage"], before["fingerprint"]]
        assert newest_checkpoint(run, journal) == (2, run / "checkpoints" / "plan_000002")
    local.learner = LearnerWorker
    assert resume_locally(run, rows=ROWS)["status"] == "finished"
    with Journal.read_only(run) as journal:
        assert journal.meta["lineage"] == "1"


def test_a_learner_that_comes_back_on_other_hardware_goes_on_as_a_new_lineage(
    local: type[LocalSession], straight: Path, tmp_path: Path
) -> None:
    """In mid-run: plan 3 redone gives other weights there, and what is published from then on says so."""

    class Moves(Lineages):
        made = steps = 0

        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            Moves.made += 1
            self.is_elsewhere = Moves.made > 1

        def optim_step(self) -> dict[str, float]:
            Moves.steps += 1
            if Moves.steps == 4:
                raise WorkerDied("learner learner-0 on here died: SIGKILL")
            metrics = super().optim_step()
            if self.is_elsewhere:
                for master in self._learner._weights.masters.values():
                    master.data.add_(1e-6)
            return metrics

        def status(self) -> dict[str, Any]:
            status = super().status()
            if self.is_elsewhere:
                status["fingerprint"]["instructions"] = "OTHER"
            return status

    run, watcher = tmp_path / "run", Watcher()
    local.learner, Moves.published = Moves, []
    train_locally(straight.parent / "model", run, run__plans=PLANS, observer=watcher, **SHAPE)
    assert Moves.published == [(0, "0"), (1, "0"), (2, "0"), (3, "0"), (4, "1")]
    assert told(watcher, "a new lineage begins there")
    with Journal.read_only(run) as journal:
        assert json.loads(journal.meta["fingerprint"])["instructions"] == "OTHER"
        assert [record.plan for record in journal.checkpoints()] == [3, 4]


def test_with_one_checkpoint_kept_there_is_one_at_every_moment(
    local: type[LocalSession], straight: Path, tmp_path: Path
) -> None:
    """G7: the older one goes when the newer one is recorded, and not before."""
    run, watcher = tmp_path / "run", Watcher()
    local.learner = dying(LearnerWorker, "save_checkpoint", call=2, after=True)
    with pytest.raises(Killed):
        train_locally(straight.parent / "model", run, run__plans=PLANS, checkpoint__keep=1, **SHAPE)
    with Journal.read_only(run) as journal:
        assert newest_checkpoint(run, journal) == (2, run / "checkpoints" / "plan_000002")
    local.learner = LearnerWorker
    resume_locally(run, rows=ROWS, observer=watcher)
    assert told(watcher, "2 plans after checkpoint plan_000002 were trained again")
    assert list(checkpoint.complete(run)) == [4]
    with Journal.read_only(run) as journal:
        assert [record.plan for record in journal.checkpoints()] == [4]
    assert checksums(run) == checksums(straight)


def test_what_a_kill_left_to_redo_counts_towards_the_next_checkpoint(
    local: type[LocalSession], straight: Path, tmp_path: Path
) -> None:
    run, shape = tmp_path / "run", {**SHAPE, "checkpoint__every": 0}
    with pytest.raises(Killed):
        train_locally(straight.parent / "model", run, run__plans=PLANS, observer=Watcher(kill_after=2), **shape)
    with sqlite3.connect(run / "journal.db") as db:
        db.execute("UPDATE plan SET metrics = json_set(metrics, '$.\"time/learn\"', 40.0)")
    resume_locally(run, rows=ROWS, overrides=["checkpoint.max_redo_s=80.0001"])  # twice 40, and a bit of plan 3
    with Journal.read_only(run) as journal:
        assert [record.plan for record in journal.checkpoints()] == [3, 4]


def test_a_checkpoint_that_a_kill_came_before_is_made_at_the_resume(
    local: type[LocalSession], straight: Path, tmp_path: Path
) -> None:
    run, shape = tmp_path / "run", {**SHAPE, "checkpoint__every": 2}
    with pytest.raises(Killed):  # plan 2 is applied, its checkpoint is not there
        train_locally(straight.parent / "model", run, run__plans=PLANS, observer=Watcher(kill_after=2), **shape)
    assert not list((run / "checkpoints").glob("plan_*"))
    resume_locally(run, rows=ROWS, overrides=["checkpoint.keep=9"])
    with Journal.read_only(run) as journal:
        assert [record.plan for record in journal.checkpoints()] == [2, 4]


def test_a_false_checksum_is_found_and_named_with_its_plan(
    local: type[LocalSession], straight: Path, tmp_path: Path
) -> None:
    """G3."""
    run = tmp_path / "run"
    shutil.copytree(straight, run)
    falsify(run, 3)
    falsify(run, 4)
    assert rl.replay(run).divergent_plan == 3
    shutil.rmtree(run / "checkpoints" / "plan_000004")
    with pytest.raises(JournalError, match=r"plan 3 redone .*, recorded were false\w+, under the same"):
        resume_locally(run, rows=ROWS)


def test_another_fingerprint_begins_a_new_lineage_and_training_goes_on(
    local: type[LocalSession], straight: Path, tmp_path: Path
) -> None:
    run, watcher = tmp_path / "run", Watcher()
    shutil.copytree(straight, run)
    falsify(run, 4)
    shutil.rmtree(run / "checkpoints" / "plan_000004")
    with Journal.open(run) as journal:
        recorded = json.loads(journal.meta["fingerprint"])
        journal.set_meta("fingerprint", json.dumps({**recorded, "threads": "64"}))
    summary = resume_locally(run, rows=ROWS, observer=watcher)
    assert summary["status"] == "finished"
    assert told(watcher, "a new lineage begins there")
    with Journal.read_only(run) as journal:
        assert journal.meta["lineage"] == "1"
        assert json.loads(journal.meta["fingerprint"]) == recorded
        assert [event.detail["plan"] for event in journal.events("lineage")] == [4]


@pytest.mark.parametrize(("evaluate", "save"), [(2, 1), (1, 2), (3, 2)])
def test_saving_and_evaluating_at_different_plans(
    local: type[LocalSession], straight: Path, tmp_path: Path, evaluate: int, save: int
) -> None:
    """G12, G13: neither waits for the other, and neither changes the weights."""
    run, watcher = tmp_path / "run", Watcher()
    shape = {**SHAPE, "run__plans": PLANS, "eval__every": evaluate, "checkpoint__every": save, "checkpoint__keep": 9}
    train_locally(straight.parent / "model", run, test_rows=ROWS, observer=watcher, **shape)
    assert [plan for plan, _ in watcher.evals] == sorted({*range(evaluate, PLANS + 1, evaluate), PLANS})
    assert list(checkpoint.complete(run)) == list(range(save, PLANS + 1, save))
    assert checksums(run) == checksums(straight)
