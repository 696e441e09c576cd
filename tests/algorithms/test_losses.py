"""The loss per token: clips, correction, masks and metrics, with numbers worked out by hand."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cauce.algorithms.advantages import make_batch, train_sequences
from cauce.algorithms.losses import policy_terms
from cauce.algorithms.reducers import aggregate
from cauce.algorithms.table import Algorithm
from tests.algorithms.cases import algorithm, plain_parts, rewards_group, scored_batch, step_loss

ALGORITHMS = ("grpo", "dr_grpo", "dapo", "rloo")


def terms(
    rules: Algorithm,
    *,
    logp: Sequence[float],
    advantage: Sequence[float],
    proximal: Sequence[float] | None = None,
    behaviour: Sequence[float] | None = None,
    reference: Sequence[float] | None = None,
    mask: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Loss per token, its derivative by logp, metric sums; proximal is the sampler unless given."""
    logp_N = torch.tensor(logp, dtype=dtype, requires_grad=True)

    def optional(values: Sequence[float] | None) -> Tensor | None:
        return None if values is None else torch.tensor(values, dtype=dtype)

    loss_N, metrics = policy_terms(
        rules,
        logp_N=logp_N,
        behaviour_N=torch.tensor(behaviour or proximal or logp, dtype=dtype),
        proximal_N=optional(proximal),
        reference_N=optional(reference),
        advantage_N=torch.tensor(advantage, dtype=dtype),
        mask_N=torch.tensor([1] * len(logp) if mask is None else mask, dtype=torch.uint8),
    )
    loss_N.sum().backward()
    assert logp_N.grad is not None
    return loss_N.detach(), logp_N.grad, {name: float(value) for name, value in metrics.items()}


def ratio_terms(rules: Algorithm, ratio: float, advantage: float) -> tuple[float, float, dict[str, float]]:
    loss_N, gradient_N, metrics = terms(rules, logp=[math.log(ratio)], proximal=[0.0], advantage=[advantage])
    return float(loss_N[0]), float(gradient_N[0]), metrics


def test_dual_clip_bounds_the_loss_of_a_negative_advantage() -> None:
    """A16, J2."""
    assert ratio_terms(algorithm(), 100.0, -1.0)[0] == pytest.approx(100.0)
    loss, gradient, metrics = ratio_terms(algorithm(dual_clip=3.0), 100.0, -1.0)
    assert loss == pytest.approx(3.0)
    assert gradient == 0.0
    assert metrics["clip_dual"] == 1
    assert ratio_terms(algorithm(dual_clip=10.0), 100.0, -1.0)[0] == pytest.approx(10.0)


def test_dual_clip_leaves_positive_advantages_alone() -> None:
    """A17."""
    loss, gradient, _ = ratio_terms(algorithm(dual_clip=3.0), 0.5, 1.0)
    assert loss == pytest.approx(-0.5)
    assert gradient == pytest.approx(-0.5)


def test_dapo_clips_higher_above_than_below() -> None:
    assert ratio_terms(algorithm("dapo"), 1.25, 1.0)[:2] == pytest.approx((-1.25, -1.25))
    assert ratio_terms(algorithm("grpo"), 1.25, 1.0)[:2] == pytest.approx((-1.2, 0.0))
    assert ratio_terms(algorithm("dapo"), 1.5, 1.0)[:2] == pytest.approx((-1.28, 0.0))
    assert ratio_terms(algorithm("dapo"), 0.5, -1.0)[:2] == pytest.approx((0.8, 0.0))


@pytest.mark.parametrize(
    ("ratio", "advantage", "low", "high"),
    [
        (0.5, 1.0, 0, 0),
        (0.5, -1.0, 1, 0),
        (1.5, 1.0, 0, 1),
        (1.5, -1.0, 0, 0),
        (0.5, 0.0, 0, 0),
        (1.0, 1.0, 0, 0),
    ],
)
def test_clip_metrics_count_lost_gradients_only(ratio: float, advantage: float, low: int, high: int) -> None:
    """J9."""
    _, gradient, metrics = ratio_terms(algorithm(), ratio, advantage)
    assert (metrics["clip_low"], metrics["clip_high"]) == (low, high)
    assert (gradient == 0.0) == bool(low or high or advantage == 0.0)


