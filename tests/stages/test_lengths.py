"""How long prompts are taken to be, and what memory is made of it."""

from dataclasses import replace
from pathlib import Path

from cauce.environments.single_turn import PromptSurvey
from cauce.recipe.models import DataSettings, LearnerSettings, ModelSettings, Recipe, RolloutSettings
from cauce.stages.estimate import memory_by_role, read_size
from cauce.stages.lengths import PromptLengths, prompt_lengths, prompt_limit
from cauce.stages.plan import plan, render


def recipe(limit: int = 100) -> Recipe:
    return Recipe(data=DataSettings(max_prompt_tokens=limit))


def test_the_limit_is_the_recipes_or_the_models() -> None:
    assert prompt_limit(recipe(), None) == 100
    assert prompt_limit(recipe(), 64) == 63
    assert prompt_limit(recipe(), 200) == 100


def test_without_rows_every_prompt_is_at_the_limit_and_that_is_said(tiny: Path) -> None:
    lengths = prompt_lengths(recipe(), 64)
    assert (lengths.mean, lengths.longest) == (63, 63)
    assert "the model's context" in lengths.source
    assert "data.max_prompt_tokens" in prompt_lengths(recipe(), None).source
    text = render(plan(Recipe(model=ModelSettings(path=str(tiny)), data=DataSettings(max_prompt_tokens=90))))
    assert "prompts of 90 tokens, at most 90: all at data.max_prompt_tokens; `cauce check` reads the rows" in text


def test_with_rows_it_is_what_they_have_but_for_those_that_will_be_dropped() -> None:
    survey = PromptSurvey(longest=300, mean=40.0, too_long=(7,))
    found = prompt_lengths(recipe(), None, survey=survey, num_surveyed=5000)
    assert found == PromptLengths(mean=40.0, longest=100, source="as 5,000 rows have them")


def learner_bytes(tiny: Path, *, budget: int, prompt: int, new_tokens: int, group: int = 8) -> int:
    size = read_size(tiny)
    assert size is not None
    wide = replace(size, hidden=512, intermediate=1536, layers=24)
    made = Recipe(
        learner=LearnerSettings(token_budget=budget),
        rollout=RolloutSettings(group_size=group, max_tokens=new_tokens),
    )
    return dict(memory_by_role(made, wide, PromptLengths(mean=prompt, longest=prompt, source="")))["learner"]


def test_memory_of_the_learner_is_bounded_by_the_budget(tiny: Path) -> None:
    short = learner_bytes(tiny, budget=4096, prompt=250, new_tokens=125)
    twice = learner_bytes(tiny, budget=8192, prompt=250, new_tokens=125)
    assert twice > 1.4 * short  # weights and the process beside it
    # 10,000 tokens, then 18,000 in one group; beyond 8 budgets a group is split.
    long, longer = (learner_bytes(tiny, budget=4096, prompt=p, new_tokens=p // 2) for p in (2000, 3600))
    assert short <= long <= longer < 1.5 * short
    assert learner_bytes(tiny, budget=512, prompt=2000, new_tokens=1000) == learner_bytes(
        tiny, budget=512, prompt=2000, new_tokens=2000
    )
    # A lone answer is never cut.
    assert learner_bytes(tiny, budget=16, prompt=2000, new_tokens=1000) > learner_bytes(
        tiny, budget=16, prompt=200, new_tokens=100
    )
