"""`cauce check`: what a recipe amounts to, found out before any model's weights load and before Ray starts.

Shows the detected shape of the rows and why, one rendered prompt, the gold answer, what the reward says of it
and of an empty answer, how long prompts are, then what `cauce plan` shows (plan.py), and about how long a plan takes.
Nothing is trained or written. The same steps at the start of a run are in prepare.py; the estimates in estimate.py.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cauce.data.source import RowSource, load_rows
from cauce.environments.single_turn import PromptSurvey, RenderedPrompt, SingleTurn, survey_prompts
from cauce.models.load import load_tokenizer, local_folder
from cauce.recipe.checks import check_recipe, recipe_warnings
from cauce.recipe.models import Recipe
from cauce.rewards.load import load_reward
from cauce.rewards.reward import Reward
from cauce.stages.estimate import Estimate, estimate, read_size
from cauce.stages.lengths import prompt_lengths, prompt_limit
from cauce.stages.plan import PlanReport, batch_lines, plan_for, role_lines
from cauce.types import Outcome, Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SURVEYED = 5000  # rows rendered to learn the lengths, spread evenly
SCORED = 8  # rows whose gold answer is scored, and one more of every data_source
MAX_SOURCES = 32

# Ways to write a gold answer down; the first one that beats an empty answer is shown.
GOLD_FORMS = ("{}", "#### {}", "\\boxed{{{}}}", "<answer>{}</answer>", "<answer>\n{}\n</answer>")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredGold:
    """What the reward says of one row's gold answer and of an empty one."""

    row_id: str
    answer: str | None  # the text that was scored; None: the row has no gold answer
    gold: Outcome | None
    empty: Outcome

    @property
    def is_told_apart(self) -> bool:
        """Whether gold scores above empty."""
        if self.gold is None or self.gold.value is None:
            return False
        return self.empty.value is None or self.gold.value > self.empty.value

    @property
    def failure(self) -> str:
        """What went wrong with one of the answers; empty where the reward coped with both."""
        failed = [outcome for outcome in (self.gold, self.empty) if outcome is not None and outcome.status == "failed"]
        return failed[0].detail if failed else ""

    @property
    def is_lost(self) -> bool:
        """Whether the reward failed on every answer to this row."""
        return all(outcome.status == "failed" for outcome in (self.gold, self.empty) if outcome is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """Everything that `cauce check` found out."""

    source: RowSource
    num_test: int | None
    prompt: RenderedPrompt
    row: Row
    scored: tuple[ScoredGold, ...]  # that of `row` first
    reward_notes: tuple[str, ...]
    reward_columns: dict[str, list[str]]  # reward function -> the columns it is given
    survey: PromptSurvey
    num_surveyed: int
    plan: PlanReport
    estimate: Estimate | None
    num_plans: int
    warnings: tuple[str, ...]

    @property
    def reward_failure(self) -> str:
        """Why a run with this reward could not score anything; empty where it could."""
        if not all(one.is_lost for one in self.scored):
            return ""
        first = self.scored[0]
        return (
            f"the reward fails on every answer to all {len(self.scored)} rows tried, so nothing could be trained on; "
            f"{first.row_id}: {first.failure}"
        )


def check(
    recipe: Recipe,
    *,
    rows: str | Iterable[Mapping[str, Any]] | None = None,
    reward: Callable[..., Any] | Sequence[Callable[..., Any]] | None = None,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
) -> CheckReport:
    """Find out what a recipe would do.

    Args:
        rows, reward: in place of data.train and reward.fn.
        tokenizer: in place of the model's; without model.path, memory and time stay unknown.
    """
    check_recipe(recipe)
    folder = local_folder(recipe.model.path) if recipe.model.path or tokenizer is None else None
    environment = SingleTurn(tokenizer or load_tokenizer(str(folder)), recipe.data)
    environment.stop_token_ids(recipe.rollout.stop)
    source = load_rows(rows if rows is not None else recipe.data.train, settings=recipe.data, split="train")
    loaded = load_reward(recipe.reward if reward is None else reward, settings=recipe.reward)
    loaded.require(source.columns)
    size = read_size(folder) if folder else None
    context = size.context if size else None
    spread = [source[i] for i in _spread(len(source), SURVEYED)]
    survey = survey_prompts(environment, spread, limit=prompt_limit(recipe, context))
    lengths = prompt_lengths(recipe, context, survey=survey, num_surveyed=len(spread))
    scored = tuple(_score_gold(row, source, loaded) for row in _rows_to_score(source))
    held_out = load_rows(recipe.data.test, settings=recipe.data, split="test") if recipe.data.test else None
    return CheckReport(
        source=source,
        num_test=None if held_out is None else len(held_out),
        prompt=environment.render(source[0]),
        row=source[0],
        scored=scored,
        reward_notes=loaded.notes,
        reward_columns={f.name: f.columns_read(source.columns) for f in loaded.functions},
        survey=survey,
        num_surveyed=len(spread),
        plan=plan_for(recipe, size, lengths),
        estimate=estimate(recipe, size, lengths) if size else None,
        num_plans=recipe.run.plans,
        warnings=(
            *source.warnings,
            *_gold_warnings(scored),
            *_data_warnings(recipe, source, held_out, survey, len(spread)),
            *recipe_warnings(recipe),
        ),
    )


def render(report: CheckReport) -> str:
    """The report as text for a terminal."""
    plan = report.plan
    blocks = [_data_lines(report), _reward_lines(report), batch_lines(plan), role_lines(plan), _time_lines(report)]
    blocks.append(["Warnings", *(f"  ! {warning}" for warning in report.warnings)] if report.warnings else [])
    return "\n\n".join("\n".join(block) for block in blocks if block)


def _spread(size: int, count: int) -> list[int]:
    return [i * size // count for i in range(count)] if size > count else list(range(size))


def _rows_to_score(source: RowSource) -> list[Row]:
    """Rows from all over the data, and one of each data_source, since rewards choose by it."""
    chosen = {i: source[i] for i in _spread(len(source), SCORED)}
    seen: set[str] = set()
    for i, row in enumerate(source):
        name = row.columns.get("data_source")
        if isinstance(name, str) and name not in seen and len(seen) < MAX_SOURCES:
            seen.add(name)
            chosen.setdefault(i, row)
    return list(chosen.values())


def _score_gold(row: Row, source: RowSource, reward: Reward) -> ScoredGold:
    gold = source.gold(row)
    written = [] if gold is None else list(dict.fromkeys(form.format(gold) for form in GOLD_FORMS))
    texts = ["", *written]
    outcomes = [
        reward.score(rows=[row], texts=[text], token_ids=[[]], step=0, max_steps=1).outcomes[0] for text in texts
    ]
    tried = [
        ScoredGold(row_id=row.id, answer=text, gold=outcome, empty=outcomes[0])
        for text, outcome in zip(written, outcomes[1:], strict=True)
    ]
    if not tried:
        return ScoredGold(row_id=row.id, answer=None, gold=None, empty=outcomes[0])
    return next((one for one in tried if one.is_told_apart), tried[0])


def _gold_warnings(scored: Sequence[ScoredGold]) -> list[str]:
    warnings = []
    failed = [one for one in scored if one.failure]
    if failed:
        one = failed[0]
        warnings.append(f"the reward fails on {len(failed)} of {len(scored)} rows tried; {one.row_id}: {one.failure}")
    equal = [one for one in scored if one.gold is not None and one not in failed and not one.is_told_apart]
    if equal:
        one = equal[0]
        warnings.append(
            f"on {len(equal)} of {len(scored)} rows tried the gold answer does not score above an empty one "
            f"({one.row_id}: {one.answer!r} {_said(one.gold)}, empty {_said(one.empty)}); the reward may "
            "want another form than those tried, or read another column: the final answer alone is in `gold`. Where "
            "the prompt is a list of messages, so is each completion, as in TRL: its text is completion[-1]['content']"
        )
    return warnings


def _data_warnings(
    recipe: Recipe, source: RowSource, held_out: RowSource | None, survey: PromptSurvey, num_surveyed: int
) -> list[str]:
    warnings = []
    if survey.too_long:
        warnings.append(
            f"{len(survey.too_long)} of {num_surveyed} prompts rendered are too long and will be dropped "
            f"(data.max_prompt_tokens = {recipe.data.max_prompt_tokens})"
        )
    usable = len(source) * (num_surveyed - len(survey.too_long)) // num_surveyed
    if usable < recipe.learner.tasks_per_plan:
        warnings.append(
            f"a plan holds {recipe.learner.tasks_per_plan} prompts and the data about {usable}: the same row "
            "comes several times into one plan; lower learner.tasks_per_plan"
        )
    if held_out is not None:
        known = {str(row.prompt) for row in source}
        shared = sum(str(row.prompt) in known for row in held_out)
        if shared:
            warnings.append(f"{shared} of {len(held_out)} held-out prompts are in the training data as well")
    return warnings


def _data_lines(report: CheckReport) -> list[str]:
    source, survey = report.source, report.survey
    dropped = f", {len(survey.too_long)} too long" if survey.too_long else ""
    tokens = len(report.prompt.token_ids)
    return [
        "Data",
        f"  rows        {len(source):,}" + (f", held out {report.num_test:,}" if report.num_test else ""),
        f"  shape       {source.shape}: {source.rule}",
        f"  columns     {', '.join(source.columns) or 'none'} (beside the prompt)",
        f"  prompts     longest {survey.longest} tokens, mean {survey.mean:.0f} (of {report.num_surveyed:,}){dropped}",
        f"  digest      {source.digest[:16]}",
        f"  first row   {report.row.id}, {tokens} tokens as the model sees it:",
        *(f"  | {line}" for line in report.prompt.text.splitlines()),
        f"  gold        {_gold_text(source, report.row)}",
    ]


def _gold_text(source: RowSource, row: Row) -> str:
    gold = source.gold(row)
    if gold is not None:
        return _short(str(gold))
    columns = ", ".join(source.columns) or "none"
    return f"not known; a column that holds it is named by data.gold_key=COLUMN (columns: {columns})"


def _reward_lines(report: CheckReport) -> list[str]:
    first = report.scored[0]
    lines = ["Reward", *(f"  {note}" for note in report.reward_notes)]
    for name, columns in report.reward_columns.items():
        lines.append(f"  {name} is given {', '.join(columns) if columns else 'no columns'}")
    if first.gold is not None:
        lines.append(f"  gold answer {_short(first.answer or '')!r}: {_said(first.gold)}")
    lines.append(f"  empty answer: {_said(first.empty)}")
    num_apart = sum(one.is_told_apart for one in report.scored)
    lines.append(f"  gold scores above empty on {num_apart} of {len(report.scored)} rows tried")
    return lines


def _time_lines(report: CheckReport) -> list[str]:
    cost = report.estimate
    if cost is None:
        return []
    plan_s = cost.generate_s + cost.learn_s
    return [
        "Time",
        f"  one plan on this machine, about    {plan_s:8.1f} s   (generate {cost.generate_s:.1f}, "
        f"learn {cost.learn_s:.1f})",
        f"  {report.num_plans} plans, about {plan_s * report.num_plans / 60:,.0f} minutes, evaluation aside",
    ]


def _said(outcome: Outcome | None) -> str:
    if outcome is None:
        return "not scored"
    if outcome.value is None:
        return f"{outcome.status} {outcome.detail}".strip()
    parts = ", ".join(f"{name} {value:g}" for name, value in outcome.parts.items() if value is not None)
    return f"{outcome.value:g}" + (f" ({parts})" if len(outcome.parts) > 1 else "")


def _short(text: str, width: int = 200) -> str:
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 3] + "..."
