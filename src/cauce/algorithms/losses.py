"""The loss of each token: clipped policy term, correction for the sampler, KL to the reference.

Leaves out every division and every mean: reducers.aggregate divides the loss, and the caller divides the
metrics, which are sums over trained tokens, by the token count of the whole optimizer step.

Three policies meet here. `logp` is the one being trained. `proximal` is the same model at the start of the
plan; the ratio is clipped against it and nothing else. `behaviour` is what the sampler recorded; it only
enters the detached correction weight proximal / behaviour, for a sampler that was stale or computed in
another precision.

A value where the mask is 0, even NaN, changes nothing: inputs are selected with `where` before any
arithmetic. A NaN where the mask is 1 stays NaN in the loss, for the learner's guard to see.
"""

import torch
from torch import Tensor

from cauce.algorithms.kl import kl_term, kl_value
from cauce.algorithms.table import Algorithm


def policy_terms(
    algorithm: Algorithm,
    *,
    logp_N: Tensor,
    behaviour_N: Tensor,
    proximal_N: Tensor | None,
    reference_N: Tensor | None,
    advantage_N: Tensor,
    mask_N: Tensor,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss per token, 0 where the mask is 0, and metrics as sums over trained tokens.

    loss = w * clipped(ratio, A) + kl_coef * v * KL          the last only with kl_in = "loss"
        ratio = exp(logp - proximal)                         proximal None: logp.detach(), a ratio of 1
        w = min(cap, exp(proximal - behaviour))              detached; 1 without correction
        v = min(cap, exp(logp - behaviour))                  detached; 1 without correction

    Metrics: clip_low, clip_high, ratio, log_ratio_abs (|logp - behaviour|), policy_loss (without KL);
    clip_dual with a dual clip; kl_reference with a reference; correction_weight and correction_capped with a
    correction.
    """
    is_trained_N = mask_N != 0
    logp_N = _select("logp", logp_N, is_trained_N)
    behaviour_N = _select("behaviour", behaviour_N, is_trained_N).detach()
    advantage_N = _select("advantage", advantage_N, is_trained_N).detach()
    proximal_N = logp_N.detach() if proximal_N is None else _select("proximal", proximal_N, is_trained_N).detach()

    ratio_N = (logp_N - proximal_N).exp()
    surrogate_N = clipped_surrogate(algorithm, ratio_N, advantage_N)
    weight_N = correction_weight(algorithm, proximal_N, behaviour_N)
    loss_N = weight_N * surrogate_N

    metrics = _clip_metrics(algorithm, ratio_N.detach(), advantage_N)
    metrics["log_ratio_abs"] = (logp_N.detach() - behaviour_N).abs()
    metrics["ratio"] = ratio_N.detach()
    metrics["policy_loss"] = loss_N.detach()
    if algorithm.correction_cap is not None:
        metrics["correction_weight"] = weight_N
        metrics["correction_capped"] = weight_N >= algorithm.correction_cap
    if reference_N is not None:
        reference_N = _select("reference", reference_N, is_trained_N).detach()
        metrics["kl_reference"] = kl_value(logp_N.detach(), reference_N, algorithm.kl_estimator)
    if algorithm.kl_coef > 0 and algorithm.kl_in == "loss":
        if reference_N is None:
            raise ValueError(f"policy_terms: kl_coef = {algorithm.kl_coef} in the loss needs reference_N")
        kl_weight_N = correction_weight(algorithm, logp_N.detach(), behaviour_N)
        kl_N = kl_term(logp_N, reference_N, algorithm.kl_estimator)
        loss_N = loss_N + algorithm.kl_coef * kl_weight_N * kl_N

    loss_N = torch.where(is_trained_N, loss_N, 0.0)
    return loss_N, {name: torch.where(is_trained_N, value_N, 0.0).sum() for name, value_N in metrics.items()}


def clipped_surrogate(algorithm: Algorithm, ratio_N: Tensor, advantage_N: Tensor) -> Tensor:
    """PPO's clipped objective as a loss, with DAPO's two bounds and an optional dual clip.

    L = -min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A)      arXiv 1707.06347 eq. 7, 2503.14476
    L = min(L, -dual_clip A) where A < 0                               arXiv 1912.09729
    """
    clipped_N = ratio_N.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high)
    loss_N = -torch.minimum(ratio_N * advantage_N, clipped_N * advantage_N)
    if algorithm.dual_clip is None:
        return loss_N
    bounded_N = torch.minimum(loss_N, -algorithm.dual_clip * advantage_N)
    return torch.where(advantage_N < 0, bounded_N, loss_N)


def correction_weight(algorithm: Algorithm, target_N: Tensor, behaviour_N: Tensor) -> Tensor:
    """Truncated importance weight min(cap, exp(target - behaviour)) of tokens that another policy sampled."""
    if algorithm.correction_cap is None:
        return torch.ones_like(target_N)
    return (target_N - behaviour_N).exp().clamp(max=algorithm.correction_cap).detach()


def _select(name: str, value_N: Tensor, is_trained_N: Tensor) -> Tensor:
    """The value where trained, else 0, in at least float32."""
    if value_N.shape != is_trained_N.shape or value_N.dim() != 1:
        raise ValueError(
            f"policy_terms: {name} has shape {tuple(value_N.shape)}, the mask {tuple(is_trained_N.shape)}; "
            "both must be one-dimensional and of equal length"
        )
    return torch.where(is_trained_N, value_N.to(torch.promote_types(value_N.dtype, torch.float32)), 0.0)


def _clip_metrics(algorithm: Algorithm, ratio_N: Tensor, advantage_N: Tensor) -> dict[str, Tensor]:
    """Which tokens lost their gradient to a bound; beyond a bound on the harmless side is not clipped."""
    is_bad_N = advantage_N < 0
    metrics: dict[str, Tensor] = {
        "clip_low": is_bad_N & (ratio_N < 1 - algorithm.clip_low),
        "clip_high": (advantage_N > 0) & (ratio_N > 1 + algorithm.clip_high),
    }
    if algorithm.dual_clip is not None:
        metrics["clip_dual"] = is_bad_N & (ratio_N > algorithm.dual_clip)
    return metrics
