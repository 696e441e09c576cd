"""Estimators of KL(policy || reference) per token, and the term that is put into a loss.

Leaves out where the number goes: losses.py adds it to a loss, advantages.py subtracts it from a reward.

With d = logp - reference of a token that the policy sampled (http://joschu.net/blog/kl-approx.html):

    k1 = d                       unbiased, may be negative
    k2 = d^2 / 2                 biased, never negative
    k3 = exp(-d) - 1 + d         unbiased, never negative; the estimator of GRPO, arXiv 2402.03300 eq. 4

Their values are used as they stand, their derivatives are not. Differentiating a sampled k1 gives grad logp,
which is zero in expectation; differentiating k3 gives, in expectation, the gradient of KL(reference ||
policy). What is wanted is

    grad KL(policy || reference) = E_policy[ d * grad logp ]

which is what differentiating k2 gives, and also what exp(logp - logp.detach()) * k3 gives (for each sample,
not only in expectation). So every estimator keeps its value and takes the gradient of k2.
"""

from collections.abc import Callable

from torch import Tensor

from cauce.recipe.traits import KlEstimator


def kl_value(logp_N: Tensor, reference_N: Tensor, estimator: KlEstimator) -> Tensor:
    """The estimate per token."""
    return KL_ESTIMATORS[estimator](logp_N - reference_N)


def kl_term(logp_N: Tensor, reference_N: Tensor, estimator: KlEstimator) -> Tensor:
    """The estimate per token with a gradient that is, in expectation, that of KL(policy || reference)."""
    value_N = kl_value(logp_N, reference_N, estimator).detach()
    carrier_N = k2(logp_N - reference_N)
    return value_N + (carrier_N - carrier_N.detach())


def k1(difference_N: Tensor) -> Tensor:
    return difference_N


def k2(difference_N: Tensor) -> Tensor:
    return difference_N.square() / 2


def k3(difference_N: Tensor) -> Tensor:
    # expm1 keeps the digits that exp(-d) - 1 + d loses where policy and reference nearly agree.
    return (-difference_N).expm1() + difference_N


KL_ESTIMATORS: dict[KlEstimator, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
