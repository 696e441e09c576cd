"""Drawing tokens and recording the log-probability each was drawn with.

logits / temperature in float32; logp = log_softmax of that; token = inverse CDF at a uniform number that
belongs to the sample and not to the batch. The CDF has two levels, blocks of tokens and the tokens of one
block, in float64, which spares a cumulative sum over the vocabulary. Temperature 0 is greedy: the first
largest logit, recorded with its log-probability at temperature 1. Top-p, top-k and penalties are left out:
their log-probs would not be the policy's.

Letters: R rows of logits, N tokens to draw (several may share a row), V vocabulary, K blocks.
"""

import math

import numpy as np
import torch
from torch import Tensor

from cauce.engine.kernels import SUFFIXES, Kernels
from cauce.errors import ModelError

BLOCK = 256
NOT_FINITE = "the model's logits are not finite: its weights hold NaN or infinite numbers"
WORD_MASK = (1 << 64) - 1


def uniforms(seed: int, task: int, index: int, count: int) -> np.ndarray:
    """`count` numbers in [0, 1) of one sample: a function of (run seed, task, index) and of nothing else."""
    key = np.array([seed & WORD_MASK, task & WORD_MASK], dtype=np.uint64)
    counter = np.array([0, 0, 0, index & WORD_MASK], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter)).random(count)


class Sampler:
    """Draws with buffers kept between steps: fresh ones cost more in page faults than the arithmetic."""

    def __init__(self, kernels: Kernels | None = None) -> None:
        self._kernels = kernels
        self._buffer_RV = torch.empty(0, 0)

    def draw(
        self, logits_RV: Tensor, temperature_R: np.ndarray, row_N: np.ndarray, uniform_N: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Token ids (int64) and log-probs (float32) of N draws, draw i from the logits of row row_N[i]."""
        if self._kernels is not None and logits_RV.device.type == "cpu" and logits_RV.dtype in SUFFIXES:
            return self._draw_in_kernel(self._kernels, logits_RV, temperature_R, row_N, uniform_N)
        num_rows, vocab = logits_RV.shape
        device = logits_RV.device
        scaled_RV = self._rows(num_rows, vocab, device)
        scaled_RV[:, :vocab] = logits_RV
        greedy_R = temperature_R == 0.0
        if not (greedy_R | (temperature_R == 1.0)).all():
            divisor_R = np.where(greedy_R, 1.0, temperature_R).astype(np.float32)
            scaled_RV.div_(torch.from_numpy(divisor_R).to(device)[:, None])
        row = torch.from_numpy(np.asarray(row_N, dtype=np.int64)).to(device)
        best_R = scaled_RV.argmax(-1) if greedy_R.any() else None

        max_R = scaled_RV.amax(-1, keepdim=True)
        weight_RV = scaled_RV.sub_(max_R).exp_()
        weight_RKB = weight_RV.view(num_rows, -1, BLOCK)
        cdf_RK = weight_RKB.sum(-1).double().cumsum(-1)
        if not torch.isfinite(cdf_RK[:, -1]).all():
            raise ModelError(NOT_FINITE)
        token_N = _invert(weight_RKB, cdf_RK, row, torch.from_numpy(uniform_N).to(device))
        if best_R is not None:
            token_N = torch.where(torch.from_numpy(greedy_R).to(device)[row], best_R[row], token_N)

        logit_N = logits_RV[row, token_N].float()
        divisor_N = np.where(greedy_R, 1.0, temperature_R).astype(np.float32)[row_N]
        log_total_N = max_R[row, 0].double() + cdf_RK[row, -1].log()
        logp_N = (logit_N / torch.from_numpy(divisor_N).to(device)).double() - log_total_N
        return token_N.cpu().numpy(), logp_N.float().cpu().numpy()

    def _draw_in_kernel(
        self, kernels: Kernels, logits_RV: Tensor, temperature_R: np.ndarray, row_N: np.ndarray, uniform_N: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        greedy_R = temperature_R == 0.0
        divisor_R = np.where(greedy_R, 1.0, temperature_R)
        token_N, logp_N, total_R = kernels.draw(logits_RV, divisor_R, greedy_R, row_N, uniform_N)
        if not np.isfinite(total_R).all():
            raise ModelError(NOT_FINITE)
        return token_N, logp_N

    def _rows(self, num_rows: int, vocab: int, device: torch.device) -> Tensor:
        width = math.ceil(vocab / BLOCK) * BLOCK
        kept = self._buffer_RV
        if kept.shape[0] < num_rows or kept.shape[1] != width or kept.device != device:
            self._buffer_RV = torch.empty(num_rows, width, dtype=torch.float32, device=device)
        rows = self._buffer_RV[:num_rows]
        rows[:, vocab:] = float("-inf")
        return rows


def _invert(weight_RKB: Tensor, cdf_RK: Tensor, row: Tensor, uniform_N: Tensor) -> Tensor:
    """The token at which the running sum of weights first exceeds uniform * total; its weight is never 0."""
    zero = torch.zeros((), dtype=torch.float64, device=row.device)
    cdf_NK = cdf_RK[row]
    total_N = cdf_NK[:, -1]
    target_N = torch.minimum(uniform_N * total_N, torch.nextafter(total_N, zero))
    block_N = (cdf_NK <= target_N[:, None]).sum(-1)
    before_N = torch.where(block_N > 0, cdf_NK.gather(1, (block_N - 1).clamp(min=0)[:, None])[:, 0], zero)
    inner_NB = weight_RKB[row, block_N].double().cumsum(-1)
    rest_N = torch.minimum(target_N - before_N, torch.nextafter(inner_NB[:, -1], zero))
    return block_N * weight_RKB.shape[-1] + (inner_NB <= rest_N[:, None]).sum(-1)