def test_first_step_has_a_ratio_of_one_and_a_policy_gradient() -> None:
    """The loss is minus the mean advantage, near 0 for a whole group; its gradient is not."""
    for name in ALGORITHMS:
        loss_N, gradient_N, metrics = terms(algorithm(name), logp=[-1.0, -4.6], advantage=[0.7, -0.7])
        assert metrics["ratio"] == 2.0
        assert loss_N.tolist() == [-0.7, 0.7]
        assert gradient_N.tolist() == pytest.approx([-0.7, 0.7])


def test_a_rare_sampled_end_token_has_a_ratio_of_one() -> None:
    """B10."""
    rare = math.log(0.01)
    _, _, metrics = terms(
        algorithm(), logp=[-0.3, rare], proximal=[-0.3, rare], behaviour=[-0.3, rare], advantage=[1.0, 1.0]
    )
    assert metrics["ratio"] == 2.0
    assert metrics["log_ratio_abs"] == 0.0


def test_the_sampler_is_corrected_for_and_never_clipped_against() -> None:
    at = {"logp": [-1.0, -1.0, -1.0], "advantage": [1.0, 1.0, 1.0], "behaviour": [-3.0, -1.0, -0.5]}
    for proximal in (None, [-1.0, -1.0, -1.0]):
        loss_N, gradient_N, metrics = terms(algorithm(correction="on"), proximal=proximal, **at)
        expected = [-2.0, -1.0, -math.exp(-0.5)]  # the first weight is exp(2), cut at the cap of 2
        assert loss_N.tolist() == pytest.approx(expected)
        assert gradient_N.tolist() == pytest.approx(expected)
        assert metrics["clip_low"] == metrics["clip_high"] == 0
        assert metrics["correction_capped"] == 1
        assert metrics["correction_weight"] == pytest.approx(3 + math.exp(-0.5))
        loss_N, _, metrics = terms(algorithm(correction="off"), proximal=proximal, **at)
        assert loss_N.tolist() == [-1.0, -1.0, -1.0]
        assert "correction_weight" not in metrics


def test_clip_acts_in_the_second_mini_batch() -> None:
    """A18. Proximal log-probs are those of the start of the plan, so the ratio moves from the second step on."""
    logp = torch.full((4,), -1.0, dtype=torch.float64, requires_grad=True)
    proximal, advantage = logp.detach().clone(), torch.tensor([1.0, 1.0, -1.0, -1.0])
    metrics = []
    for _ in range(2):
        loss_N, sums = policy_terms(
            algorithm(),
            logp_N=logp,
            behaviour_N=proximal,
            proximal_N=proximal,
            reference_N=None,
            advantage_N=advantage,
            mask_N=torch.ones(4),
        )
        logp.grad = None
        aggregate(
            loss_N, torch.ones(4), torch.arange(4), algorithm=algorithm(), num_tokens=4, num_sequences=4
        ).backward()
        with torch.no_grad():
            logp -= 2.0 * logp.grad
        metrics.append(sums)
    assert float(metrics[0]["ratio"]) == pytest.approx(4.0, abs=1e-5)
    assert abs(float(metrics[1]["ratio"]) - 4.0) > 0.1
    assert (float(metrics[1]["clip_low"]), float(metrics[1]["clip_high"])) == (2, 2)
    assert not logp.grad.any()


@pytest.mark.parametrize(
    ("aggregation", "total"),
    [("token_mean", 2.0), ("sequence_mean_token_mean", 2.0), ("sequence_mean_token_sum", 10.0)],
)
def test_policy_and_kl_are_averaged_alike(aggregation: str, total: float) -> None:
    """A5."""
    rules = algorithm(kl_coef=1.0, kl_estimator="k1", aggregation=aggregation)
    loss_N, _, metrics = terms(rules, logp=[-1.0] * 10, advantage=[-1.0] * 10, reference=[-2.0] * 10)
    assert metrics["policy_loss"] == metrics["kl_reference"] == pytest.approx(10.0)
    rows = [loss_N.tolist()[:1], loss_N.tolist()[1:]]
    assert plain_parts(rows, aggregation, [[0], [1]])[0] == pytest.approx(total)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
