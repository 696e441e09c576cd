"""Settings that contradict each other or have no effect, found before any model loads.

Each check yields lines of the form "setting = value: why not; what to write". All of them are reported at
once. `batch_arithmetic` says in numbers what a recipe amounts to, since "batch size" means another thing in
each trainer. What depends on rows, models or machines is checked where those are known.
"""

import logging
from collections.abc import Collection, Iterator

from cauce.errors import RecipeError
from cauce.recipe.models import SECTIONS, Recipe
from cauce.recipe.names import nearest
from cauce.recipe.traits import TRAITS

LOGGER = logging.getLogger(__name__)

STAGES = ("rl",)
BACKENDS = ("native", "vllm")
JOURNAL_KEEPS = ("all",)

# Outside of these a value is more often a slip of the keyboard than a choice: a warning, not an error.
USUAL_RANGES: dict[str, tuple[float, float]] = {
    "learner.lr": (1e-8, 1e-2),
    "learner.weight_decay": (0.0, 1.0),
    "learner.max_grad_norm": (1e-3, 1e3),
    "learner.eps": (1e-12, 1e-3),
    "learner.epochs": (1, 100),
    "rollout.temperature": (0.1, 2.0),
    "rollout.group_size": (1, 1024),
    "algorithm.clip_low": (0.01, 1.0),
    "algorithm.clip_high": (0.01, 5.0),
    "algorithm.kl_coef": (0.0, 10.0),
    "algorithm.correction_cap": (1.0, 100.0),
}

_REQUIRED = {
    "model.path": "the model: a folder, or a name such as SmolLM2-135M-Instruct after `cauce model pull`",
    "data.train": "the training rows: a .jsonl, .json, .parquet or .csv file, or builtin:addition/train",
    "reward.fn": "the reward function: file.py:name",
}


def check_recipe(recipe: Recipe) -> None:
    """Raise RecipeError with one line for every contradictory or useless setting."""
    checks = (_names, _engine, _sampling, _algorithm, _kl, _learner, _buffer, _reward, _placement)
    lines = [line for check in checks for line in check(recipe)]
    if lines:
        raise RecipeError("\n".join(lines))


def check_complete(recipe: Recipe, *, name: str = "grpo", given: Collection[str] = ()) -> None:
    """Raise RecipeError naming everything that a run needs and the recipe leaves open.

    Args:
        name: the recipe, for the example command.
        given: keys that the caller supplies as Python objects.
    """
    present = {
        "model.path": recipe.model.path,
        "data.train": recipe.data.train,
        "reward.fn": recipe.reward.names,
    }
    missing = [key for key in _REQUIRED if not present[key] and key not in given]
    if not missing:
        return
    lines = [f"{key} is missing: {_REQUIRED[key]}" for key in missing]
    example = f"cauce train {name} model.path=SmolLM2-135M-Instruct data.train=rows.jsonl reward.fn=score.py:score"
    raise RecipeError("\n".join([*lines, f"for example: {example}"]))


