"""`cauce plan`: what a recipe amounts to before anything starts: batches, memory per role, what fits this machine.

Arithmetic over the recipe and the model's config; no weights load, no rows are read, and no Ray starts. How long
prompts are taken to be is said beside the memory (lengths.py). `cauce check` (check.py) is this with the lengths that
the prompts really have, plus the probes of rows and reward.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cauce.errors import ResourceError
from cauce.models.load import resolve_path
from cauce.recipe.checks import batch_arithmetic, check_recipe, recipe_warnings
from cauce.recipe.models import Recipe
from cauce.runtime.machine import memory
from cauce.runtime.placement import NodeRoom, Placement, check_room, plan_placement
from cauce.runtime.process import available_cpus
from cauce.stages.estimate import ModelSize, memory_by_role, read_size
from cauce.stages.lengths import PromptLengths, prompt_lengths

GIB = 2**30
MOST_TRIED = 1 << 20  # above this a setting is not what limits a run
SIZED = ("rollout.actors", "engine.slots", "rollout.max_tokens", "learner.token_budget")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """One setting that memory depends on, and the most of it that fits and has an effect, while the others stay."""

    key: str
    now: int
    most: int  # 0: not even 1 fits; MOST_TRIED: memory does not limit it


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """Everything that `cauce plan` found out. Memory is unknown where the model's config is not at hand."""

    batch: list[tuple[str, int]]
    size: ModelSize | None
    lengths: PromptLengths
    memory: tuple[tuple[str, int], ...]  # role and bytes
    available: int  # bytes
    cpus: int
    placement: Placement
    refusal: str  # why the processes cannot be placed; empty where they can
    fits: tuple[Fit, ...]
    warnings: tuple[str, ...]

    @property
    def total(self) -> int:
        return sum(size for _, size in self.memory)


def plan(recipe: Recipe) -> PlanReport:
    """What a run of this recipe would need, by its settings and the model's config."""
    check_recipe(recipe)
    folder = resolve_path(recipe.model.path) if recipe.model.path else None
    size = read_size(folder) if folder is not None and folder.is_dir() else None
    return plan_for(recipe, size, prompt_lengths(recipe, size.context if size else None))


def plan_for(recipe: Recipe, size: ModelSize | None, lengths: PromptLengths, *, root: Path = Path("/")) -> PlanReport:
    """The same for prompts of known lengths."""
    cpus, (_, available) = available_cpus(), memory(root)

    def needed(changed: Recipe) -> tuple[tuple[str, int], ...]:
        assert size is not None
        return memory_by_role(changed, size, lengths)

    placement = plan_placement(recipe, cpus=cpus)
    return PlanReport(
        batch=batch_arithmetic(recipe),
        size=size,
        lengths=lengths,
        memory=needed(recipe) if size else (),
        available=available,
        cpus=cpus,
        placement=placement,
        refusal=_refusal(recipe, placement, cpus=cpus, available=available),
        fits=tuple(_fit(recipe, key, needed, available, _useful(recipe, size)) for key in SIZED) if size else (),
        warnings=tuple(recipe_warnings(recipe)),
    )


def render(report: PlanReport) -> str:
    """The report as text for a terminal."""
    blocks = [batch_lines(report), role_lines(report)]
    blocks.append(["Warnings", *(f"  ! {warning}" for warning in report.warnings)] if report.warnings else [])
    return "\n\n".join("\n".join(block) for block in blocks if block)


def batch_lines(report: PlanReport) -> list[str]:
    width = max(len(name) for name, _ in report.batch)
    return ["Batch", *(f"  {name:<{width}}  {value:>12,}" for name, value in report.batch)]


def role_lines(report: PlanReport) -> list[str]:
    """Processes, memory of each role, and what would fit."""
    lines = [f"Processes, on the {report.cpus} CPUs of this machine"]
    for role, count, need in report.placement.roles():
        lines.append(f"  {role:<8} {count} x {need.threads} threads, {need.cpus:g} CPUs reserved for each")
    if report.refusal:
        lines.append(f"  ! {report.refusal}")
    if report.size is None:
        return [*lines, "", "Memory", "  not estimated: the model's config is not at hand"]
    entries = (*report.memory, ("together", report.total), ("available now", report.available))
    lines += ["", f"Memory, estimated for {report.size.num_parameters:,} parameters"]
    lengths = report.lengths
    lines.append(f"  prompts of {lengths.mean:,.0f} tokens, at most {lengths.longest:,}: {lengths.source}")
    lines += [f"  {name:<34} {size / GIB:8.2f} GiB" for name, size in entries]
    verdict = "fits" if report.total <= report.available else "! does not fit"
    lines.append(f"  {verdict}; the most of each setting that does and has an effect, the others as they are:")
    return lines + [f"  {fit.key:<34} {_most(fit):>8}   (now {fit.now:,})" for fit in report.fits]


def _most(fit: Fit) -> str:
    if fit.most >= MOST_TRIED:
        return "any"
    return f"{fit.most:,}" if fit.most else "none"


def _refusal(recipe: Recipe, placement: Placement, *, cpus: int, available: int) -> str:
    if recipe.cluster.address != "local":
        return ""  # another machine's room is known when the run asks for it
    room = cpus if recipe.cluster.cpus == "auto" else int(recipe.cluster.cpus)
    try:
        check_room(placement, [NodeRoom(name="this machine", cpus=room, gpus=0.0, memory_bytes=available)])
    except ResourceError as error:
        return str(error)
    return ""


def _useful(recipe: Recipe, size: ModelSize) -> dict[str, int]:
    """Above these a setting has no effect, or leaves no room for a prompt in the model's context."""
    in_flight = recipe.learner.tasks_per_plan * recipe.rollout.group_size * (recipe.buffer.max_staleness + 1)
    return {"engine.slots": in_flight} | ({"rollout.max_tokens": size.context - 1} if size.context else {})


def _fit(
    recipe: Recipe,
    key: str,
    needed: Callable[[Recipe], tuple[tuple[str, int], ...]],
    available: int,
    useful: dict[str, int],
) -> Fit:
    """The largest value of one setting with which everything fits, found by halving; memory grows with each."""
    section, name = key.split(".")

    def is_enough(value: int) -> bool:
        changed = getattr(recipe, section).model_copy(update={name: value})
        return sum(size for _, size in needed(recipe.model_copy(update={section: changed}))) <= available

    low, high = 0, 1
    while high < MOST_TRIED and is_enough(high):
        low, high = high, 2 * high
    if low * 2 >= MOST_TRIED:
        low = high = MOST_TRIED
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_enough(middle) else (low, middle)
    most = min(low, useful.get(key, MOST_TRIED))
    return Fit(key=key, now=getattr(getattr(recipe, section), name), most=most)
