"""What a recipe must know of each algorithm: one literal table, without torch.

A row holds the defaults that the paper gives and the facts that decide whether a setting makes sense. The
recipe is checked against it before any model loads; `cauce.algorithms` binds the functions to the names used
here. What may be changed per run (KL, correction of the sampler, masking of truncated answers) is a setting
and not part of a row.

Where a row leaves its paper, or the paper leaves something open:
  * grpo and dapo divide by the sample standard deviation (ddof 1): [1, 0, 0, 0] gives the first 1.5.
  * grpo with KL: the value is the paper's k3; its gradient is that of KL(policy || reference), see
    algorithms/kl.py.
  * dapo is the row of its asymmetric clip and token mean. Its dynamic sampling and its masking of overlong
    answers are the settings `dynamic_sampling` and `mask_truncated`. The paper drops KL: a coefficient is
    refused.
  * rloo is REINFORCE in the paper. At a plan's first optimizer step the ratio is one and the gradient is the
    paper's; the clip only guards later steps. Its own KL is kl_in = "reward" with kl_estimator = "k1".
"""

from dataclasses import dataclass
from typing import Literal

Advantage = Literal["group_std", "group_mean", "leave_one_out"]
Aggregation = Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "token_sum_constant"]
KlEstimator = Literal["k1", "k2", "k3"]
KlPlace = Literal["loss", "reward"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """The defaults and demands of one algorithm."""

    summary: str
    advantage: Advantage
    aggregation: Aggregation
    clip_low: float  # the ratio is kept above 1 - clip_low
    clip_high: float  # ... and below 1 + clip_high
    min_group_size: int  # answers that a group needs before its statistics mean anything
    accepts_kl: bool  # False: a kl_coef above 0 is an error
    arxiv: str


TRAITS: dict[str, Traits] = {
    "grpo": Traits(
        summary="rewards centred, over the group's standard deviation; mean over answers of token means",
        advantage="group_std",
        aggregation="sequence_mean_token_mean",
        clip_low=0.2,
        clip_high=0.2,
        min_group_size=2,
        accepts_kl=True,
        arxiv="2402.03300",
    ),
    "dr_grpo": Traits(
        summary="rewards centred, not divided; token sum over a constant, so that length has no weight",
        advantage="group_mean",
        aggregation="token_sum_constant",
        clip_low=0.2,
        clip_high=0.2,
        min_group_size=2,
        accepts_kl=True,
        arxiv="2503.20783",
    ),
    "dapo": Traits(
        summary="as grpo, with more room upwards for the ratio and every token weighing the same",
        advantage="group_std",
        aggregation="token_mean",
        clip_low=0.2,
        clip_high=0.28,
        min_group_size=2,
        accepts_kl=False,
        arxiv="2503.14476",
    ),
    "rloo": Traits(
        summary="REINFORCE; each answer is compared with the mean reward of the others",
        advantage="leave_one_out",
        aggregation="sequence_mean_token_sum",
        clip_low=0.2,
        clip_high=0.2,
        min_group_size=2,
        accepts_kl=True,
        arxiv="2402.14740",
    ),
}
