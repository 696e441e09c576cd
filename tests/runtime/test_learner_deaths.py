"""A learner that dies, at work or in its rebuild: the run goes on to the same weights, or ends after three deaths."""

from pathlib import Path
from typing import Any

import pytest

from cauce.errors import WorkerError
from cauce.journal import Journal
from cauce.runtime.roles import LearnerWorker
from cauce.runtime.world import WorkerDied
from tests.local_session import LocalSession, Watcher, assert_equal_runs, dying, resume_locally, train_locally
from tests.runtime.straight_run import PLANS, ROWS, SHAPE, killed_run, told


@pytest.mark.parametrize(
    ("method", "call", "version"),
    [
        ("score", 3, 2),
        ("forward_backward", 3, 2),
        ("optim_step", 3, 2),
        ("checksum", 3, 2),
        ("publish", 3, 2),
        ("save_checkpoint", 2, 4),
        ("save_model", 1, 4),
    ],
)
def test_a_learner_that_dies_is_rebuilt_and_goes_on(
    local: type[LocalSession], straight: Path, tmp_path: Path, method: str, call: int, version: int
) -> None:
    run, watcher = tmp_path / "run", Watcher()
    death = WorkerDied("learner learner-0 on here died: SIGKILL")
    local.learner = dying(local.learner, method, call=call, error=death)
    summary = train_locally(straight.parent / "model", run, run__plans=PLANS, observer=watcher, **SHAPE)
    assert summary["status"] == "finished"
    assert_equal_runs(run, straight)
    assert local.started.count("learner") == 2
    assert told(watcher, "learner learner-0 on here died: SIGKILL")
    with Journal.read_only(run) as journal:
        assert [event.detail["version"] for event in journal.events("learner_died")] == [version]


def test_a_learner_that_dies_while_it_is_rebuilt_is_rebuilt_again(
    local: type[LocalSession], straight: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    death = WorkerDied("learner learner-0 on here died: SIGKILL")
    once = dying(local.learner, "optim_step", call=4, error=death)  # in plan 4, after the checkpoint of plan 2
    local.learner = dying(once, "load_checkpoint", call=1, error=death)
    assert train_locally(straight.parent / "model", run, run__plans=PLANS, **SHAPE)["status"] == "finished"
    assert_equal_runs(run, straight)
    assert local.started.count("learner") == 3
    with Journal.read_only(run) as journal:
        assert [event.detail["version"] for event in journal.events("learner_died")] == [3, 3]


def test_a_learner_that_cannot_be_started_in_place_of_another_is_a_death(
    local: type[LocalSession], straight: Path, tmp_path: Path
) -> None:
    class NoRoom(LearnerWorker):
        made = 0

        def __init__(self, **kwargs: Any) -> None:
            NoRoom.made += 1
            if NoRoom.made == 2:
                raise WorkerError("no node has room")
            super().__init__(**kwargs)

    run, watcher = tmp_path / "run", Watcher()
    death = WorkerDied("learner learner-0 on here died: SIGKILL")
    local.learner = dying(NoRoom, "optim_step", call=2, error=death)
    train_locally(straight.parent / "model", run, run__plans=PLANS, observer=watcher, **SHAPE)
    assert_equal_runs(run, straight)
    assert told(watcher, "no node has room")
    with Journal.read_only(run) as journal:
        assert [event.detail["cause"] for event in journal.events("learner_died")] == [str(death), "no node has room"]


def test_a_learner_that_dies_in_every_rebuild_ends_the_run(
    local: type[LocalSession], straight: Path, tmp_path: Path
) -> None:
    """Whether it is the first of a resumed run or one in place of another: three deaths at the same piece of work."""
    run = tmp_path / "run"
    killed_run(local, straight, run, "published, not checkpointed")

    class Dies(LearnerWorker):
        def status(self) -> dict[str, Any]:
            raise WorkerDied("learner learner-0 on here died: SIGKILL")

    local.learner = Dies
    before = local.started.count("learner")
    with pytest.raises(WorkerDied, match="SIGKILL"):
        resume_locally(run, rows=ROWS)
    assert local.started.count("learner") - before == 3
    local.learner = LearnerWorker
    assert resume_locally(run, rows=ROWS)["status"] == "finished"
    assert_equal_runs(run, straight)