def batch_arithmetic(recipe: Recipe) -> list[tuple[str, int]]:
    """What the recipe amounts to in prompts, completions and optimizer steps, for a run that drops
    nothing."""
    prompts, answers = recipe.learner.tasks_per_plan, recipe.rollout.group_size
    steps, plans = recipe.learner.mini_batches * recipe.learner.epochs, recipe.run.plans
    prompts_per_step = prompts // recipe.learner.mini_batches
    # A group that is used again is not sampled again.
    sampled = -(-plans * prompts // recipe.buffer.max_reuse)
    return [
        ("prompts per plan", prompts),
        ("completions per prompt", answers),
        ("completions per plan", prompts * answers),
        ("new tokens per plan, at most", prompts * answers * recipe.rollout.max_tokens),
        ("prompts per optimizer step", prompts_per_step),
        ("completions per optimizer step", prompts_per_step * answers),
        ("optimizer steps per plan", steps),
        ("plans", plans),
        ("optimizer steps in total", plans * steps),
        ("prompts sampled in total" + (", at least" if recipe.buffer.max_reuse > 1 else ""), sampled),
        (
            "completions sampled in total" + (", at least" if recipe.buffer.max_reuse > 1 else ""),
            sampled * answers,
        ),
    ]


def recipe_warnings(recipe: Recipe) -> list[str]:
    """What is allowed and still unlikely to be meant."""
    lines = []
    for key, (low, high) in USUAL_RANGES.items():
        section, name = key.split(".")
        value = getattr(getattr(recipe, section), name)  # names of settings, from the table above
        if value is not None and not low <= value <= high:
            lines.append(f"{key} = {value!r} is far outside the usual range, {low:g} to {high:g}")
    total = recipe.run.plans * recipe.learner.mini_batches * recipe.learner.epochs
    warmup = recipe.learner.warmup_steps
    if warmup >= total:
        lines.append(f"learner.warmup_steps = {warmup}: the run has {total} optimizer steps, so lr never stops rising")
    if recipe.data.test and recipe.data.test == recipe.data.train:
        lines.append(f"data.test = {recipe.data.test!r} is data.train as well: accuracy is not of held-out tasks")
    if recipe.buffer.max_staleness == 0 and recipe.rollout.actors > recipe.learner.tasks_per_plan:
        lines.append(
            f"rollout.actors = {recipe.rollout.actors}: only {recipe.learner.tasks_per_plan} prompts are out "
            "at a time "
            "(learner.tasks_per_plan, buffer.max_staleness = 0), so some actors always wait"
        )
    return lines


def log_warnings(recipe: Recipe) -> None:
    """Log every warning."""
    for line in recipe_warnings(recipe):
        LOGGER.warning(line)


def _names(recipe: Recipe) -> Iterator[str]:
    algorithm, backend = recipe.algorithm.name, recipe.engine.backend
    if recipe.stage not in STAGES:
        yield f"stage = {recipe.stage!r}: this version has one stage, rl; set stage=rl"
    if algorithm not in TRAITS:
        close = nearest(algorithm.lower().replace("-", "_"), TRAITS)
        hint = f"; did you mean {close}?" if close else ""
        yield f"algorithm.name = {algorithm!r}: the algorithms are {', '.join(TRAITS)}{hint}"
    if backend not in BACKENDS:
        yield f"engine.backend = {backend!r}: the engines are {', '.join(BACKENDS)}; set engine.backend=native"
    if recipe.journal.keep not in JOURNAL_KEEPS:
        yield f"journal.keep = {recipe.journal.keep!r}: this version keeps all samples; set journal.keep=all"


def _engine(recipe: Recipe) -> Iterator[str]:
    engine = recipe.engine
    if engine.backend == "vllm" and engine.deterministic:
        yield (
            "engine.deterministic = True: vLLM's answers depend on what shares their batch; set "
            "engine.deterministic=false, or engine.backend=native"
        )
    if engine.backend == "native" and engine.python:
        yield (
            f"engine.python = {engine.python!r}: has no effect with engine.backend = 'native'; leave it out, or set "
            "engine.backend=vllm"
        )


def _sampling(recipe: Recipe) -> Iterator[str]:
    rollout = recipe.rollout
    why = "the recorded log-probabilities would not be those of the policy that is trained"
    if rollout.temperature == 0:
        yield (
            "rollout.temperature = 0.0: greedy answers to a prompt are all equal, so training learns nothing "
            "from "
            "them; set rollout.temperature=1.0 (evaluation is greedy whatever is set here)"
        )
    if rollout.top_p < 1:
        yield f"rollout.top_p = {rollout.top_p}: {why}; set rollout.top_p=1.0"
    if rollout.top_k > 0:
        yield f"rollout.top_k = {rollout.top_k}: {why}; set rollout.top_k=0"
    if any(not text for text in rollout.stop):
        yield f"rollout.stop = {rollout.stop!r}: an empty text stops nothing; leave it out"


def _algorithm(recipe: Recipe) -> Iterator[str]:
    settings = recipe.algorithm
    traits = TRAITS.get(settings.name)
    if traits is None:
        return
    if recipe.rollout.group_size < traits.min_group_size:
        yield (
            f"rollout.group_size = {recipe.rollout.group_size}: {settings.name} compares the answers to one "
            "prompt and "
            f"needs at least {traits.min_group_size}; set rollout.group_size=8"
        )
    clip_high = traits.clip_high if settings.clip_high is None else settings.clip_high
    if settings.clip_low is not None and settings.clip_low >= 1:
        yield (
            f"algorithm.clip_low = {settings.clip_low}: the ratio is clipped below 1 - clip_low, which must "
            "stay above "
            f"0; set algorithm.clip_low={traits.clip_low}"
        )
    if settings.dual_clip is not None and settings.dual_clip <= 1 + clip_high:
        yield (
            f"algorithm.dual_clip = {settings.dual_clip}: must be above 1 + clip_high = {1 + clip_high:g}, "
            "or it cuts "
            "where the clip is not reached; set algorithm.dual_clip=3.0"
        )
    aggregation = settings.aggregation or traits.aggregation
    if settings.aggregation_length is not None and aggregation != "token_sum_constant":
        yield (
            f"algorithm.aggregation_length = {settings.aggregation_length}: {aggregation} does not use it; "
            "leave it "
            "out, or set algorithm.aggregation=token_sum_constant"
        )
    if settings.advantage_scale == "group_std" and traits.advantage == "leave_one_out":
        yield (
            f"algorithm.advantage_scale = 'group_std': {settings.name} does not divide by a standard "
            "deviation; leave "
            "it out, or set algorithm.name=grpo"
        )
    if settings.correction == "off" and _is_changed(recipe, "algorithm.correction_cap"):
        yield (
            f"algorithm.correction_cap = {settings.correction_cap}: has no effect with algorithm.correction "
            "= 'off'; "
            "leave it out, or set algorithm.correction=auto"
        )


def _kl(recipe: Recipe) -> Iterator[str]:
    settings = recipe.algorithm
    traits = TRAITS.get(settings.name)
    if settings.kl_coef > 0:
        if traits is not None and not traits.accepts_kl:
            takers = " or ".join(name for name, row in TRAITS.items() if row.accepts_kl)
            yield (
                f"algorithm.kl_coef = {settings.kl_coef}: {settings.name} has no KL term and would ignore "
                "it; set "
                f"algorithm.kl_coef=0, or algorithm.name to {takers}"
            )
        elif settings.kl_in == "reward" and _divides_by_std(recipe):
            yield (
                f"algorithm.kl_in = 'reward': {settings.name} divides by the group's standard deviation, which in a "
                "group of equal outcomes is that of the KL's noise alone and would blow it up to full advantages; set "
                "algorithm.kl_in=loss, or algorithm.advantage_scale=none, or algorithm.name to rloo or dr_grpo"
            )
        return
    for key in ("kl_in", "kl_estimator"):
        if _is_changed(recipe, f"algorithm.{key}"):
            value = settings.kl_in if key == "kl_in" else settings.kl_estimator
            yield (
                f"algorithm.{key} = {value!r}: has no effect while algorithm.kl_coef = 0; leave it out, or "
                "set "
                "for example algorithm.kl_coef=0.01"
            )


def _divides_by_std(recipe: Recipe) -> bool:
    """Whether rewards end divided by the standard deviation of their group."""
    settings = recipe.algorithm
    traits = TRAITS.get(settings.name)
    if traits is None or traits.advantage == "leave_one_out":
        return False
    scale = settings.advantage_scale or ("group_std" if traits.advantage == "group_std" else "none")
    return scale == "group_std"


def _learner(recipe: Recipe) -> Iterator[str]:
    tasks, parts = recipe.learner.tasks_per_plan, recipe.learner.mini_batches
    if tasks % parts:
        fitting = max(n for n in range(1, min(parts, tasks) + 1) if tasks % n == 0)
        upwards = -(-tasks // parts) * parts
        yield (
            f"learner.tasks_per_plan = {tasks}: cannot be divided evenly into learner.mini_batches = {parts} "
            f"({tasks % parts} left over); set learner.mini_batches={fitting} or "
            f"learner.tasks_per_plan={upwards}"
        )


def _buffer(recipe: Recipe) -> Iterator[str]:
    buffer, every = recipe.buffer, recipe.weights.every
    if buffer.max_staleness < every - 1:
        yield (
            f"weights.every = {every}: the last plan before a publication trains on groups {every - 1} "
            "versions old; "
            f"set buffer.max_staleness={every - 1} or more, or weights.every={buffer.max_staleness + 1}"
        )
    if buffer.max_reuse > buffer.max_staleness + 1:
        yield (
            f"buffer.max_reuse = {buffer.max_reuse}: each plan makes a new version, so use "
            f"{buffer.max_reuse} of a "
            f"group comes at a staleness of {buffer.max_reuse - 1}, which buffer.max_staleness = "
            f"{buffer.max_staleness} forbids; "
            f"set buffer.max_staleness={buffer.max_reuse - 1}, or learner.epochs for passes within a plan"
        )
    if buffer.sampling == "random" and buffer.max_staleness == 0:
        yield (
            "buffer.sampling = 'random': with buffer.max_staleness = 0 the buffer never holds more than the "
            "next plan, "
            "so there is nothing to pick from; set buffer.max_staleness=1 or more, or "
            "buffer.sampling=in_order"
        )


def _reward(recipe: Recipe) -> Iterator[str]:
    names, weights = recipe.reward.names, recipe.reward.weights
    if any(not name for name in names):
        yield f"reward.fn = {recipe.reward.fn!r}: an empty name; write file.py:name"
    # Functions given as Python objects are counted where they are loaded.
    if names and weights and len(weights) != len(names):
        yield (
            f"reward.weights = {weights}: {len(weights)} for {len(names)} reward functions; give one each, "
            "in the order "
            "of reward.fn, or leave it out"
        )
    if weights and not any(weights):
        yield f"reward.weights = {weights}: every reward would be 0; give at least one weight that is not"


def _placement(recipe: Recipe) -> Iterator[str]:
    for key, gpus in (("rollout.gpus", recipe.rollout.gpus), ("learner.gpus", recipe.learner.gpus)):
        if gpus > 1 and gpus != int(gpus):
            whole = int(gpus)
            yield f"{key} = {gpus}: a share of a GPU must be below 1; set {key}={whole} or {key}={whole + 1}"
    address = recipe.cluster.address
    for key in ("cluster.cpus", "rollout.object_store_memory"):
        if address != "local" and _is_changed(recipe, key):
            yield (
                f"{key}: belongs to a Ray that we start, and cluster.address = {address!r} is one that runs; "
                "leave it out"
            )


def _is_changed(recipe: Recipe, key: str) -> bool:
    """Whether a setting is not at its default."""
    section, name = key.split(".")
    return bool(getattr(getattr(recipe, section), name) != SECTIONS[section].model_fields[name].default)
