"""The three conventions in which reward functions are written, told apart by their parameter names.

    completions            native, the same as TRL's: one call for all answers, columns as lists
    solution_str           verl's compute_score: one call per answer
    queries and labels     OpenRLHF's reward_func: one call per answer, in lists of length 1

Each is `def` or `async def`. An adapter turns answers into calls and what the calls return into one value per
answer: a number, None (the function abstains) or a Failure. Finding functions is in load.py, adding them up
in reward.py.
"""

import inspect
import math
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, Protocol

from cauce.errors import RewardError
from cauce.types import Row

Kind = Literal["native", "verl", "openrlhf"]

# Never taken from the data: these are what a call itself provides.
_NATIVE_RESERVED = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
_NOT_COLUMNS = ("prompt", "completion", "completion_ids", "environments", *_NATIVE_RESERVED)
_VERL_PROVIDED = ("data_source", "solution_str", "ground_truth", "extra_info")
_OPENRLHF_PROVIDED = ("queries", "prompts", "labels")


@dataclass(frozen=True, slots=True)
class Failure:
    """A function that raised, or that returned something that is no number, for one answer."""

    detail: str


Value = float | None | Failure


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """What reward functions read about the progress of training."""

    global_step: int
    max_steps: int
    epoch: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """The answers to be scored in one go, with all that any convention shows to a function."""

    rows: Sequence[Row]
    texts: Sequence[str]
    token_ids: Sequence[Sequence[int]]
    prompt_texts: Sequence[str]  # rendered prompts
    state: TrainerState

    def slice(self, start: int, stop: int) -> "Answers":
        """The answers start..stop-1."""
        return replace(
            self,
            rows=self.rows[start:stop],
            texts=self.texts[start:stop],
            token_ids=self.token_ids[start:stop],
            prompt_texts=self.prompt_texts[start:stop],
        )


@dataclass(slots=True)
class Log:
    """What functions reported beside their scores: numbers by metric name, and columns for the record."""

    metrics: dict[str, list[float]] = field(default_factory=dict)
    extras: dict[str, list[Any]] = field(default_factory=dict)

    def metric(self, name: str, value: float) -> None:
        """Keep one number; several of one name are averaged in the end."""
        self.metrics.setdefault(name, []).append(float(value))

    def extra(self, name: str, values: Sequence[Any]) -> None:
        """Keep one column."""
        self.extras.setdefault(name, []).extend(values)