def test_a_kl_coefficient_changes_the_loss(name: str) -> None:
    """A13."""
    at = {"logp": [-1.0, -2.0], "advantage": [1.0, -1.0], "reference": [-2.0, -1.0]}
    without, with_kl = (terms(algorithm(name, kl_coef=coef), **at) for coef in (0.0, 0.5))
    assert not torch.equal(without[1], with_kl[1])
    in_reward = terms(algorithm(name, kl_coef=0.5, kl_in="reward"), **at)
    assert torch.equal(without[1], in_reward[1])  # there it acts through the advantage
    assert in_reward[2]["kl_reference"] > 0


def test_kl_in_the_loss_without_a_reference_raises() -> None:
    with pytest.raises(ValueError, match="reference_N"):
        terms(algorithm(kl_coef=0.5), logp=[-1.0], advantage=[1.0])


def test_equal_rewards_give_the_kl_gradient_or_none() -> None:
    """A12."""
    at = {"logp": [-1.0, -1.0], "advantage": [0.0, 0.0], "reference": [-2.0, -2.0]}
    loss_N, gradient_N, _ = terms(algorithm(), **at)
    assert not loss_N.any()
    assert not gradient_N.any()
    assert terms(algorithm(kl_coef=0.5), **at)[1].tolist() == pytest.approx([0.5, 0.5])


@pytest.mark.parametrize("name", ALGORITHMS)
def test_nan_under_the_mask_is_as_good_as_zero(name: str) -> None:
    """B5."""
    nan, kl = float("nan"), {} if name == "dapo" else {"kl_coef": 0.1}
    rules = algorithm(name, correction="on", **kl)
    got, clean = (
        terms(
            rules,
            logp=[-0.4, slot],
            proximal=[-0.5, slot],
            behaviour=[-0.6, slot],
            reference=[-0.7, slot],
            advantage=[1.0, slot],
            mask=[1, 0],
        )
        for slot in (nan, 0.0)
    )
    assert got[0].tolist() == clean[0].tolist()
    assert got[1].tolist() == clean[1].tolist()
    assert got[2] == clean[2]
    assert all(map(math.isfinite, got[2].values()))


@pytest.mark.parametrize("where", ["logp", "proximal", "behaviour", "reference", "advantage"])
def test_nan_in_a_trained_token_is_not_hidden(where: str) -> None:
    """B5."""
    values = {
        "logp": [-1.0],
        "proximal": [-1.0],
        "behaviour": [-1.0],
        "reference": [-1.0],
        "advantage": [1.0],
    }
    values[where] = [float("nan")]
    loss_N, _, _ = terms(algorithm(kl_coef=0.1, correction="on"), **values)
    assert loss_N.isnan().all()


NUMBERS = st.one_of(st.floats(-6, 0), st.sampled_from([float("nan"), float("inf"), -1e30]))
FIELDS = ("logp", "proximal", "behaviour", "reference", "advantage")


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_values_under_the_mask_change_nothing(data: st.DataObject) -> None:
    """B6."""
    size = data.draw(st.integers(1, 6))
    mask = data.draw(st.lists(st.integers(0, 1), min_size=size, max_size=size))
    values = {f: data.draw(st.lists(st.floats(-3, 0), min_size=size, max_size=size)) for f in FIELDS}
    other = {f: [v if m else data.draw(NUMBERS) for v, m in zip(values[f], mask, strict=True)] for f in FIELDS}
    rules = algorithm(kl_coef=0.2, correction="on", dual_clip=3.0)
    before, after = terms(rules, mask=mask, **values), terms(rules, mask=mask, **other)
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[1], after[1])
    assert before[2] == after[2]


