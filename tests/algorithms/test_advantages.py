"""Advantages, who counts in a group, and the counts of a batch, with numbers worked out by hand."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cauce.algorithms.advantages import (
    carries_signal,
    group_advantages,
    make_batch,
    train_sequences,
    untrainable_groups,
)
from cauce.errors import TrainingStopped
from cauce.types import Group, ScoredBatch
from tests.algorithms.cases import algorithm, first_advantages, group, rewards_group, sample, scored_batch

KINDS = ("group_std", "group_mean", "leave_one_out")


def advantages_of(*groups: Group, name: str = "grpo", **overrides: object) -> list[float]:
    return first_advantages(train_sequences(algorithm(name, **overrides), scored_batch(*groups)))


def test_standard_deviation_is_that_of_a_sample() -> None:
    """A12."""
    np.testing.assert_allclose(group_advantages([1, 0, 0, 0], "group_std"), [1.5, -0.5, -0.5, -0.5], rtol=1e-6)


def test_centred_and_leave_one_out() -> None:
    np.testing.assert_allclose(group_advantages([1, 0, 0, 0], "group_mean"), [0.75, -0.25, -0.25, -0.25])
    np.testing.assert_allclose(group_advantages([1, 0, 0, 0], "leave_one_out"), [1, -1 / 3, -1 / 3, -1 / 3])


def test_statistics_are_per_group_and_not_over_the_batch() -> None:
    """A8."""
    root = 0.5**0.5
    got = advantages_of(rewards_group(1, [0, 1]), rewards_group(2, [10, 11]))
    np.testing.assert_allclose(got, [-root, root, -root, root], rtol=1e-6)


def test_every_answer_feeds_the_statistics() -> None:
    """A9."""
    got = np.asarray(advantages_of(rewards_group(1, [0, 1, 1, 0])), dtype=np.float64)
    rewards = np.asarray([0.0, 1.0, 1.0, 0.0])
    assert abs(got.sum()) < 1e-5
    np.testing.assert_allclose(got, (rewards - rewards.mean()) / rewards.std(ddof=1), atol=1e-5)


def test_uneven_groups_and_a_group_of_one() -> None:
    """A10."""
    np.testing.assert_allclose(group_advantages([1, 0, 0], "group_std"), [1.1547, -0.5774, -0.5774], atol=1e-4)
    with pytest.warns(UserWarning, match="group of one"):
        assert group_advantages([5], "group_std").tolist() == [0.0]
    alone = rewards_group(2, [5])
    got = train_sequences(algorithm(), scored_batch(rewards_group(1, [1, 0, 0]), alone))
    assert [s.group for s in got] == [1, 1, 1]
    assert untrainable_groups(algorithm(), [rewards_group(1, [1, 0, 0]), alone]) == (2,)


@pytest.mark.parametrize("kind", KINDS)
def test_near_zero_variance_does_not_explode(kind: str) -> None:
    """A11."""
    rewards = np.asarray([0.0] + [0.95] * 7, dtype=np.float32)
    assert np.abs(group_advantages(rewards, kind)).max() < 10
    nearly = np.asarray([0.95 + 1e-5] + [0.95] * 7, dtype=np.float32)
    assert np.abs(group_advantages(nearly, kind)).max() < 10


def test_rounding_of_equal_rewards_is_no_signal() -> None:
    assert group_advantages([0.1 + 0.2, 0.3, 0.3, 0.3], "group_std").tolist() == [0.0] * 4
    assert group_advantages([1e-9, 0, 0, 0], "group_std")[0] == pytest.approx(1.5)  # small is not noise


@pytest.mark.parametrize("kind", KINDS)
def test_a_constant_added_to_every_reward_changes_nothing(kind: str) -> None:
    """A11."""
    rewards = np.asarray([0, 1, 1, 1], dtype=np.float32)
    moved = group_advantages(rewards + np.float32(1e4), kind)
    np.testing.assert_allclose(moved, group_advantages(rewards, kind), atol=1e-2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [0.0, 1.0, 0.95, -1e6, 0.1 + 0.2])
def test_equal_rewards_give_exactly_zero(kind: str, value: float) -> None:
    """A12."""
    assert group_advantages([value] * 7, kind).tolist() == [0.0] * 7


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=2, max_size=16))
def test_advantages_are_centred_and_bounded(rewards: list[float]) -> None:
    size = len(rewards)
    scale = max(map(abs, rewards)) + 1e-30
    for kind in KINDS:
        got = group_advantages(rewards, kind).astype(np.float64)
        assert np.isfinite(got).all()
        assert abs(got.sum()) <= 1e-5 * size * (1 if kind == "group_std" else scale)
        if kind == "group_std":
            assert np.abs(got).max() <= (size - 1) / size**0.5 * (1 + 1e-6)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_order_of_groups_and_answers_does_not_matter(data: st.DataObject) -> None:
    rewards = data.draw(
        st.lists(st.lists(st.sampled_from([0.0, 0.25, 1.0, 7.0]), min_size=2, max_size=5), min_size=1, max_size=4)
    )
    groups = [rewards_group(task, values) for task, values in enumerate(rewards)]
    shuffled = [group(g.task, data.draw(st.permutations(g.samples))) for g in data.draw(st.permutations(groups))]
    for name in ("grpo", "dr_grpo", "rloo"):
        before, after = (
            {
                (s.group, int(s.token_ids[0])): float(s.advantages[0])
                for s in train_sequences(algorithm(name), scored_batch(*gs))
            }
            for gs in (groups, shuffled)
        )
        assert before.keys() == after.keys()
        assert all(after[key] == pytest.approx(value, rel=1e-6, abs=1e-7) for key, value in before.items())


@pytest.mark.parametrize("status", ["failed", "timed_out", "abstained"])
def test_an_answer_without_a_score_leaves_statistics_and_loss(status: str) -> None:
    """E5."""
    samples = [sample(r, index=i) for i, r in enumerate([1.0, 0.0, 0.0])]
    lost = sample(None, index=3, status=status)
    got = train_sequences(algorithm(), scored_batch(group(0, [*samples[:2], lost, samples[2]])))
    assert [int(s.token_ids[0]) for s in got] == [
        0,
        100,
        200,
    ]  # answer 3 is gone, the others keep their order
    np.testing.assert_allclose(first_advantages(got), [1.1547, -0.5774, -0.5774], atol=1e-4)


def test_an_aborted_answer_is_never_trained_on() -> None:
    """E7."""
    samples = [sample(1.0), sample(0.0, index=1), sample(9.0, index=2, finish_reason="aborted")]
    assert advantages_of(group(0, samples)) == pytest.approx([0.5**0.5, -(0.5**0.5)])


@pytest.mark.parametrize("rewards", [[None, None], [1.0, None], [None, None, None, 0.5], []])
def test_fewer_than_two_scored_answers_give_no_sequences(rewards: list[float | None]) -> None:
    bad = rewards_group(4, rewards)
    assert train_sequences(algorithm(), scored_batch(bad)) == ()
    assert untrainable_groups(algorithm(), [bad]) == (4,)


@pytest.mark.parametrize("other", [100.0, 1.0, -3.0])
def test_a_masked_truncated_answer_does_not_shift_the_others(other: float) -> None:
    """A4, B7."""
    samples = [sample(1.0), sample(0.0, index=1), sample(other, index=2, finish_reason="length")]
    got = train_sequences(algorithm(mask_truncated=True), scored_batch(group(0, samples)))
    assert first_advantages(got)[:2] == pytest.approx([0.5**0.5, -(0.5**0.5)])
    assert got[2].mask.tolist() == [0, 0]
    assert not got[2].advantages.any()
    batch = make_batch(got)
    assert (batch.num_tokens, batch.num_sequences) == (4, 2)
    unmasked = make_batch(train_sequences(algorithm(), scored_batch(group(0, samples))))
    assert (unmasked.num_tokens, unmasked.num_sequences) == (6, 3)


def test_a_truncated_group_of_one_left_gives_no_sequences() -> None:
    samples = [sample(1.0), sample(0.0, index=1, finish_reason="length")]
    assert train_sequences(algorithm(mask_truncated=True), scored_batch(group(0, samples))) == ()
    assert len(train_sequences(algorithm(), scored_batch(group(0, samples)))) == 2


def test_sampled_tokens_pass_through_unchanged() -> None:
    """B10, C12. A cut-off answer gets no end-of-sequence token; a sampled one keeps its log-probability."""
    ended = sample(1.0, logps=[-0.5, -4.6])
    cut = sample(0.0, index=1, logps=[-0.5, -0.7, -0.9], finish_reason="length")
    for source, got in zip(
        (ended, cut), train_sequences(algorithm(), scored_batch(group(0, [ended, cut]))), strict=True
    ):
        np.testing.assert_array_equal(got.token_ids, source.completion.token_ids)
        np.testing.assert_array_equal(got.behaviour_logps, source.completion.logps)
        np.testing.assert_array_equal(got.mask, source.completion.mask)


def test_the_stop_token_carries_the_advantage_and_nothing_comes_behind_it() -> None:
    """B8: the reward reaches the end-of-sequence token itself; there is no pad, and no token is added where none was
    sampled."""
    stop = 257
    ended, cut = sample(1.0, logps=[-0.5] * 3), sample(0.0, index=1, logps=[-0.5] * 3, finish_reason="length")
    ended = replace(ended, completion=replace(ended.completion, token_ids=np.asarray([5, 6, stop], np.int32)))
    first, second = train_sequences(algorithm(), scored_batch(group(0, [ended, cut])))
    assert first.token_ids.tolist() == [5, 6, stop]
    assert first.advantages.tolist() == pytest.approx([0.5**0.5] * 3)
    assert first.mask.tolist() == [1, 1, 1]
    assert stop not in second.token_ids
    assert len(second.advantages) == 3


def test_counts_are_of_trained_tokens_and_of_sequences_that_have_one() -> None:
    samples = [
        sample(1.0, logps=[-1.0] * 3, mask=[1, 0, 1]),
        sample(0.0, index=1, logps=[-1.0] * 2, mask=[0, 0]),
        sample(0.0, index=2, logps=[-1.0] * 4),
    ]
    batch = make_batch(train_sequences(algorithm(), scored_batch(group(0, samples))))
    assert (batch.num_tokens, batch.num_sequences, len(batch.sequences)) == (6, 2, 3)


def test_kl_in_the_reward_is_summed_over_trained_tokens_before_the_statistics() -> None:
    """A13."""
    samples = [
        sample(1.0, logps=[-1.2, -1.0], mask=[1, 1]),  # k1: -0.5 + 1.0 = 0.5
        sample(1.0, index=1, logps=[-1.2, -9.0], mask=[1, 0]),  # k1: -0.5, the second token is not ours
    ]
    reference = ((np.float32([-0.7, -2.0]), np.float32([-0.7, np.nan])),)
    batch = ScoredBatch(groups=(group(0, samples),), proximal_logps=None, reference_logps=reference)
    rules = algorithm("rloo", kl_coef=0.1, kl_in="reward", kl_estimator="k1")
    # Rewards 1 - 0.05 and 1 + 0.05; each is compared with the other.
    assert first_advantages(train_sequences(rules, batch)) == pytest.approx([-0.1, 0.1], rel=1e-5)


def test_kl_in_the_reward_takes_the_proximal_policy_where_it_was_scored() -> None:
    samples = [sample(0.0, logps=[-1.0]), sample(0.0, index=1, logps=[-1.0])]
    batch = ScoredBatch(
        groups=(group(0, samples),),
        proximal_logps=((np.float32([-1.0]), np.float32([-2.0])),),
        reference_logps=((np.float32([-1.0]), np.float32([-1.0])),),
    )
    rules = algorithm("rloo", kl_coef=1.0, kl_in="reward", kl_estimator="k1")
    assert first_advantages(train_sequences(rules, batch)) == pytest.approx([-1.0, 1.0])


def test_signal_is_a_difference_of_rewards_whatever_the_reference_says() -> None:
    equal, unequal = rewards_group(1, [1, 1]), rewards_group(2, [0, 1])
    for rules in (algorithm(), algorithm("rloo", kl_coef=0.1, kl_in="reward"), algorithm(kl_coef=0.1)):
        assert not carries_signal(rules, [equal])
        assert carries_signal(rules, [equal, unequal])
    assert not carries_signal(algorithm(), [])


def test_a_group_of_equal_rewards_still_counts_in_the_denominator() -> None:
    """A12."""
    sequences = train_sequences(algorithm(), scored_batch(rewards_group(1, [1, 1]), rewards_group(2, [0, 1])))
    assert make_batch(sequences).num_tokens == 8


@pytest.mark.parametrize("where", ["behaviour", "proximal", "reference"])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_non_finite_log_prob_of_a_trained_token_raises(where: str, value: float) -> None:
    """B5."""

    def scored(mask: list[int]) -> ScoredBatch:
        rows = {name: [[-1.0, -1.0], [-1.0, -1.0]] for name in ("behaviour", "proximal", "reference")}
        rows[where][1][1] = value
        samples = [
            sample(1.0, task=3, logps=rows["behaviour"][0]),
            sample(0.0, task=3, index=1, logps=rows["behaviour"][1], mask=mask),
        ]
        proximal, reference = (tuple(map(np.float32, rows[name])) for name in ("proximal", "reference"))
        return ScoredBatch(groups=(group(3, samples),), proximal_logps=(proximal,), reference_logps=(reference,))

    with pytest.raises(TrainingStopped, match=f"task 3, answer 1: {where} log-probability of trained token 1"):
        train_sequences(algorithm(kl_coef=0.1), scored([1, 1]))
    assert len(train_sequences(algorithm(kl_coef=0.1), scored([1, 0]))) == 2


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_non_finite_reward_raises(value: float) -> None:
    with pytest.raises(TrainingStopped, match="task 5, answer 1: reward"):
        train_sequences(algorithm(), scored_batch(rewards_group(5, [0.0, value])))
    with pytest.raises(ValueError, match="finite"):
        group_advantages([0.0, value], "group_mean")


def test_log_probs_that_do_not_fit_their_answers_raise() -> None:
    """B14, C7."""
    two = rewards_group(1, [0, 1])
    short = ScoredBatch(groups=(two,), proximal_logps=((np.float32([-1.0]), np.float32([-1.0])),), reference_logps=None)
    with pytest.raises(ValueError, match="unequal lengths"):
        train_sequences(algorithm(), short)
    missing = ScoredBatch(groups=(two,), proximal_logps=((np.float32([-1.0, -1.0]),),), reference_logps=None)
    with pytest.raises(ValueError, match="parallel to groups and samples"):
        train_sequences(algorithm(), missing)
    with pytest.raises(ValueError, match="reference_logps"):
        train_sequences(algorithm(kl_coef=0.1), scored_batch(two))