class Source(Protocol):
    """Where a function comes from; travels to the process that scores."""

    def resolve(self) -> Callable[..., Any]:
        """The function itself."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFunction:
    """One user function with its convention. `parameters` maps names to whether they must be given."""

    source: Source
    name: str
    kind: Kind
    parameters: dict[str, bool]
    takes_any: bool  # has **kwargs
    kwargs: dict[str, Any]  # extra keyword arguments of the recipe, those it accepts

    def accepts(self, key: str) -> bool:
        """Whether the function can be given this keyword."""
        return self.takes_any or key in self.parameters

    def renamed(self, name: str) -> "RewardFunction":
        """The same function under another metric name."""
        return replace(self, name=name)

    def columns_read(self, columns: Collection[str]) -> list[str]:
        """Which of the data's columns the function is given."""
        if self.kind == "native":
            return [c for c in columns if c not in _NOT_COLUMNS and self.accepts(c)]
        wanted = {"verl": ("data_source", "reward_model", "extra_info"), "openrlhf": ("label",)}[self.kind]
        gold = "gold" if self.kind == "openrlhf" or "reward_model" not in columns else ""
        return [c for c in columns if c in wanted or c == gold]

    def require(self, columns: Collection[str]) -> None:
        """Raise if a parameter without a default is provided neither by the call nor by the data."""
        if self.kind == "native":
            provided = {*_NATIVE_RESERVED, *(c for c in columns if c not in _NOT_COLUMNS)}
        elif self.kind == "verl":
            provided = set(_VERL_PROVIDED) if {"reward_model", "gold"} & set(columns) else {"solution_str"}
            provided |= {"data_source", "extra_info"}
        else:
            provided = set(_OPENRLHF_PROVIDED)
        for key, is_required in self.parameters.items():
            if is_required and key not in provided and key not in self.kwargs:
                setting = "data.gold_key" if key in ("ground_truth", "gold") else f"data.columns.{key}"
                raise RewardError(
                    f"reward {self.name} needs {key!r}, and the data has no such column (it has: "
                    f"{', '.join(sorted(columns)) or 'none'}). Name the column with {setting}, or give "
                    f"reward.kwargs.{key}"
                    + ("; or call the parameter gold, which is the answer of every row" if "gold" in columns else "")
                )

    def start(self, answers: Answers, log: Log) -> list[Any]:
        """Make the calls; what comes back per call is a value, an awaitable or a Failure."""
        function = self.source.resolve()
        arguments = {
            "native": self._native_arguments,
            "verl": self._verl_arguments,
            "openrlhf": self._openrlhf_arguments,
        }[self.kind](answers, log)
        return [call_safely(function, keywords) for keywords in arguments]

    def finish(self, answers: Answers, results: list[Any], log: Log) -> list[Value]:
        """One value per answer, out of what the calls returned."""
        if self.kind == "native":
            return self._read_list(results[0], len(answers.texts))
        return [self._read_one(result, log) for result in results]

    def _native_arguments(self, answers: Answers, log: Log) -> list[dict[str, Any]]:
        keywords: dict[str, Any] = {
            name: [row.columns.get(name) for row in answers.rows]
            for name in dict.fromkeys(name for row in answers.rows for name in row.columns)
            if name not in _NOT_COLUMNS
        }
        keywords |= self.kwargs
        keywords |= {
            "prompts": [row.prompt for row in answers.rows],
            "completions": [
                text if isinstance(row.prompt, str) else [{"role": "assistant", "content": text}]
                for row, text in zip(answers.rows, answers.texts, strict=True)
            ],
            "completion_ids": [[int(i) for i in ids] for ids in answers.token_ids],
            "trainer_state": answers.state,
            "log_extra": log.extra,
            "log_metric": lambda name, value: log.metric(f"reward/{self.name}/{name}", value),
        }
        return [self._accepted(keywords)]

    def _verl_arguments(self, answers: Answers, _log: Log) -> list[dict[str, Any]]:
        calls = []
        for row, text in zip(answers.rows, answers.texts, strict=True):
            model = row.columns.get("reward_model")
            has_truth = isinstance(model, Mapping) and "ground_truth" in model
            extra = row.columns.get("extra_info")
            keywords = {
                **self.kwargs,
                "data_source": row.columns.get("data_source"),
                "solution_str": text,
                "ground_truth": model["ground_truth"] if has_truth and model else row.columns.get("gold"),
                # One question and one answer are two turns, as verl counts them.
                "extra_info": {**(extra or {}), "num_turns": 2, "rollout_reward_scores": {}},
            }
            calls.append(self._accepted(keywords))
        return calls

    def _openrlhf_arguments(self, answers: Answers, _log: Log) -> list[dict[str, Any]]:
        calls = []
        for row, text, prompt in zip(answers.rows, answers.texts, answers.prompt_texts, strict=True):
            label = row.columns["gold"] if "gold" in row.columns else row.columns.get("label")
            keywords = {**self.kwargs, "queries": [prompt + text], "prompts": [prompt], "labels": [label]}
            calls.append(self._accepted(keywords))
        return calls

    def _accepted(self, keywords: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in keywords.items() if self.accepts(key)}

    def _read_list(self, result: Any, count: int) -> list[Value]:
        if isinstance(result, Failure):
            return [result] * count
        values = _listed(result)
        if values is None:
            raise RewardError(
                f"reward {self.name} returned {type(result).__name__} where a list of {count} numbers (or "
                "None) was expected, one for each completion"
            )
        if len(values) != count:
            raise RewardError(
                f"reward {self.name} returned {len(values)} values for {count} completions; it must return "
                "one number (or None) for each"
            )
        return [self._number(value) for value in values]

    def _read_one(self, result: Any, log: Log) -> Value:
        if isinstance(result, Failure):
            return result
        if not isinstance(result, Mapping):
            values = _listed(result)
            return self._number(values[0] if values is not None and len(values) == 1 else result)
        key = "score" if self.kind == "verl" else "rewards"
        if key not in result:
            return Failure(f"{self.name} returned a dict without {key!r} (keys: {', '.join(map(str, result))})")
        others = result.get("extra_logs", {}) if self.kind == "openrlhf" else result
        for name, value in others.items():
            number = self._number(_single(value))
            if name != key and isinstance(number, float):
                log.metric(f"reward/{self.name}/{name}", number)
        return self._number(_single(result[key]))

    def _number(self, value: Any) -> Value:
        if value is None:
            return None
        if isinstance(value, str):
            return Failure(f"{self.name} returned the text {value[:40]!r}, not a number")
        try:
            number = float(value)
        except (TypeError, ValueError):
            return Failure(f"{self.name} returned {type(value).__name__}, not a number")
        return number if math.isfinite(number) else Failure(f"{self.name} returned {number}")


