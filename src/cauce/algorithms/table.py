"""From a recipe's [algorithm] section to one `Algorithm`: a row of the table with the recipe's overrides.

An `Algorithm` is plain data; the functions its names stand for are in advantages.py, kl.py and reducers.py.
What a single setting may be is checked by the recipe; here only what two settings, or a setting and a row,
say together. `dynamic_sampling` is left out: it is a rule of the buffer.
"""

from dataclasses import dataclass

from cauce.errors import RecipeError
from cauce.recipe.models import AlgorithmSettings
from cauce.recipe.traits import TRAITS, Advantage, Aggregation, KlEstimator, KlPlace, Traits


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """How rewards become advantages, and log-probabilities become a loss."""

    name: str
    advantage: Advantage
    clip_low: float
    clip_high: float
    dual_clip: float | None  # bounds the loss of a token by dual_clip * |A| where A < 0; None: unbounded
    aggregation: Aggregation
    aggregation_length: int  # tokens; read by token_sum_constant only
    kl_coef: float
    kl_estimator: KlEstimator
    kl_in: KlPlace
    correction_cap: float | None  # None: no importance correction of the sampler
    mask_truncated: bool

    @property
    def needs_reference(self) -> bool:
        """Whether the log-probabilities of the frozen reference must be scored."""
        return self.kl_coef > 0


def resolve(settings: AlgorithmSettings, *, max_tokens: int, correction_needed: bool) -> Algorithm:
    """Apply the recipe's overrides to the algorithm's row.

    Args:
        max_tokens: rollout.max_tokens; the constant length of token_sum_constant where the recipe names none.
        correction_needed: the sampler differs from the learner (dtype, bf16, max_staleness above 0).
    """
    if settings.name not in TRAITS:
        raise RecipeError(f"algorithm.name = {settings.name!r}: no such row; set one of {', '.join(TRAITS)}")
    row = TRAITS[settings.name]
    if settings.kl_coef > 0 and not row.accepts_kl:
        raise RecipeError(
            f"algorithm.kl_coef = {settings.kl_coef}: {settings.name} has no KL term; set it to 0, or take "
            f"grpo with clip_high = {row.clip_high} and aggregation = {row.aggregation!r}"
        )
    aggregation: Aggregation = settings.aggregation or row.aggregation
    is_corrected = settings.correction == "on" or (settings.correction == "auto" and correction_needed)
    return Algorithm(
        name=settings.name,
        advantage=_advantage(settings, row),
        clip_low=row.clip_low if settings.clip_low is None else settings.clip_low,
        clip_high=row.clip_high if settings.clip_high is None else settings.clip_high,
        dual_clip=settings.dual_clip,
        aggregation=aggregation,
        aggregation_length=_aggregation_length(settings, aggregation, max_tokens),
        kl_coef=settings.kl_coef,
        kl_estimator=settings.kl_estimator,
        kl_in=settings.kl_in,
        correction_cap=settings.correction_cap if is_corrected else None,
        mask_truncated=settings.mask_truncated,
    )


def _advantage(settings: AlgorithmSettings, row: Traits) -> Advantage:
    if not settings.advantage_scale:
        return row.advantage
    if row.advantage == "leave_one_out":
        if settings.advantage_scale == "none":
            return "leave_one_out"
        raise RecipeError(
            f"algorithm.advantage_scale = {settings.advantage_scale!r}: {settings.name} compares each answer "
            "with the others and divides by nothing; leave it unset, or take grpo or dr_grpo"
        )
    return "group_std" if settings.advantage_scale == "group_std" else "group_mean"


def _aggregation_length(settings: AlgorithmSettings, aggregation: Aggregation, max_tokens: int) -> int:
    if not settings.aggregation_length:
        return max_tokens
    if aggregation != "token_sum_constant":
        raise RecipeError(
            f"algorithm.aggregation_length = {settings.aggregation_length}: {aggregation!r} does not read "
            "it; leave it unset, or set algorithm.aggregation = 'token_sum_constant'"
        )
    return settings.aggregation_length
