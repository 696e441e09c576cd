"""From a loss per token to a number: the four aggregations.

Every objective goes through `aggregate`, which is the only place that divides. It divides by the counts of
the whole optimizer step (all micro-batches, all ranks), so that parts simply add up, however the step was
cut. Leaves out the counting itself (advantages.make_batch). A sequence must lie whole in one part: its own
length is counted there.

With l[s, t] the loss of trained token t of sequence s, n[s] their number in s, S = num_sequences and
L = aggregation_length:

    token_mean                  sum_s sum_t l[s, t] / sum_s n[s]             DAPO, arXiv 2503.14476
    sequence_mean_token_mean    1/S sum_s 1/n[s] sum_t l[s, t]               GRPO, arXiv 2402.03300 eq. 3
    sequence_mean_token_sum     1/S sum_s sum_t l[s, t]                      RLOO, arXiv 2402.14740
    token_sum_constant          1/(S L) sum_s sum_t l[s, t]                  Dr. GRPO, arXiv 2503.20783
"""

import torch
from torch import Tensor

from cauce.algorithms.table import Algorithm


def aggregate(
    loss_N: Tensor,
    mask_N: Tensor,
    sequence_N: Tensor,
    *,
    algorithm: Algorithm,
    num_tokens: int,
    num_sequences: int,
) -> Tensor:
    """This part's share of the step's loss.

    Args:
        sequence_N: int64; which sequence each token belongs to; any labels that are equal within a sequence.
        num_tokens: trained tokens of the whole optimizer step (Batch.num_tokens).
        num_sequences: sequences of the whole step with at least one trained token (Batch.num_sequences).
    """
    if not (loss_N.shape == mask_N.shape == sequence_N.shape) or loss_N.dim() != 1:
        raise ValueError(
            f"aggregate: loss {tuple(loss_N.shape)}, mask {tuple(mask_N.shape)} and sequence "
            f"{tuple(sequence_N.shape)} must be one-dimensional and of equal length"
        )
    is_trained_N = mask_N != 0
    num_here = int(is_trained_N.sum())
    if num_here > num_tokens or (num_here > 0 and num_sequences < 1):
        raise ValueError(
            f"aggregate: num_tokens = {num_tokens}, num_sequences = {num_sequences} are not the counts of "
            f"the whole step: this part alone has {num_here} trained tokens"
        )
    # Only a step without a trained token has counts of 0; its loss is exactly 0.
    num_tokens, num_sequences = max(num_tokens, 1), max(num_sequences, 1)
    loss_N = torch.where(is_trained_N, loss_N, 0.0)
    if algorithm.aggregation == "token_mean":
        return loss_N.sum() / num_tokens
    if algorithm.aggregation == "sequence_mean_token_mean":
        return (loss_N / _sequence_tokens(is_trained_N, sequence_N)).sum() / num_sequences
    if algorithm.aggregation == "sequence_mean_token_sum":
        return loss_N.sum() / num_sequences
    return loss_N.sum() / (num_sequences * algorithm.aggregation_length)


def _sequence_tokens(is_trained_N: Tensor, sequence_N: Tensor) -> Tensor:
    """For each token, the number of trained tokens of its sequence, at least 1."""
    _, row_N = torch.unique(sequence_N, return_inverse=True)
    tokens_B = torch.bincount(row_N[is_trained_N], minlength=int(row_N.max()) + 1 if len(row_N) else 0)
    return tokens_B.clamp(min=1)[row_N]
