"""Train, resume and replay: run folders, what a resume may change, whose record it is, and how a run ends."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from cauce.errors import DataError, FencedError, ModelError, RecipeError, WorkerError
from cauce.journal import Journal
from cauce.recipe.load import load_resolved
from cauce.runtime.roles import LearnerWorker
from cauce.stages import rl
from tests.local_session import (
    ROWS,
    Killed,
    LocalSession,
    Watcher,
    checksums,
    letters,
    local_recipe,
    resume_locally,
    train_locally,
)
from tests.runtime.test_recovery import falsify
from tests.tiny import tiny_model


def summary_of(run: Path) -> dict[str, Any]:
    return json.loads((run / "summary.json").read_text())


def test_a_run_folder_that_is_named_is_never_written_into_twice(
    local: type[LocalSession], tiny: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    train_locally(tiny, run, run__plans=1)
    before = checksums(run)
    with pytest.raises(RecipeError, match=r"exists already. Go on with it by `cauce resume .*/run`"):
        train_locally(tiny, run, run__plans=1)
    assert checksums(run) == before


def test_unnamed_runs_are_called_after_the_recipe_and_the_time(
    local: type[LocalSession], tiny: Path, tmp_path: Path
) -> None:
    recipe = local_recipe(tiny, tmp_path / "run", run__plans=1, run__name="")
    runs = [Path(rl.train(recipe, name="mine", rows=ROWS, reward=letters)["run"]) for _ in range(2)]
    assert len(set(runs)) == 2
    assert all(run.name.startswith("mine-2") and run.parent == tmp_path for run in runs)
    assert load_resolved(runs[0]) == recipe


def test_two_runs_of_one_recipe_are_the_same_run(local: type[LocalSession], tiny: Path, tmp_path: Path) -> None:
    """D13: same seed, same run; bit for bit."""
    for name in ("one", "two"):
        train_locally(tiny, tmp_path / name)
    assert checksums(tmp_path / "one") == checksums(tmp_path / "two")


# What a resume may change


def test_runtime_settings_may_change_and_others_may_not(local: type[LocalSession], tiny: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train_locally(tiny, run, run__plans=1)
    changed = rl.changed_recipe(run, ["rollout.actors=3", "checkpoint.keep=5", "run.plans=2"])
    assert (changed.rollout.actors, changed.checkpoint.keep, changed.run.plans) == (3, 5, 2)
    for override in ("learner.lr=1", "rollout.group_size=8", "algorithm.name=rloo", "run.seed=3"):
        key = override.split("=")[0]
        with pytest.raises(RecipeError, match=rf"cannot go on with other settings that shape its weights: {key}"):
            rl.changed_recipe(run, [override])


def test_more_plans_go_on_where_the_run_ended(local: type[LocalSession], tiny: Path, tmp_path: Path) -> None:
    run, straight = tmp_path / "run", tmp_path / "straight"
    train_locally(tiny, run, run__plans=2)
    summary = resume_locally(run, overrides=["run.plans=4"])
    assert (summary["status"], summary["plans"]) == ("finished", 4)
    assert load_resolved(run).run.plans == 4
    train_locally(tiny, straight, run__plans=4)
    assert checksums(run) == checksums(straight)


def test_more_plans_are_refused_where_they_would_bend_the_learning_rate(
    local: type[LocalSession], tiny: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    train_locally(tiny, run, run__plans=2, learner__schedule="linear")
    with pytest.raises(RecipeError, match=r"run\.plans: 2 -> 4 \(learner\.schedule='linear'"):
        rl.changed_recipe(run, ["run.plans=4"])
    assert rl.changed_recipe(run, ["rollout.actors=2"]).run.plans == 2


def test_resuming_a_run_that_is_over_changes_nothing(local: type[LocalSession], tiny: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train_locally(tiny, run)
    before = checksums(run), (run / "model" / "model.safetensors").read_bytes()
    assert resume_locally(run)["status"] == "finished"
    assert (checksums(run), (run / "model" / "model.safetensors").read_bytes()) == before


# Whose record it is


def test_another_model_under_an_old_record_is_refused(local: type[LocalSession], tmp_path: Path) -> None:
    """G6: the folder that the recipe names holds another model now; nothing of the run is touched."""
    run, model = tmp_path / "run", tiny_model(tmp_path / "model")
    train_locally(model, run, run__plans=2)
    before = checksums(run)
    tiny_model(model, seed=9)
    with pytest.raises(RecipeError, match=r"model\.path is not what this run began with.* digest \w{12}, .*\w{12}"):
        resume_locally(run)
    with pytest.raises(RecipeError, match=r"model\.path"):
        rl.changed_recipe(run, [f"model.path={tiny_model(tmp_path / 'other', hidden=64)}"])
    assert checksums(run) == before


def test_other_data_under_an_old_record_is_refused(local: type[LocalSession], tiny: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train_locally(tiny, run, run__plans=2)
    with pytest.raises(RecipeError, match=r"data\.train is not what this run began with"):
        resume_locally(run, rows=ROWS[1:])


def test_a_reward_given_in_python_must_be_given_again(local: type[LocalSession], tiny: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train_locally(tiny, run, run__plans=2)
    with pytest.raises(RecipeError, match=r"Trainer\.resume\('.*run', reward=\.\.\.\)"):
        resume_locally(run, reward=None)


def test_a_live_owner_is_not_disturbed(local: type[LocalSession], tiny: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(Killed):
        train_locally(tiny, run, observer=Watcher(kill_after=1))
    with Journal.open(run), pytest.raises(FencedError):
        resume_locally(run)


# How a run ends


class Broken(LearnerWorker):
    """Cannot even be made."""

    def __init__(self, **kwargs: Any) -> None:
        raise WorkerError("learner learner-0 on here died: ValueError: x")


def test_an_error_of_the_setup_ends_the_run_at_once_and_is_its_status(
    local: type[LocalSession], tiny: Path, tmp_path: Path
) -> None:
    """H1: no second try, the cause in the exception and in summary.json, and the end is told."""
    run, watcher = tmp_path / "run", Watcher()
    local.learner = Broken
    with pytest.raises(WorkerError, match="ValueError: x"):
        train_locally(tiny, run, observer=watcher)
    assert local.started.count("learner") == 1
    assert (summary_of(run)["status"], summary_of(run)["plans"]) == ("failed", 0)
    assert "ValueError: x" in summary_of(run)["failure"]
    assert watcher.ends[0]["failure"] == summary_of(run)["failure"]


def test_a_failure_in_mid_run_leaves_a_run_that_goes_on(local: type[LocalSession], tiny: Path, tmp_path: Path) -> None:
    calls = []

    def fails_later(completions: list[Any], **_: Any) -> list[float]:
        calls.append(len(completions))
        if len(calls) == 5:
            return [0.0]  # one value for four answers
        return letters(completions)

    run = tmp_path / "run"
    with pytest.raises(Exception, match="returned 1 values for 4 completions"):
        train_locally(tiny, run, reward=fails_later)
    assert summary_of(run)["status"] == "failed"
    assert len(checksums(run)) == 2
    assert resume_locally(run)["status"] == "finished"
    assert summary_of(run)["status"] == "finished"


def test_prompts_that_are_all_too_long_are_an_error_and_no_success(
    local: type[LocalSession], tiny: Path, tmp_path: Path
) -> None:
    """C18, F1: nothing is left to train on."""
    run = tmp_path / "run"
    with pytest.raises(DataError, match="every one of the 40 prompts has more than 5 tokens"):
        train_locally(tiny, run, data__max_prompt_tokens=5)
    assert summary_of(run)["status"] == "failed"
    assert not (run / "model").exists()


def test_rows_that_are_too_long_are_dropped_with_a_count(local: type[LocalSession], tiny: Path, tmp_path: Path) -> None:
    """C18: eight of sixteen rows; the others make up the plans."""
    rows = [{"prompt": ("x" * 300 if i % 2 else "x") + str(i), "answer": "1"} for i in range(16)]
    summary = train_locally(tiny, tmp_path / "run", rows=rows, run__plans=4)
    assert summary["drops"]["too_long"] >= 4
    assert (summary["status"], summary["tasks"]["trained"]) == ("finished", 8)


def test_a_replay_of_a_live_run_disturbs_nothing(local: type[LocalSession], tiny: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(Killed):
        train_locally(tiny, run, observer=Watcher(kill_after=2))
    before = (run / "journal.db").stat().st_size
    with Journal.open(run) as journal:
        assert rl.replay(run) == rl.ReplayResult(plans=2, divergent_plan=None, until=2)
        journal.event("still", {"mine": 1})
    assert (run / "journal.db").stat().st_size >= before


def test_the_final_model_can_be_trained_on(local: type[LocalSession], tiny: Path, tmp_path: Path) -> None:
    """G14: what a run leaves is what a run takes."""
    first = train_locally(tiny, tmp_path / "first", run__plans=1)
    again = train_locally(Path(first["run"]) / "model", tmp_path / "second", run__plans=1)
    assert again["status"] == "finished"
    with pytest.raises(ModelError):
        train_locally(tmp_path / "first" / "payloads", tmp_path / "third", run__plans=1)


# What a person asks afterwards


def test_words_for_what_a_resume_refuses(local: type[LocalSession], tiny: Path, tmp_path: Path) -> None:
    """A setting of the learning leads to a fork, one of the samples to a new run."""
    run = tmp_path / "run"
    train_locally(tiny, run, run__plans=1)
    with pytest.raises(RecipeError, match=r"cauce fork .*/run --at PLAN --set learner\.lr=1\.0$"):
        rl.changed_recipe(run, ["learner.lr=1"])
    with pytest.raises(RecipeError, match=r"For another rollout\.group_size start a new run$"):
        rl.changed_recipe(run, ["rollout.group_size=8", "learner.lr=1"])
    text = (run / "recipe.toml").read_text()
    (run / "recipe.toml").write_text(text.replace("lr = 0.01", "lr = 0.02"))
    with pytest.raises(RecipeError, match=r"put these settings back.*--set learner\.lr=0\.02$"):
        rl.changed_recipe(run, [])


def test_a_live_change_is_an_event(local: type[LocalSession], tiny: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train_locally(tiny, run, run__plans=1)
    resume_locally(run, overrides=["run.plans=2", "checkpoint.keep=3"])
    with Journal.read_only(run) as journal:
        assert [e.detail for e in journal.events("settings")] == [
            {"changed": "run.plans: 1 -> 2; checkpoint.keep: 2 -> 3"}
        ]
        assert [e.kind for e in journal.events() if e.kind in ("started", "ended")] == ["started", "ended"] * 2
        assert [e.detail["status"] for e in journal.events("ended")] == ["finished", "finished"]


def test_rows_given_in_python_need_not_be_given_again(local: type[LocalSession], tiny: Path, tmp_path: Path) -> None:
    run, straight = tmp_path / "run", tmp_path / "straight"
    odd = [{**row, "level": i / 3, "tags": ("a", {"b": None})} for i, row in enumerate(ROWS)]
    with pytest.raises(Killed):
        train_locally(tiny, run, rows=odd, test_rows=ROWS[:3], observer=Watcher(kill_after=1))
    assert rl.resume(run, reward=letters)["status"] == "finished"
    train_locally(tiny, straight, rows=odd, test_rows=ROWS[:3])
    assert checksums(run) == checksums(straight)
    assert (run / "eval" / "after.jsonl").read_text() == (straight / "eval" / "after.jsonl").read_text()
    (run / "data" / "test.jsonl").unlink()
    (run / "data" / "train.jsonl").unlink()
    with pytest.raises(RecipeError, match=r"Trainer\.resume\('.*/run', reward=\.\.\., data=\.\.\., test=\.\.\.\)"):
        rl.resume(run)


def test_a_replay_of_some_plans_narrows_a_difference(local: type[LocalSession], tiny: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train_locally(tiny, run, run__plans=6, checkpoint__every=2, checkpoint__keep=3)
    falsify(run, 3)
    whole = rl.replay(run)
    assert (whole.divergent_plan, whole.plans, whole.after, whole.until) == (3, 3, 0, 6)  # it ends there
    before, after = rl.replay(run, until_plan=2), rl.replay(run, from_plan=4)
    assert (before.divergent_plan, before.plans, before.after) == (None, 2, 0)
    assert (after.divergent_plan, after.after) == (3, 2)  # checkpoint 2 is the newest before plan 4
    later = rl.replay(run, from_plan=5, until_plan=5)
    assert (later.divergent_plan, later.plans, later.after) == (None, 1, 4)
    for wrong in ({"from_plan": 7}, {"until_plan": 7}, {"from_plan": 4, "until_plan": 3}):
        with pytest.raises(RecipeError, match="has the plans 1 to 6 to replay"):
            rl.replay(run, **wrong)
    with Journal.open(run) as journal:
        recorded = json.loads(journal.meta["fingerprint"])
        journal.set_meta("fingerprint", json.dumps({**recorded, "threads": "64"}))
    assert rl.replay(run).other_numerics == (f"threads 64 in the record, {recorded['threads']} here",)


def test_a_checkpoint_that_the_record_does_not_know_is_not_gone_on_from(
    local: type[LocalSession], tiny: Path, tmp_path: Path
) -> None:
    """G16: the learner's files are of plan 4, the record ends with plan 2; both go on from plan 2."""
    run, longer = tmp_path / "run", tmp_path / "longer"
    train_locally(tiny, longer, run__plans=4)
    with pytest.raises(Killed):
        train_locally(tiny, run, run__plans=4, checkpoint__every=2, observer=Watcher(kill_after=3))
    shutil.copytree(longer / "checkpoints" / "plan_000004", run / "checkpoints" / "plan_000004")
    watcher = Watcher()
    resume_locally(run, observer=watcher)
    assert any("1 plans after checkpoint plan_000002 were trained again" in note for note in watcher.notes)
    assert checksums(run) == checksums(longer)


def test_exactly_the_newest_checkpoints_stay_after_resumes(
    local: type[LocalSession], tiny: Path, tmp_path: Path
) -> None:
    """G17: keep 2, resumed twice."""
    run = tmp_path / "run"
    train_locally(tiny, run, run__plans=3, checkpoint__every=1, checkpoint__keep=2)
    for plans in (4, 6):
        resume_locally(run, overrides=[f"run.plans={plans}"])
        kept = [plans - 1, plans]
        assert sorted(f.name for f in (run / "checkpoints").iterdir()) == [f"plan_{plan:06d}" for plan in kept]
        with Journal.read_only(run) as journal:
            assert [record.plan for record in journal.checkpoints()] == kept
