"""How long prompts are taken to be: one answer for `cauce plan`, `cauce check` and the start of a run.

A prompt over the limit is dropped, so the limit bounds what engine and learner must hold. Without rows at hand every
prompt counts at the limit; with them (check), at the lengths that rendering found.
"""

from dataclasses import dataclass

from cauce.environments.single_turn import PromptSurvey
from cauce.recipe.models import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLengths:
    """Tokens of the prompts that will be trained on, and where the numbers come from."""

    mean: float
    longest: int
    source: str


def prompt_limit(recipe: Recipe, context: int | None) -> int:
    """data.max_prompt_tokens, or what the model's context leaves before one new token."""
    limit = recipe.data.max_prompt_tokens
    return limit if context is None else min(limit, context - 1)


def prompt_lengths(
    recipe: Recipe, context: int | None, *, survey: PromptSurvey | None = None, num_surveyed: int = 0
) -> PromptLengths:
    """Of a survey of rows, or the limit where there is none."""
    limit = prompt_limit(recipe, context)
    if survey is not None:
        source = f"as {num_surveyed:,} rows have them"
        return PromptLengths(mean=min(survey.mean, limit), longest=min(survey.longest, limit), source=source)
    source = "all at data.max_prompt_tokens" if limit == recipe.data.max_prompt_tokens else "all at the model's context"
    return PromptLengths(mean=limit, longest=limit, source=f"{source}; `cauce check` reads the rows")
