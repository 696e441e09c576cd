"""Every algorithm, aggregation and KL against the slow reference, value and gradient, in float64."""

import itertools

import numpy as np
import pytest
import torch

from cauce.algorithms.advantages import group_advantages, make_batch, train_sequences
from cauce.algorithms.losses import policy_terms
from cauce.algorithms.table import Algorithm
from cauce.types import ScoredBatch
from tests.algorithms import slow_reference as slow
from tests.algorithms.cases import MAX_TOKENS, algorithm, group, sample, step_loss

AGGREGATIONS = ("token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "token_sum_constant")
ALGORITHMS = ("grpo", "dr_grpo", "dapo", "rloo")
NO_KL = (0.0, "k3", "loss")
KLS = [(0.3, k, place) for k in ("k1", "k2", "k3") for place in ("loss", "reward")]
# dapo has no KL term; test_table checks that it is refused.
CASES = [(name, kl) for name in ALGORITHMS for kl in (NO_KL, *KLS) if name != "dapo" or kl == NO_KL]


def slow_rules(rules: Algorithm) -> slow.Rules:
    return slow.Rules(
        advantage=rules.advantage,
        clip_low=rules.clip_low,
        clip_high=rules.clip_high,
        aggregation=rules.aggregation,
        constant_length=rules.aggregation_length,
        dual_clip=rules.dual_clip,
        kl_coef=rules.kl_coef,
        kl_estimator=rules.kl_estimator,
        kl_in=rules.kl_in,
        cap=rules.correction_cap,
    )


def random_answers(seed: int, *, has_proximal: bool) -> list[list[slow.Answer]]:
    """Groups of unequal sizes and lengths, with environment tokens; numbers that float32 holds exactly."""
    rng = np.random.default_rng(seed)

    def logps(near: np.ndarray, spread: float) -> np.ndarray:
        return (near + rng.normal(0, spread, len(near))).astype(np.float32).astype(np.float64)

    groups = []
    for size in (3, 2, 4):
        answers = []
        for _ in range(size):
            length = int(rng.integers(1, MAX_TOKENS))
            proximal = logps(np.full(length, -2.0), 0.7)
            mask = rng.random(length) < 0.8
            mask[0] = True
            answers.append(
                slow.Answer(
                    reward=float(np.float32(rng.normal())),
                    logp=logps(proximal, 0.6).tolist(),
                    behaviour=logps(proximal, 0.5).tolist(),
                    proximal=proximal.tolist() if has_proximal else None,
                    reference=logps(proximal, 0.4).tolist(),
                    mask=mask.astype(int).tolist(),
                )
            )
        groups.append(answers)
    return groups


def cauce_objective(
    rules: Algorithm, groups: list[list[slow.Answer]]
) -> tuple[float, list[list[float]], dict[str, float]]:
    """The same answers the whole way: scored batch, advantages, loss, aggregation, autograd."""
    records = [
        group(
            task,
            [sample(a.reward, task=task, index=i, logps=a.behaviour, mask=a.mask) for i, a in enumerate(g)],
        )
        for task, g in enumerate(groups)
    ]

    def parallel(field: str) -> tuple[tuple[np.ndarray, ...], ...]:
        return tuple(tuple(np.asarray(getattr(a, field), dtype=np.float32) for a in g) for g in groups)

    has_proximal = groups[0][0].proximal is not None
    scored = ScoredBatch(
        groups=tuple(records),
        proximal_logps=parallel("proximal") if has_proximal else None,
        reference_logps=parallel("reference") if rules.needs_reference else None,
    )
    batch = make_batch(train_sequences(rules, scored))
    logps = [torch.tensor(a.logp, dtype=torch.float64, requires_grad=True) for g in groups for a in g]
    total, metrics = step_loss(rules, batch, logps)
    total.backward()
    return float(total.detach()), [logp.grad.tolist() for logp in logps], metrics


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize(("name", "kl_choice"), CASES)
def test_equals_the_slow_reference(name: str, kl_choice: tuple[float, str, str], aggregation: str) -> None:
    kl = dict(zip(("kl_coef", "kl_estimator", "kl_in"), kl_choice, strict=True))
    for seed, (has_proximal, correction, dual_clip) in enumerate(
        itertools.product((False, True), ("off", "on"), (None, 1.5))
    ):
        rules = algorithm(name, aggregation=aggregation, correction=correction, dual_clip=dual_clip, **kl)
        answers = random_answers(seed, has_proximal=has_proximal)
        value, gradient, _ = cauce_objective(rules, answers)
        expected = slow.objective(answers, slow_rules(rules))
        # Advantages are float32 in the records; all else is float64.
        np.testing.assert_allclose(value, expected.value, rtol=3e-6, atol=1e-7)
        for row, expected_row in zip(gradient, expected.gradient, strict=True):
            np.testing.assert_allclose(row, expected_row, rtol=3e-6, atol=1e-8)


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("kl_estimator", ["k1", "k2", "k3"])
def test_token_loss_equals_the_slow_reference_to_the_last_digits(name: str, kl_estimator: str) -> None:
    kl = {} if name == "dapo" else {"kl_coef": 0.3, "kl_estimator": kl_estimator}
    rules = algorithm(name, correction="on", dual_clip=1.5, **kl)
    answers = [a for g in random_answers(11, has_proximal=True) for a in g]
    for answer, advantage in zip(answers, np.random.default_rng(5).normal(size=len(answers)), strict=True):
        answer.advantage = float(advantage)
        logp_N = torch.tensor(answer.logp, dtype=torch.float64, requires_grad=True)
        loss_N, _ = policy_terms(
            rules,
            logp_N=logp_N,
            behaviour_N=torch.tensor(answer.behaviour, dtype=torch.float64),
            proximal_N=torch.tensor(answer.proximal, dtype=torch.float64),
            reference_N=torch.tensor(answer.reference, dtype=torch.float64),
            advantage_N=torch.full((len(answer.logp),), answer.advantage, dtype=torch.float64),
            mask_N=torch.ones(len(answer.logp)),
        )
        loss_N.sum().backward()
        expected = [slow.token_loss(answer, t, slow_rules(rules)) for t in range(len(answer.logp))]
        np.testing.assert_allclose(loss_N.detach(), [e[0] for e in expected], rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(logp_N.grad, [e[1] for e in expected], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("kind", ["group_std", "group_mean", "leave_one_out"])
def test_advantages_equal_the_slow_reference(kind: str) -> None:
    rng = np.random.default_rng(3)
    for size in (2, 3, 8, 64):
        rewards = rng.normal(2.0, 3.0, size)
        np.testing.assert_allclose(
            group_advantages(rewards, kind), slow.advantages(rewards.tolist(), kind), rtol=1e-6, atol=1e-7
        )


def test_the_cases_reach_every_branch() -> None:
    """The random answers clip on both sides, hit the dual clip and the cap; else they would prove little."""
    rules = algorithm("dapo", correction="on", dual_clip=1.5)
    _, _, metrics = cauce_objective(rules, random_answers(7, has_proximal=True))
    assert all(metrics[name] > 0 for name in ("clip_low", "clip_high", "clip_dual", "correction_capped"))


def test_metric_sums_equal_a_loop() -> None:
    rules = algorithm("grpo", kl_coef=0.3, kl_estimator="k3", correction="on")
    groups = random_answers(9, has_proximal=True)
    _, _, metrics = cauce_objective(rules, groups)
    slow.objective(groups, slow_rules(rules))  # fills the advantages
    expected = dict.fromkeys(metrics, 0.0)
    for a in (a for g in groups for a in g):
        for t in (t for t, is_trained in enumerate(a.mask) if is_trained):
            ratio = np.exp(a.logp[t] - a.proximal[t])
            weight = np.exp(a.proximal[t] - a.behaviour[t])
            expected["ratio"] += ratio
            expected["log_ratio_abs"] += abs(a.logp[t] - a.behaviour[t])
            expected["kl_reference"] += slow.kl_estimate(a.logp[t], a.reference[t], "k3")
            expected["correction_weight"] += min(2.0, weight)
            expected["correction_capped"] += weight >= 2.0
            expected["clip_low"] += a.advantage < 0 and ratio < 0.8
            expected["clip_high"] += a.advantage > 0 and ratio > 1.2
            expected["policy_loss"] += slow.policy_token(
                a.logp[t], a.proximal[t], a.behaviour[t], a.advantage, slow_rules(rules)
            )[0]
    assert metrics == pytest.approx(expected, rel=1e-5)
