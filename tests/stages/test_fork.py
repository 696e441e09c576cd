"""A fork: the same samples under other settings of the learning, from any plan of a record, without generating."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cauce import checkpoint
from cauce.errors import JournalError, RecipeError
from cauce.journal import Journal
from cauce.runtime.forked import effective_sample_size
from cauce.runtime.roles import LearnerWorker, RolloutWorker
from cauce.stages import rl
from cauce.stages.fork import fork, why_not
from cauce.types import Completion, Group, Outcome, Sample, ScoredBatch
from tests.local_session import (
    Killed,
    LocalSession,
    Watcher,
    answers,
    checksums,
    dying,
    resume_locally,
    train_locally,
    trained_rows,
    use_local_session,
)
from tests.tiny import tiny_model

PLANS = 4
SAME = "algorithm.correction=off"  # what "auto" came to for a source in fp32 throughout
OTHER = ["learner.lr=0.003"]


class NoEngine(RolloutWorker):
    """There is nothing to generate in a fork."""

    def __init__(self, **kwargs: Any) -> None:
        raise AssertionError("a rollout worker was started")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    with pytest.MonkeyPatch.context() as patch:
        use_local_session(patch)
        model = tiny_model(folder / "model")
        train_locally(model, folder / "run", run__plans=PLANS, checkpoint__every=2, learner__schedule="linear")
    return folder / "run"


@pytest.fixture
def local(local: type[LocalSession]) -> type[LocalSession]:
    local.rollout = NoEngine
    return local


def forked(source: Path, folder: Path, at: int, *settings: str, **given: Any) -> Path:
    fork(source, at=at, overrides=[f"run.dir={folder}", "run.name=fork", *settings], **given)
    return folder / "fork"


def metric(run: Path, name: str) -> list[float]:
    with Journal.read_only(run) as journal:
        return [r.metrics[name] for r in journal.plans(from_number=journal.forked_at + 1)]


@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_a_fork_that_changes_nothing_is_its_source_bit_for_bit(
    local: type[LocalSession], source: Path, tmp_path: Path, at: int
) -> None:
    """From the initial weights, from a checkpoint, and from plans whose checkpoint is gone; with a schedule."""
    watcher = Watcher()
    fork(source, at=at, overrides=[f"run.dir={tmp_path}", "run.name=fork", SAME], observer=watcher)
    run = tmp_path / "fork"
    assert checksums(run) == checksums(source)
    assert trained_rows(run) == trained_rows(source)
    assert answers(run) == answers(source)
    again = [note for note in watcher.notes if "are trained again" in note]
    assert again == ([f"{source} keeps no checkpoint of plan {at}: plans {at} to {at} are trained again"] * (at % 2))
    assert sorted(watcher.plans) == list(range(at + 1, PLANS + 1))
    assert metric(run, "optim/lr") == metric(source, "optim/lr")[at:]
    with Journal.read_only(run) as journal:
        counts = journal.counts()
        assert counts == {**dict.fromkeys(counts, 0), "trained": 2 * PLANS}


def test_other_settings_on_the_same_samples(local: type[LocalSession], source: Path, tmp_path: Path) -> None:
    run = forked(source, tmp_path, 1, "learner.lr=0.05", "algorithm.name=dr_grpo", "algorithm.aggregation=token_mean")
    assert trained_rows(run) == trained_rows(source)
    assert checksums(run)[:1] == checksums(source)[:1]
    assert all(a != b for a, b in zip(checksums(run)[1:], checksums(source)[1:], strict=True))
    share = metric(run, "sampler/effective_sample_size")
    assert share[0] == pytest.approx(1.0, abs=1e-6)  # its first plan is on policy
    assert 0 < share[2] < share[0]
    assert metric(run, "staleness/max") == [0, 1, 2]
    assert all(0 < mean <= 2 for mean in metric(run, "sampler/correction_mean"))  # the correction is on
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["plans"], summary["num_plans"]) == ("finished", 3, 3)
    assert "algorithm.name: 'grpo' -> 'dr_grpo'" in summary["fork"]["fork_changes"]
    assert (run / "model" / "model.safetensors").is_file()
    with Journal.read_only(run) as journal, Journal.read_only(source) as other:
        assert journal.meta["forked_run"] == other.meta["run_id"] != journal.meta["run_id"]
        assert journal.meta["lineage"] != other.meta["lineage"]
        assert [event.kind for event in journal.events()] == ["forked", "started", "learner_ready", "ended"]
        assert journal.events("forked")[0].detail["source"] == str(source)


def test_plans_are_cut_anew_where_the_fork_says_so(local: type[LocalSession], source: Path, tmp_path: Path) -> None:
    run = forked(source, tmp_path, 2, "learner.mini_batches=2", "learner.epochs=2")
    with Journal.read_only(run) as journal:
        shapes = [[len(batch) for batch in record.plan.mini_batches] for record in journal.plans()]
    assert shapes == [[2], [2], [1, 1, 1, 1], [1, 1, 1, 1]]
    assert metric(run, "optim/step") == [6, 10]
    with pytest.raises(RecipeError, match="cannot be divided evenly"):
        forked(source, tmp_path / "odd", 2, "learner.mini_batches=3")


def test_a_kl_term_has_the_first_weights_as_its_reference(
    local: type[LocalSession], source: Path, tmp_path: Path
) -> None:
    run = forked(source, tmp_path, 2, "algorithm.kl_coef=0.1")
    assert metric(run, "policy/kl_reference")[0] > 0  # plan 2's weights are not those of plan 0


def test_killed_anywhere_a_fork_resumes_to_the_same_weights(
    local: type[LocalSession], source: Path, tmp_path: Path
) -> None:
    straight = forked(source, tmp_path / "a", 1, *OTHER)
    local.learner = dying(LearnerWorker, "checksum", call=3, after=True)  # the first is the redo of plan 1
    with pytest.raises(Killed):
        forked(source, tmp_path / "b", 1, *OTHER, "checkpoint.every=1")
    local.learner = LearnerWorker
    run = tmp_path / "b" / "fork"
    with Journal.read_only(run) as journal:
        assert [record.state for record in journal.plans()] == ["applied", "applied", "planned", "planned"]
    summary = resume_locally(run, rows=None, reward=None)
    assert summary["status"] == "finished"
    assert checksums(run) == checksums(straight)
    result = rl.replay(run)
    assert (result.plans, result.divergent_plan, result.after) == (3, None, 1)


def test_the_checkpoint_that_a_fork_began_with_is_never_pruned(
    local: type[LocalSession], source: Path, tmp_path: Path
) -> None:
    """G17: and of its own, the newest ones stay."""
    run = forked(source, tmp_path, 1, *OTHER, "checkpoint.every=1", "checkpoint.keep=1")
    assert list(checkpoint.complete(run)) == [1, 4]
    shutil.rmtree(run / "checkpoints" / "plan_000004")
    assert resume_locally(run, rows=None, reward=None)["status"] == "finished"
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(JournalError, match=r"was forked from .* after plan 1, and the checkpoint of that plan is gone"):
        rl.replay(run)


def test_a_fork_outlives_its_source_and_can_be_forked(local: type[LocalSession], source: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(source, moved)
    first = forked(moved, tmp_path / "a", 2, *OTHER)
    shutil.rmtree(moved)
    assert rl.replay(first).divergent_plan is None
    second = forked(first, tmp_path / "b", 3, SAME)
    assert checksums(second)[:3] == checksums(first)[:3]
    assert metric(second, "optim/lr") == metric(first, "optim/lr")[1:]
    with pytest.raises(RecipeError, match=r"--at 1: .* give a plan from 2 to 3"):
        forked(first, tmp_path / "c", 1)


def test_the_source_is_only_read_and_may_be_live(local: type[LocalSession], source: Path, tmp_path: Path) -> None:
    local.rollout = RolloutWorker
    live = tmp_path / "live"
    with pytest.raises(Killed):
        train_locally(source.parent / "model", live, run__plans=PLANS, observer=Watcher(kill_after=3))
    local.rollout = NoEngine
    with Journal.open(live) as journal:
        before = journal.counts(), checksums(live), len(journal.events())
        run = forked(live, tmp_path, 1, *OTHER)
        assert (journal.counts(), checksums(live), len(journal.events())) == before
        journal.event("still", {"mine": 1})
    assert len(checksums(run)) == 3
    with Journal.read_only(run) as journal:
        assert journal.counts()["trained"] == 6
        assert set(journal.drops()) <= {"run_complete"}


def test_what_needs_generation_is_refused_with_words(source: Path, tmp_path: Path) -> None:
    for setting, why in {
        "rollout.temperature=0.5": "a fork generates none",
        "rollout.actors=2": "a fork generates none",
        "engine.dtype=bf16": "a fork generates none",
        "data.train=x.jsonl": "others would need answers",
        "model.path=x": "weights that a fork begins with",
        "reward.fn=x.py:y": "outcomes are recorded",
        "learner.tasks_per_plan=4": "with the groups they hold",
        "algorithm.dynamic_sampling=true": "which groups were planned is recorded",
        "buffer.max_staleness=2": "which groups a plan takes is recorded",
        "run.seed=3": "sampled and ordered by it",
        "eval.every=1": "an evaluation generates",
    }.items():
        with pytest.raises(RecipeError, match=rf"^{setting.split('=')[0]}: a fork cannot change it: .*{why}"):
            forked(source, tmp_path, 1, setting)
    with pytest.raises(RecipeError, match=r"learner\.lr\?"):
        forked(source, tmp_path, 1, "learner.lrr=3")
    for at in (-1, 4, 9):
        with pytest.raises(RecipeError, match=rf"--at {at}: .* recorded plans 1 to 4 .* from 0 to 3"):
            forked(source, tmp_path, at)
    assert list(tmp_path.iterdir()) == []
    assert why_not("learner.lr") == why_not("run.plans") == ""


def test_fewer_plans_and_what_a_resume_of_a_fork_refuses(
    local: type[LocalSession], source: Path, tmp_path: Path
) -> None:
    run = forked(source, tmp_path, 1, "run.plans=3", *OTHER)
    assert len(checksums(run)) == 3
    with Journal.read_only(run) as journal:
        assert journal.counts()["trained"] == 6
        assert journal.drops() == {"run_complete": 2}
    with pytest.raises(RecipeError, match="a fork has the plans that it was made with"):
        rl.changed_recipe(run, ["run.plans=4"])
    with pytest.raises(RecipeError, match=r"cauce fork .*/fork --at PLAN --set learner\.lr=0\.5"):
        rl.changed_recipe(run, ["learner.lr=0.5"])


def scored(*log_ratios: float) -> ScoredBatch:
    size = len(log_ratios)
    completion = Completion(
        task=0,
        index=0,
        attempt=1,
        token_ids=np.zeros(size + 1, np.int32),
        logps=np.zeros(size + 1, np.float32),
        versions=np.zeros(size + 1, np.int32),
        mask=np.asarray([1] * size + [0], np.uint8),  # the last token is an environment's
        finish_reason="stop",
    )
    outcome = Outcome(status="scored", value=1.0, parts={}, detail="")
    group = Group(task=0, prompt_ids=np.zeros(1, np.int32), samples=(Sample(completion=completion, outcome=outcome),))
    logps = np.asarray([*log_ratios, 50.0], np.float32)
    return ScoredBatch(groups=(group,), proximal_logps=((logps,),), reference_logps=None)


def test_effective_sample_size_by_hand() -> None:
    assert effective_sample_size(scored(0.0, 0.0, 0.0)) == 1.0
    assert effective_sample_size(scored(-3.0, -3.0)) == pytest.approx(1.0)  # a common factor says nothing
    # Weights 1 and 3: 16 / (2 * 10).
    assert effective_sample_size(scored(0.0, math.log(3.0))) == pytest.approx(0.8)
    assert effective_sample_size(scored(0.0, 0.0, 0.0, 800.0)) == pytest.approx(0.25)