def test_padding_changes_no_metric() -> None:
    """B6."""
    values = {
        "logp": [-1.0, -2.0],
        "proximal": [-1.5, -1.9],
        "advantage": [1.0, -1.0],
        "reference": [-1.1, -2.5],
    }
    padded = {f: [*v, *[-9.0] * 100] for f, v in values.items()}
    rules = algorithm(kl_coef=0.2, correction="on")
    _, _, plain = terms(rules, **values)
    assert terms(rules, mask=[1, 1] + [0] * 100, **padded)[2] == plain


def test_metrics_of_micro_batches_are_sums_and_not_means_of_means() -> None:
    one = terms(algorithm(), logp=[-1.0], behaviour=[-2.0], advantage=[0.0])[2]
    nine = terms(algorithm(), logp=[-1.0] * 9, behaviour=[-1.2] * 9, advantage=[0.0] * 9)[2]
    assert (one["log_ratio_abs"] + nine["log_ratio_abs"]) / 10 == pytest.approx(0.28)


def test_mean_ratio_of_an_unchanged_policy_is_one() -> None:
    """J7."""
    _, _, metrics = terms(
        algorithm(), logp=[-1.0, -2.0, -3.0, -4.0], proximal=[-1.0, -2.0, -3.0, -4.0], advantage=[1.0] * 4
    )
    assert metrics["ratio"] / 4 == 1.0


def test_shapes_that_would_broadcast_raise() -> None:
    column, row = torch.full((4, 1), -1.0), torch.full((4,), -1.0)
    for logp_N, behaviour_N in ((column, row), (row, column), (row, row[:2]), (row, row[:1])):
        with pytest.raises(ValueError, match="equal length"):
            policy_terms(
                algorithm(),
                logp_N=logp_N,
                behaviour_N=behaviour_N,
                proximal_N=None,
                reference_N=None,
                advantage_N=row,
                mask_N=torch.ones(4),
            )


def test_bf16_log_probs_are_computed_in_float32() -> None:
    """C5."""
    loss_N, _, _ = terms(
        algorithm(kl_coef=0.5),
        logp=[-1.0],
        proximal=[-1.25],
        reference=[-1.5],
        advantage=[-1.0],
        dtype=torch.bfloat16,
    )
    assert loss_N.dtype == torch.float32
    expected = math.exp(0.25) + 0.5 * (math.exp(-0.5) - 1 + 0.5)
    assert float(loss_N[0]) == pytest.approx(expected, rel=1e-6)


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_a_whole_step_does_not_depend_on_cut_or_order(data: st.DataObject) -> None:
    """A1, A6, A7. Sequences of several groups, interleaved and cut at random: loss, gradient and metrics stay."""
    rewards = data.draw(
        st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=2, max_size=4), min_size=1, max_size=3)
    )
    order_seed = data.draw(st.integers(0, 2**16))
    for name in ALGORITHMS:
        rules = algorithm(name, correction="on")
        groups = [rewards_group(task, values) for task, values in enumerate(rewards)]
        batch = make_batch(train_sequences(rules, scored_batch(*groups)))
        size = len(batch.sequences)
        generator = torch.Generator().manual_seed(order_seed)
        start = [torch.randn(2, generator=generator, dtype=torch.float64) * 0.3 - 1 for _ in range(size)]
        order = torch.randperm(size, generator=generator).tolist()
        cut = int(torch.randint(0, size + 1, (1,), generator=generator))
        results = []
        for parts in (None, [order[:cut], order[cut:]], [[i] for i in order]):
            logps = [row.clone().requires_grad_() for row in start]
            total, metrics = step_loss(rules, batch, logps, parts)
            total.backward()
            results.append((float(total.detach()), torch.stack([row.grad for row in logps]), metrics))
        for value, gradient, metrics in results[1:]:
            assert value == pytest.approx(results[0][0], abs=1e-12)
            np.testing.assert_allclose(gradient, results[0][1], rtol=1e-12, atol=1e-14)
            assert metrics == pytest.approx(results[0][2], abs=1e-10)