def adapt(source: Source, *, name: str, kwargs: dict[str, Any]) -> RewardFunction:
    """Recognise the convention of a function and keep what a call needs to know of its signature."""
    function = source.resolve()
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise RewardError(f"reward {name}: its parameters cannot be read ({error}); wrap it in a def") from error
    names = {p.name: p.default is p.empty for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    kind = _kind_of(names, takes_any, name)
    accepted = {key: value for key, value in kwargs.items() if takes_any or key in names}
    return RewardFunction(source=source, name=name, kind=kind, parameters=names, takes_any=takes_any, kwargs=accepted)


def is_reward_signature(function: Callable[..., Any]) -> bool:
    """Whether the parameters of a function name exactly one convention; a bare `**kwargs` names none."""
    return len(_kinds_of(inspect.signature(function).parameters)) == 1


def function_name(function: Callable[..., Any]) -> str:
    """The name under which a function's scores are reported."""
    while isinstance(function, partial):
        function = function.func
    if inspect.isroutine(function) or inspect.isclass(function):
        name = function.__name__
        return "lambda" if name == "<lambda>" else name
    return type(function).__name__


def call_safely(function: Callable[..., Any], keywords: dict[str, Any]) -> Any:
    """Call a user's function; whatever it raises becomes a Failure."""
    try:
        return function(**keywords)
    except (
        Exception,
        SystemExit,
    ) as error:  # the boundary around foreign code: a bad answer must not stop a run
        return Failure(describe(error))


def describe(error: BaseException) -> str:
    """One line: what was raised, and where in the innermost frame."""
    first = (f"{type(error).__name__}: {error}".splitlines() or [""])[0]
    frames = traceback.extract_tb(error.__traceback__)
    return f"{first} ({frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name})" if frames else first


def _kinds_of(names: Collection[str]) -> list[Kind]:
    found: list[Kind] = []
    if "completions" in names:
        found.append("native")
    if "solution_str" in names:
        found.append("verl")
    if "queries" in names and "labels" in names:
        found.append("openrlhf")
    return found


def _kind_of(names: Collection[str], takes_any: bool, name: str) -> Kind:
    found = _kinds_of(names)
    if len(found) == 1:
        return found[0]
    if len(found) > 1:
        raise RewardError(
            f"reward {name}: its parameters match two conventions, {found[0]} and {found[1]}; rename one of them"
        )
    if takes_any and not names:
        return "native"
    if "completion" in names:
        raise RewardError(
            f"reward {name} takes a single `completion`, as verifiers 0.x writes it, which is not supported. "
            "Take `completions` (a list) and return a list of numbers"
        )
    raise RewardError(
        f"reward {name} takes ({', '.join(names)}), which is no known convention. Write "
        "`def score(completions, **columns)` returning a list of numbers (as in TRL), verl's "
        "`compute_score(data_source, solution_str, ground_truth, extra_info)` or OpenRLHF's "
        "`reward_func(queries, prompts, labels)`"
    )


def _listed(result: Any) -> list[Any] | None:
    """A list, tuple, array or tensor as a list; None for anything else."""
    if isinstance(result, list | tuple):
        return list(result)
    tolist = getattr(result, "tolist", None)  # numpy and torch, neither of which is imported here
    values = tolist() if callable(tolist) else None
    return values if isinstance(values, list) else None


def _single(value: Any) -> Any:
    values = _listed(value)
    return values[0] if values is not None and len(values) == 1 else value
