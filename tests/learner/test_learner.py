"""The learner against a slow float64 step, and what may not change its gradient or its numbers."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from cauce.algorithms.advantages import make_batch, train_sequences
from cauce.errors import DataError
from cauce.learner.learner import Learner
from cauce.types import Batch
from tests.learner.cases import (
    algorithm,
    assert_close,
    float64_copy,
    gradients,
    group_of,
    loaded,
    random_sequences,
    sequence,
    settings,
    slow_logps,
)

AGGREGATIONS = ("token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "token_sum_constant")


@pytest.fixture(scope="module")
def learner_of(tmp_path_factory):
    """A new learner on a tiny model; the folders are made once per kind."""
    folders = {}

    def make(kind="llama", *, total_steps=10, temperature=1.0, row=None, config=None, **changes):
        key = (kind, *sorted((config or {}).items()))
        if key not in folders:
            folders[key] = tmp_path_factory.mktemp(kind) / "model"
        return Learner(
            loaded(folders[key], kind, **(config or {})),
            algorithm=row or algorithm(),
            settings=settings(**changes),
            temperature=temperature,
            total_steps=total_steps,
        )

    return make


def summed(learner):
    """The gradients that the next step would take."""
    return {name: g.clone() for name, g in learner._weights.named_gradients().items()}


def slow_loss(model, batch: Batch, row, temperature):
    """The loss written out one token at a time: clipped ratio to proximal, weight proximal / behaviour; KL
    with the value of k3 and the gradient of k2."""
    total = torch.zeros((), dtype=torch.float64)
    for made in batch.sequences:
        logps = slow_logps(model, made, temperature)
        trained = [t for t in range(len(made.token_ids)) if made.mask[t]]
        inner = torch.zeros((), dtype=torch.float64)
        for t in trained:
            logp, adv = logps[t], float(made.advantages[t])
            proximal = logp.detach() if made.proximal_logps is None else torch.tensor(float(made.proximal_logps[t]))
            ratio = (logp - proximal).exp()
            clipped = ratio.clamp(1 - row.clip_low, 1 + row.clip_high)
            cap = row.correction_cap
            behaviour = float(made.behaviour_logps[t])
            weight = min(cap, math.exp(float(proximal) - behaviour)) if cap else 1.0
            loss = -weight * torch.minimum(ratio * adv, clipped * adv)
            if row.kl_coef:
                gap = float(made.reference_logps[t]) - logp
                kl_weight = min(cap, math.exp(float(logp.detach()) - behaviour)) if cap else 1.0
                k3, k2 = (gap.exp() - gap - 1).detach(), gap.square() / 2
                loss = loss + row.kl_coef * kl_weight * (k3 + k2 - k2.detach())
            inner = inner + loss
        if not trained:
            continue
        total = (
            total
            + {
                "token_mean": inner / batch.num_tokens,
                "sequence_mean_token_mean": inner / len(trained) / batch.num_sequences,
                "sequence_mean_token_sum": inner / batch.num_sequences,
                "token_sum_constant": inner / row.aggregation_length / batch.num_sequences,
            }[row.aggregation]
        )
    return total


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize(("kind", "kl_coef", "cap"), [("llama_tied", 0.0, None), ("mistral", 0.3, 2.0)])
def test_loss_and_gradient_equal_a_slow_float64_loop(learner_of, aggregation, kind, kl_coef, cap):
    row = algorithm(aggregation=aggregation, kl_coef=kl_coef, correction_cap=cap)
    learner = learner_of(kind, row=row, temperature=0.8, token_budget=40)
    double = float64_copy(learner._model)
    batch = make_batch(random_sequences(11, longest=10, masked=True, scored=True))
    metrics = learner.forward_backward(batch)
    expected = slow_loss(double, batch, row, 0.8)
    expected.backward()
    assert metrics["loss/total"] == pytest.approx(expected.item(), abs=2e-5)
    without_kl = slow_loss(double, batch, replace(row, kl_coef=0.0), 0.8).item()
    assert metrics["loss/policy"] == pytest.approx(without_kl, abs=2e-5)
    assert_close(summed(learner), gradients(double), 5e-5)


@hypothesis_settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 100),
    budget=st.integers(1, 60),
    order=st.randoms(use_true_random=False),
    kind=st.sampled_from(["llama", "qwen2", "mistral", "gpt2"]),
    aggregation=st.sampled_from(AGGREGATIONS),
    compiled=st.booleans(),
    can_remake=st.booleans(),
)
def test_the_cut_changes_neither_loss_nor_gradient(
    learner_of, seed, budget, order, kind, aggregation, compiled, can_remake
):
    """A1, A7: nor does making activations again instead of cutting."""
    row = algorithm(aggregation=aggregation)
    sequences = random_sequences(seed, answers=4, masked=True)
    whole = learner_of(kind, row=row, compiled=compiled)
    expected = whole.forward_backward(make_batch(sequences))
    shuffled = list(sequences)
    order.shuffle(shuffled)
    cut = learner_of(kind, row=row, compiled=compiled, token_budget=budget)
    cut._can_remake &= can_remake
    found = cut.forward_backward(make_batch(shuffled))
    for name in expected.keys() - {"learner/packed_tokens"}:
        assert found[name] == pytest.approx(expected[name], abs=2e-5, rel=1e-4), name
    assert_close(summed(cut), summed(whole), 2e-5)


def test_several_calls_add_up_to_one_step(learner_of):
    """A1, A2."""
    # Two halves of a step, each with the counts of the whole: what two micro-batches, or two ranks, would do.
    batch = make_batch(random_sequences(12))
    whole, halves = learner_of(), learner_of()
    whole.forward_backward(batch)
    for part in (batch.sequences[:4], batch.sequences[4:]):
        halves.forward_backward(replace(batch, sequences=part))
    assert_close(summed(halves), summed(whole), 1e-5)


def test_what_the_mask_hides_changes_nothing(learner_of):
    """B5, B6."""
    clean = sequence(0, [1, 2, 3], [4, 5, 6, 7, 8], mask=np.array([1, 0, 0, 1, 0], np.uint8))
    hidden = clean.mask == 0
    dirty = replace(
        clean,
        advantages=np.where(hidden, np.nan, clean.advantages).astype(np.float32),
        behaviour_logps=np.where(hidden, np.nan, clean.behaviour_logps).astype(np.float32),
    )
    results = []
    for made in (clean, dirty):
        learner = learner_of()
        results.append((learner.forward_backward(make_batch([made])), summed(learner)))
    assert results[0][0] == results[1][0]
    assert_close(results[0][1], results[1][1], 0.0)
    # Hidden tokens are still context: another environment text gives another gradient ...
    other = learner_of()
    other.forward_backward(make_batch([replace(clean, token_ids=np.array([4, 99, 6, 7, 8], np.int32))]))
    assert not torch.equal(summed(other)["model.norm.weight"], results[0][1]["model.norm.weight"])
    # ... but what stands behind the last trained token cannot.
    behind = learner_of()
    behind.forward_backward(make_batch([replace(clean, token_ids=np.array([4, 5, 6, 7, 99], np.int32))]))
    assert_close(summed(behind), results[0][1], 0.0)


def test_groups_without_signal_are_skipped_but_count(learner_of):
    """A12."""
    sequences = random_sequences(13)
    silent = [replace(s, advantages=np.zeros_like(s.advantages)) if s.group == 1 else s for s in sequences]
    skipping = learner_of()
    metrics = skipping.forward_backward(make_batch(silent))
    assert metrics["learner/skipped_groups"] == 1
    assert metrics["learner/tokens"] == sum(len(s.token_ids) for s in sequences)
    # Forced through the model by a KL term of next to no weight, they give the same gradient.
    forced = learner_of(row=algorithm(kl_coef=1e-30))
    scored = [replace(s, reference_logps=s.behaviour_logps) for s in silent]
    through = forced.forward_backward(make_batch(scored))
    assert through["learner/skipped_groups"] == 0
    assert through["learner/packed_tokens"] > metrics["learner/packed_tokens"]
    assert through["loss/total"] == pytest.approx(metrics["loss/total"], abs=1e-6)
    assert_close(summed(skipping), summed(forced), 1e-5)
    # With a KL term that matters they must be run.
    kl = learner_of(row=algorithm(kl_coef=0.1)).forward_backward(make_batch(scored))
    assert kl["learner/skipped_groups"] == 0


def test_a_batch_without_any_signal_leaves_fresh_weights_alone(learner_of):
    learner = learner_of()
    before = learner.checksum()
    made = [replace(s, advantages=np.zeros_like(s.advantages)) for s in random_sequences(14)]
    metrics = learner.forward_backward(make_batch(made))
    assert metrics["learner/packed_tokens"] == 0
    assert "policy/entropy" not in metrics
    assert learner.optim_step()["optim/skipped"] == 0
    assert learner.checksum() == before


def test_metrics_are_means_over_tokens_of_the_whole_step(learner_of):
    """J6, J8: an entropy is between 0 and the logarithm of the vocabulary."""
    sequences = [sequence(0, [1, 2], [3]), sequence(1, [4, 5], list(range(10, 19)))]
    apart = [learner_of().forward_backward(make_batch([s]))["policy/entropy"] for s in sequences]
    together = learner_of(token_budget=1).forward_backward(make_batch(sequences))["policy/entropy"]
    assert together == pytest.approx((apart[0] + 9 * apart[1]) / 10, abs=1e-5)
    assert abs(apart[0] - apart[1]) > 1e-3  # else the mean of means would pass as well
    assert 0 <= together <= math.log(260)


def test_log_ratio_and_entropy_come_from_the_same_distribution_as_sampling(learner_of):
    """C1."""
    for temperature in (0.5, 1.0, 2.0):
        learner = learner_of(temperature=temperature)
        group = group_of(0, [1, 2, 3], [[4, 5, 6], [7, 8]])
        scored = learner.score([group], proximal=True)
        made = [
            replace(s, behaviour_logps=p)
            for s, p in zip(train_sequences(algorithm(), scored), scored.proximal_logps[0], strict=True)
        ]
        metrics = learner.forward_backward(make_batch(made))
        assert metrics["sampler/log_ratio_abs_mean"] < 1e-6
        assert metrics["policy/ratio_mean"] == pytest.approx(1.0, abs=1e-6)


def test_score_equals_the_slow_loop_and_zeroes_what_was_not_sampled(learner_of):
    """C1, C6."""
    mask = np.array([1, 0, 1, 1], np.uint8)
    groups = [
        group_of(3, [1, 2, 3], [[4, 5, 6, 7], [8, 9, 10, 11]], mask=mask),
        group_of(9, [12], [[13], []]),
    ]
    learner = learner_of("qwen2", row=algorithm(kl_coef=0.1), token_budget=5, temperature=0.7)
    double = float64_copy(learner._model)
    scored = learner.score(groups, proximal=True)
    for group, proximal, reference in zip(groups, scored.proximal_logps, scored.reference_logps, strict=True):
        for sample, logps, frozen in zip(group.samples, proximal, reference, strict=True):
            answer = sample.completion
            assert logps.shape == answer.token_ids.shape
            if len(answer.token_ids) == 0:
                continue
            made = sequence(group.task, group.prompt_ids, answer.token_ids)
            with torch.no_grad():
                expected = slow_logps(double, made, 0.7).numpy() * answer.mask
            np.testing.assert_allclose(logps, expected, atol=1e-5)
            np.testing.assert_array_equal(logps, frozen)  # no update yet
    assert learner.score(groups, proximal=False).proximal_logps is None


def test_the_reference_stays_while_the_policy_moves(learner_of):
    learner = learner_of(row=algorithm(kl_coef=0.1))
    groups = [group_of(0, [1, 2, 3], [[4, 5, 6], [7, 8, 9, 10]])]
    before = learner.score(groups, proximal=True)
    learner.forward_backward(make_batch(train_sequences(algorithm(kl_coef=0.1), before)))
    learner.optim_step()
    after = learner.score(groups, proximal=True)
    for k in range(2):
        np.testing.assert_array_equal(after.reference_logps[0][k], before.reference_logps[0][k])
        assert np.abs(after.proximal_logps[0][k] - before.proximal_logps[0][k]).max() > 1e-3


def test_ratio_leaves_one_in_the_second_mini_batch(learner_of):
    """A18."""
    groups = [group_of(task, [1, 2, task], [[4, 5, 6], [7, 8]]) for task in range(4)]
    learner = learner_of(lr=0.05)
    sequences = train_sequences(algorithm(), learner.score(groups, proximal=True))
    ratios, clipped = [], []
    for tasks in ((0, 1), (2, 3), (0, 1)):
        metrics = learner.forward_backward(make_batch([s for s in sequences if s.group in tasks]))
        learner.optim_step()
        ratios.append(metrics["policy/ratio_mean"])
        clipped.append(metrics["policy/clip_fraction_low"] + metrics["policy/clip_fraction_high"])
    assert ratios[0] == pytest.approx(1.0, abs=1e-5)
    assert abs(ratios[1] - 1.0) > 1e-2
    assert clipped[0] == 0
    assert clipped[2] > 0  # the second epoch over the same samples is held by the clip


@pytest.mark.parametrize("poison", ["behaviour", "advantage", "weights"])
def test_non_finite_numbers_reach_neither_weights_nor_moments(learner_of, poison):
    """G15."""
    row = algorithm(correction_cap=2.0)
    learner, witness = learner_of(row=row, lr=0.01), learner_of(row=row, lr=0.01)
    good = make_batch(random_sequences(15))
    for each in (learner, witness):
        each.forward_backward(good)
        assert each.optim_step()["optim/skipped"] == 0
    before = learner.checksum()
    bad = list(good.sequences)
    if poison == "weights":  # finite loss, infinite gradient
        name = next(iter(learner._weights.masters))
        learner.forward_backward(good)
        learner._weights.named_gradients()[name][0] = torch.inf
    else:
        field = {"behaviour": "behaviour_logps", "advantage": "advantages"}[poison]
        bad[4] = replace(bad[4], **{field: np.full_like(bad[4].advantages, np.nan)})
        metrics = learner.forward_backward(make_batch(bad))
        assert all(math.isfinite(value) for value in metrics.values())
    step = learner.optim_step()
    assert step["optim/skipped"] == 1
    assert step["optim/step"] == 1
    assert learner.checksum() == before
    assert learner.status()["skipped_steps"] == 1
    # What follows is as if the poisoned step had never been tried.
    for each in (learner, witness):
        each.forward_backward(good)
        each.optim_step()
    assert learner.checksum() == witness.checksum()


def test_dropout_is_off(learner_of):
    """C11."""
    config = {"attention_dropout": 0.3}
    learner = learner_of("llama", config=config)
    learner._model.train()  # as a careless caller might leave it
    gpt2 = learner_of("gpt2", config={"resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0.3})
    for each in (learner, gpt2):
        groups = [group_of(0, [1, 2, 3], [[4, 5, 6], [7, 8, 9]])]
        first, second = (each.score(groups, proximal=True) for _ in range(2))
        np.testing.assert_array_equal(first.proximal_logps[0][0], second.proximal_logps[0][0])
        metrics = each.forward_backward(make_batch(train_sequences(algorithm(), first)))
        assert metrics["policy/ratio_mean"] == pytest.approx(1.0, abs=1e-6)


def test_bf16_gradient_is_near_float32_and_masters_keep_small_updates(learner_of):
    batch = make_batch(random_sequences(16))
    exact, half = learner_of(), learner_of(dtype="bf16", lr=1e-6)
    exact.forward_backward(batch)
    half.forward_backward(batch)
    left = torch.cat([g.flatten() for g in summed(half).values()])
    right = torch.cat([g.flatten() for g in summed(exact).values()])
    assert float(torch.nn.functional.cosine_similarity(left, right, dim=0)) > 0.99
    assert float(left.norm() / right.norm()) == pytest.approx(1.0, abs=0.05)
    before = half.weights(torch.float32)["model.layers.0.self_attn.q_proj.weight"].clone()
    half.optim_step()
    after = half.weights(torch.float32)["model.layers.0.self_attn.q_proj.weight"]
    moved = (after - before).abs()
    assert 0 < float(moved.max()) < 1.1e-6  # far below bf16's step of these weights
    assert half._model.dtype == torch.bfloat16
    assert half._model.model.rotary_emb.inv_freq.dtype == torch.float32


def test_bf16_sums_do_not_depend_on_the_cut(learner_of):
    batch = make_batch(random_sequences(17, groups=6))
    found = []
    for budget in (10_000, 20):
        learner = learner_of(dtype="bf16", token_budget=budget)
        for _ in range(2):  # the second step overwrites the buffers of the first
            learner.forward_backward(batch)
            found.append(torch.cat([g.flatten() for g in summed(learner).values()]))
            learner._weights.zero_gradients()
    torch.testing.assert_close(found[0], found[1], atol=0, rtol=0)
    torch.testing.assert_close(found[2], found[3], atol=0, rtol=0)
    assert float((found[0] - found[2]).norm() / found[0].norm()) < 0.02


def test_weights_carry_tied_ones_once_and_in_the_dtype_asked_for(learner_of):
    learner = learner_of("llama_tied")
    weights = learner.weights(torch.bfloat16)
    assert "lm_head.weight" not in weights
    assert "model.embed_tokens.weight" in weights
    assert {t.dtype for t in weights.values()} == {torch.bfloat16}


def test_a_sequence_beyond_the_context_is_refused_not_cut(learner_of):
    learner = learner_of("gpt2", config={"n_positions": 16})
    with pytest.raises(DataError, match="17 tokens of prompt and answer, the model reads at most 16"):
        learner.forward_backward(make_batch([sequence(0, range(10), range(7))]))


def test_no_trained_token_at_all_is_a_loss_of_zero(learner_of):
    """A4."""
    made = sequence(0, [1, 2], [3, 4], mask=np.zeros(2, np.uint8))
    metrics = learner_of().forward_backward(make_batch([made]))
    assert metrics["loss/total"] == 0.0
    assert metrics["learner/tokens"] == 0
