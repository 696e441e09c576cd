"""One plan behind the learner's verbs: what is asked in which order, and one number per name for the plan."""

from collections.abc import Sequence

import numpy as np
import pytest

from cauce.runtime.learn import learn, make_plan
from cauce.types import Batch, Group, Plan, ScoredBatch
from tests.algorithms.cases import algorithm, group, rewards_group, sample


class Listener:
    """Notes the verbs; its losses are scripted, one dictionary a step."""

    def __init__(self, steps: Sequence[dict[str, float]] = ()) -> None:
        self.verbs: list[object] = []
        self.batches: list[Batch] = []
        self.steps = list(steps)

    def score(self, groups: Sequence[Group], *, proximal: bool) -> ScoredBatch:
        self.verbs.append(("score", proximal))
        logps = tuple(tuple(s.completion.logps for s in g.samples) for g in groups) if proximal else None
        return ScoredBatch(groups=tuple(groups), proximal_logps=logps, reference_logps=None)

    def forward_backward(self, batch: Batch) -> dict[str, float]:
        self.verbs.append("forward_backward")
        self.batches.append(batch)
        return self.steps[len(self.batches) - 1] if self.steps else {}

    def optim_step(self) -> dict[str, float]:
        self.verbs.append("optim_step")
        return {"optim/skipped": 0.0, "optim/step": float(self.verbs.count("optim_step")), "optim/lr": 0.5}

    def checksum(self) -> str:
        return "x"


def test_a_plan_is_spelled_out() -> None:
    plan = make_plan(7, [5, 2, 9, 4], epochs=2, num_mini_batches=2)
    assert plan == Plan(number=7, tasks=(5, 2, 9, 4), mini_batches=((5, 2), (9, 4), (5, 2), (9, 4)))


def test_scored_once_then_a_step_for_each_mini_batch_of_its_own_tasks() -> None:
    """A3, A18: every step counts its own tokens, and old log-probs are those of the plan's start."""
    learner, groups = Listener(), [rewards_group(task, [0.0, 1.0]) for task in (3, 1, 2, 0)]
    learned = learn(
        learner,
        algorithm=algorithm(),
        plan=make_plan(1, [3, 1, 2, 0], epochs=2, num_mini_batches=2),
        groups=groups,
    )
    assert learner.verbs == [("score", True), *["forward_backward", "optim_step"] * 4]
    assert [[s.group for s in batch.sequences] for batch in learner.batches] == [[3, 3, 1, 1], [2, 2, 0, 0]] * 2
    assert [batch.num_tokens for batch in learner.batches] == [8] * 4
    assert all(s.proximal_logps is not None for batch in learner.batches for s in batch.sequences)
    assert (learned.num_steps, learned.num_skipped, learned.had_signal) == (4, 0, True)


def test_a_plan_of_one_step_needs_no_old_log_probs() -> None:
    learner = Listener()
    learn(
        learner,
        algorithm=algorithm(),
        plan=make_plan(1, [0], epochs=1, num_mini_batches=1),
        groups=[rewards_group(0, [0.0, 1.0])],
    )
    assert learner.verbs[0] == ("score", False)
    assert learner.batches[0].sequences[0].proximal_logps is None


@pytest.mark.parametrize("name", ["rloo", "dr_grpo"])
def test_kl_in_the_reward_compares_two_forwards_of_the_same_kind(name: str) -> None:
    """A9: the sampler's log-probs carry another rounding; against the reference they would make a KL of noise, and
    advantages out of equal rewards."""

    class Scoring(Listener):
        def score(self, groups: Sequence[Group], *, proximal: bool) -> ScoredBatch:
            exact = tuple(
                tuple(s.completion.logps + 1e-5 * (s.completion.index + 1) for s in g.samples) for g in groups
            )
            batch = super().score(groups, proximal=proximal)
            return ScoredBatch(groups=batch.groups, proximal_logps=exact if proximal else None, reference_logps=exact)

    learner = Scoring()
    learn(
        learner,
        algorithm=algorithm(name, kl_coef=0.1, kl_in="reward", kl_estimator="k1"),
        plan=make_plan(1, [0], epochs=1, num_mini_batches=1),
        groups=[rewards_group(0, [1.0, 1.0, 1.0])],
    )
    assert learner.verbs[0] == ("score", True)
    assert all((s.advantages == 0).all() for s in learner.batches[0].sequences)


