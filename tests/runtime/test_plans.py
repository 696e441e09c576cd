"""What plans are made of in whole runs without Ray: rows in order, mini-batches, freshness, reuse, the numbers told."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cauce.algorithms.advantages import train_sequences
from cauce.algorithms.table import resolve
from cauce.errors import RecipeError
from cauce.journal import Journal
from cauce.recipe.models import AlgorithmSettings
from cauce.runtime.roles import LearnerWorker
from cauce.stages import rl
from cauce.types import ScoredBatch
from tests.local_session import (
    ROWS,
    LocalSession,
    answers,
    checksums,
    letters,
    train_locally,
    trained_rows,
)
from tests.runtime.plan_record import equal, groups, plans, poisoned, rewards


def test_the_record_is_what_the_recipe_asks_for(local: type[LocalSession], tiny: Path, tmp_path: Path) -> None:
    """G2, D9: rows in the order of the data, each once; epochs over mini-batches; one optimizer step each."""
    run = tmp_path / "run"
    settings = {"data__shuffle": False, "learner__mini_batches": 2, "learner__epochs": 2, "learner__tasks_per_plan": 4}
    train_locally(tiny, run, run__plans=2, **settings)
    assert trained_rows(run) == [[f"train:{i}" for i in range(4)], [f"train:{i}" for i in range(4, 8)]]
    first, second = plans(run)
    assert first.plan.mini_batches == ((0, 1), (2, 3), (0, 1), (2, 3))
    assert (first.metrics["optim/step"], second.metrics["optim/step"]) == (4, 8)
    assert first.metrics["policy/ratio_mean"] != pytest.approx(1.0, abs=1e-4)  # A18: the mean of four steps, not of one
    assert rl.replay(run).divergent_plan is None


def test_every_mini_batch_is_clipped_against_the_start_of_the_plan(
    local: type[LocalSession], tiny: Path, tmp_path: Path
) -> None:
    """A18: the ratio is 1 in the first step of a plan and differs from 1 in the later ones."""
    seen: list[float] = []

    class Listening(LearnerWorker):
        def forward_backward(self, **kwargs: Any) -> dict[str, float]:
            metrics = super().forward_backward(**kwargs)
            seen.append(metrics["policy/ratio_mean"])
            return metrics

    local.learner = Listening
    train_locally(tiny, tmp_path / "run", run__plans=2, learner__epochs=2, learner__lr=0.05)
    assert seen[0] == pytest.approx(1.0, abs=1e-5)
    assert seen[2] == pytest.approx(1.0, abs=1e-5)
    assert abs(seen[1] - 1.0) > 1e-3
    assert abs(seen[3] - 1.0) > 1e-3


def test_dynamic_sampling_replaces_groups_without_signal(local: type[LocalSession], tiny: Path, tmp_path: Path) -> None:
    """D10: three rows of equal rewards are dropped, and every group of every plan has variance and an advantage."""

    def some(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        return equal(completions) if answer[0] in ("0", "2", "3") else letters(completions)

    run = tmp_path / "run"
    shape = {"data__shuffle": False, "algorithm__dynamic_sampling": True}
    train_locally(tiny, run, reward=some, **shape)
    assert trained_rows(run) == [["train:1", "train:4"], ["train:5", "train:6"], ["train:7", "train:8"]]
    algorithm = resolve(AlgorithmSettings(), max_tokens=4, correction_needed=False)
    for number in (1, 2, 3):
        for group in groups(run, number):
            assert np.std(rewards(group)) > 0
            scored = ScoredBatch(groups=(group,), proximal_logps=None, reference_logps=None)
            assert any(sequence.advantages.any() for sequence in train_sequences(algorithm, scored))
    with Journal.read_only(run) as journal:
        assert journal.drops() == {"no_signal": 3}
    assert [record.metrics["reward/zero_variance_fraction"] for record in plans(run)] == [0, 0, 0]
    assert plans(run)[0].metrics["rollout/dropped_no_signal"] == 3


def test_fewer_rows_than_a_plan_holds_come_again(local: type[LocalSession], tiny: Path, tmp_path: Path) -> None:
    """F1: three rows, plans of four: the rows go round, the plans are full, and every plan trains."""
    run = tmp_path / "run"
    summary = train_locally(tiny, run, rows=ROWS[:3], learner__tasks_per_plan=4, data__shuffle=False)
    assert summary["status"] == "finished"
    assert trained_rows(run)[:2] == [
        ["train:0", "train:1", "train:2", "train:0"],
        ["train:1", "train:2", "train:0", "train:1"],
    ]
    assert len(set(checksums(run))) == 3
    first, *_, last = groups(run, 1)  # the same row twice in one plan is two tasks with samples of their own
    assert [s.completion.token_ids.tolist() for s in first.samples] != [
        s.completion.token_ids.tolist() for s in last.samples
    ]


def test_counts_that_do_not_divide_are_refused_before_anything_starts(
    local: type[LocalSession], tiny: Path, tmp_path: Path
) -> None:
    """F14: with the numbers in it."""
    with pytest.raises(RecipeError, match=r"tasks_per_plan = 10.*mini_batches = 4.*2 left over"):
        train_locally(tiny, tmp_path / "run", learner__tasks_per_plan=10, learner__mini_batches=4)
    assert local.started == []
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("actors", [2, 4])
def test_the_number_of_actors_changes_nothing(
    local: type[LocalSession], tiny: Path, tmp_path: Path, actors: int
) -> None:
    """D13, D14, F14: five prompts on two or four actors; the samples differ within a group, and not between runs."""
    one, many, other = (tmp_path / name for name in ("one", "many", "other"))
    train_locally(tiny, one, run__plans=2, learner__tasks_per_plan=5)
    train_locally(tiny, many, run__plans=2, learner__tasks_per_plan=5, rollout__actors=actors)
    assert sum(name.startswith("rollout") for name in local.started) == 1 + actors
    assert answers(one) == answers(many)
    assert checksums(one) == checksums(many)
    assert len({answers(one)[0, index] for index in range(4)}) > 1
    train_locally(tiny, other, run__plans=2, learner__tasks_per_plan=5, run__seed=1)
    assert answers(other)[0, 0] != answers(one)[0, 0]


@pytest.mark.parametrize("max_staleness", [1, 2])
def test_no_plan_trains_on_samples_older_than_the_bound(
    local: type[LocalSession], tiny: Path, tmp_path: Path, max_staleness: int
) -> None:
    run = tmp_path / "run"
    train_locally(tiny, run, run__plans=6, buffer__max_staleness=max_staleness)
    ages = []
    for number in range(1, 7):
        oldest = min(int(s.completion.versions.min()) for g in groups(run, number) for s in g.samples)
        ages.append(number - 1 - oldest)
    assert max(ages) == max_staleness  # it does overlap, and never more than it may
    assert [record.metrics["staleness/max"] for record in plans(run)] == ages
    assert rl.replay(run).divergent_plan is None


def test_weights_are_published_every_n_plans(local: type[LocalSession], tiny: Path, tmp_path: Path) -> None:
    """Engines serve version 2 until version 4 is there; what they sample in between is never too old."""
    published: list[int] = []

    class Listening(LearnerWorker):
        def publish(self, **kwargs: Any) -> str:
            published.append(kwargs["version"])
            return super().publish(**kwargs)

    local.learner = Listening
    run = tmp_path / "run"
    train_locally(tiny, run, run__plans=6, weights__every=2, buffer__max_staleness=1)
    assert {0, 2, 4} <= set(published)
    assert not {1, 3} & set(published)
    versions = {int(v) for n in range(1, 7) for g in groups(run, n) for s in g.samples for v in s.completion.versions}
    assert versions == {0, 2, 4}
    assert max(record.metrics["staleness/max"] for record in plans(run)) <= 1


def test_engines_serve_what_the_learner_published(local: type[LocalSession], tiny: Path, tmp_path: Path) -> None:
    """D1: on policy, by log-probs and by content, at every plan; fp32 on both sides."""
    run = tmp_path / "run"
    train_locally(tiny, run, learner__lr=0.05)
    assert all(record.metrics["sampler/log_ratio_abs_mean"] < 1e-4 for record in plans(run))
    assert [int(groups(run, n)[0].samples[0].completion.versions[0]) for n in (1, 2, 3)] == [0, 1, 2]


def test_groups_that_are_used_twice_leave_room_in_the_buffer(
    local: type[LocalSession], tiny: Path, tmp_path: Path
) -> None:
    """D11: with reuse a plan needs fewer new tasks than a version allows, and they arrive at once; no task is used
    more than twice, or beyond its staleness, and some are used twice."""
    run = tmp_path / "run"
    train_locally(tiny, run, run__plans=8, buffer__max_reuse=2, buffer__max_staleness=1)
    uses = Counter(task for record in plans(run) for task in record.plan.tasks)
    assert set(uses.values()) <= {1, 2}
    assert 2 in uses.values()
    assert max(record.metrics["staleness/max"] for record in plans(run)) <= 1
    assert rl.replay(run).divergent_plan is None


def test_tasks_of_a_skipped_plan_are_not_used_again(local: type[LocalSession], tiny: Path, tmp_path: Path) -> None:
    """D11, G15: the record ends them, so the buffer must not offer the use they had left."""
    run = tmp_path / "run"
    local.learner = poisoned(1)  # the first use of its tasks
    shape = {"run__plans": 5, "buffer__max_reuse": 2, "buffer__max_staleness": 1}
    assert train_locally(tiny, run, **shape)["status"] == "finished"
    assert [record.state for record in plans(run)] == ["skipped", "applied", "applied", "applied", "applied"]
    skipped = set(plans(run)[0].plan.tasks)
    assert not skipped & {task for record in plans(run)[1:] for task in record.plan.tasks}


def test_the_reward_metric_is_what_the_function_returned_whatever_kl_is(
    local: type[LocalSession], tiny: Path, tmp_path: Path
) -> None:
    """J11, A13: KL in the reward changes the weights and not what is reported as reward."""
    plain, with_kl = tmp_path / "plain", tmp_path / "kl"
    shape = {"run__plans": 2, "learner__lr": 0.05, "algorithm__advantage_scale": "none"}
    train_locally(tiny, plain, **shape)
    train_locally(tiny, with_kl, algorithm__kl_coef=0.5, algorithm__kl_in="reward", **shape)
    for run in (plain, with_kl):
        for number, record in enumerate(plans(run), start=1):
            returned = [value for group in groups(run, number) for value in rewards(group)]
            assert record.metrics["reward/mean"] == pytest.approx(float(np.mean(returned)))
    # In plan 1 policy and reference agree, so that KL is 0 everywhere; in plan 2 it acts.
    assert plans(plain)[0].metrics["loss/total"] == pytest.approx(plans(with_kl)[0].metrics["loss/total"], abs=1e-6)
    assert checksums(plain)[1] != checksums(with_kl)[1]
