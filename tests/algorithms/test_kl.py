"""KL estimators: values worked out by hand, and gradients by enumerating every outcome of a small policy."""

import numpy as np
import pytest
import torch
from torch import Tensor

from cauce.algorithms.kl import kl_term, kl_value
from cauce.algorithms.losses import policy_terms
from tests.algorithms.cases import algorithm

ESTIMATORS = ("k1", "k2", "k3")
LOGITS = torch.tensor([0.3, -0.8, 1.1], dtype=torch.float64)
REFERENCE = torch.tensor([-0.5, 0.9, 0.2], dtype=torch.float64).log_softmax(0)
BEHAVIOUR = torch.tensor([0.0, 0.4, -0.3], dtype=torch.float64).log_softmax(0)


def analytic_gradient() -> Tensor:
    """Of sum_x policy(x) (log policy(x) - log reference(x)), by the logits."""
    logits = LOGITS.clone().requires_grad_()
    logp_V = logits.log_softmax(0)
    (logp_V.exp() * (logp_V - REFERENCE)).sum().backward()
    assert logits.grad is not None
    return logits.grad


@pytest.mark.parametrize(
    ("logp", "reference", "expected"),
    [(-1.2, -0.7, (-0.5, 0.125, 0.1487)), (-1.0, -2.0, (1.0, 0.5, 0.3679))],
)
def test_values(logp: float, reference: float, expected: tuple[float, float, float]) -> None:
    """A14."""
    for estimator, value in zip(ESTIMATORS, expected, strict=True):
        pair = torch.tensor([logp]), torch.tensor([reference])
        assert float(kl_value(*pair, estimator)) == pytest.approx(value, abs=1e-4)
        assert float(kl_term(*pair, estimator)) == pytest.approx(value, abs=1e-4)


def test_k3_is_never_negative_even_where_policies_agree() -> None:
    """A14."""
    logp = torch.linspace(-8, -1e-4, 500)
    for gap in (0.0, 1e-6, 1e-4, 1e-2, 1.0, 5.0):
        for reference in (logp + gap, logp - gap):
            assert float(kl_value(logp, reference, "k3").min()) >= 0


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_expected_gradient_is_that_of_the_kl_divergence(estimator: str) -> None:
    """A15."""
    logits = LOGITS.clone().requires_grad_()
    logp_V = logits.log_softmax(0)
    (logp_V.detach().exp() * kl_term(logp_V, REFERENCE, estimator)).sum().backward()
    np.testing.assert_allclose(logits.grad, analytic_gradient(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("is_stale", [False, True])
def test_expected_gradient_through_the_loss(estimator: str, is_stale: bool) -> None:
    """A15. Also for samples of an older policy, where the correction is on and its cap is not reached."""
    rules = algorithm(kl_coef=0.5, kl_estimator=estimator, correction="on" if is_stale else "off", correction_cap=1e3)
    sampler_V = BEHAVIOUR if is_stale else LOGITS.log_softmax(0)
    logits = LOGITS.clone().requires_grad_()
    loss_V, _ = policy_terms(
        rules,
        logp_N=logits.log_softmax(0),
        behaviour_N=sampler_V,
        proximal_N=None,
        reference_N=REFERENCE,
        advantage_N=torch.zeros(3),
        mask_N=torch.ones(3),
    )
    (sampler_V.exp() * loss_V).sum().backward()
    np.testing.assert_allclose(logits.grad, 0.5 * analytic_gradient(), rtol=1e-10, atol=1e-10)


def test_expected_value_of_k1_and_k3_is_the_kl_divergence() -> None:
    logp_V = LOGITS.log_softmax(0)
    exact = float((logp_V.exp() * (logp_V - REFERENCE)).sum())
    for estimator in ("k1", "k3"):
        assert float((logp_V.exp() * kl_value(logp_V, REFERENCE, estimator)).sum()) == pytest.approx(exact)