def test_a_mini_batch_with_nothing_to_train_on_is_no_step() -> None:
    """A4: all masked; the other mini-batch is trained on."""
    cut = group(0, [sample(r, index=i, finish_reason="length") for i, r in enumerate([0.0, 1.0])])
    learner = Listener()
    learned = learn(
        learner,
        algorithm=algorithm(mask_truncated=True),
        plan=make_plan(1, [0, 1], epochs=1, num_mini_batches=2),
        groups=[cut, rewards_group(1, [0.0, 1.0])],
    )
    assert [[s.group for s in batch.sequences] for batch in learner.batches] == [[1, 1]]
    assert learned.num_steps == 1
    nothing = learn(
        learner,
        algorithm=algorithm(mask_truncated=True),
        plan=make_plan(1, [0], epochs=1, num_mini_batches=1),
        groups=[cut],
    )
    assert (nothing.num_steps, nothing.had_signal, nothing.metrics, nothing.first_log_ratio) == (0, False, {}, 0.0)


def test_metrics_of_a_plan_are_the_last_the_sum_or_the_mean_of_its_steps() -> None:
    steps = [
        {"loss/total": 1.0, "sampler/log_ratio_abs_mean": 0.25, "learner/tokens": 8.0, "learner/skipped_groups": 1.0},
        {"loss/total": 2.0, "sampler/log_ratio_abs_mean": 0.75, "learner/tokens": 4.0, "learner/skipped_groups": 0.0},
    ]
    learned = learn(
        Listener(steps),
        algorithm=algorithm(),
        plan=make_plan(1, [0, 1], epochs=1, num_mini_batches=2),
        groups=[rewards_group(0, [0.0, 1.0]), rewards_group(1, [0.0, 1.0])],
    )
    assert learned.metrics == {
        "loss/total": 1.5,
        "sampler/log_ratio_abs_mean": 0.5,
        "learner/tokens": 12.0,
        "learner/skipped_groups": 1.0,
        "optim/skipped": 0.0,
        "optim/step": 2.0,
        "optim/lr": 0.5,
    }
    assert learned.first_log_ratio == 0.25  # of the step before which nothing had moved


def test_a_metric_that_only_some_steps_have_is_one_of_the_plan() -> None:
    """The last step ran nothing, so that it has no entropy and no ratio; what the first one saw still counts."""
    learned = learn(
        Listener([{"policy/entropy": 2.0, "learner/peak_memory_mb": 9.0}, {"learner/peak_memory_mb": 7.0}]),
        algorithm=algorithm(),
        plan=make_plan(1, [0, 1], epochs=1, num_mini_batches=2),
        groups=[rewards_group(0, [0.0, 1.0]), rewards_group(1, [0.0, 1.0])],
    )
    assert (learned.metrics["policy/entropy"], learned.metrics["learner/peak_memory_mb"]) == (2.0, 9.0)


@pytest.mark.parametrize("skipped", [1, 2])
def test_refused_steps_are_counted(skipped: int) -> None:
    """G15."""

    class Guarded(Listener):
        def optim_step(self) -> dict[str, float]:
            metrics = super().optim_step()
            return {**metrics, "optim/skipped": float(self.verbs.count("optim_step") <= skipped)}

    learned = learn(
        Guarded(),
        algorithm=algorithm(),
        plan=make_plan(1, [0, 1], epochs=1, num_mini_batches=2),
        groups=[rewards_group(task, [0.0, 1.0]) for task in (0, 1)],
    )
    assert (learned.num_steps, learned.num_skipped) == (2 - skipped, skipped)
    assert learned.metrics["optim/skipped"] == skipped


def test_groups_are_matched_by_task_and_not_by_position() -> None:
    """A10."""
    learner = Listener()
    learn(
        learner,
        algorithm=algorithm(),
        plan=make_plan(1, [4, 8], epochs=1, num_mini_batches=2),
        groups=[rewards_group(8, [0.0, 2.0]), rewards_group(4, [1.0, 0.0])],
    )
    assert [[s.group for s in batch.sequences] for batch in learner.batches] == [[4, 4], [8, 8]]
    signs = [[float(np.sign(s.advantages[0])) for s in batch.sequences] for batch in learner.batches]
    assert signs == [[1.0, -1.0], [-1.0, 1.0]]
