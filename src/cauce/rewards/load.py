"""Finding a user's reward function and making it fit to travel to another process.

A function comes as text (`file.py:fn`, `pkg.mod:fn`, `pkg.mod.fn`, or the name of a shipped verifier) or, in
Python, as any callable. Of a file without a name the one function that can be meant is taken, and a note says
which; several are an error. A file travels as its path and text and is run again where it arrives, so that no
worker needs the file; a module travels as its name; a callable travels as it is (ray's cloudpickle takes
lambdas and closures by value). Which convention a function follows is settled in adapters.py; scoring is in
reward.py.
"""

import hashlib
import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from cauce.errors import RecipeError, RewardError
from cauce.recipe.models import RewardSettings
from cauce.rewards import verifiers
from cauce.rewards.adapters import RewardFunction, adapt, function_name, is_reward_signature
from cauce.rewards.reward import Reward

SHIPPED: dict[str, Callable[..., Any]] = {
    "last_number": verifiers.last_number,
    "exact_match": verifiers.exact_match,
    "gsm8k": verifiers.gsm8k,
    "boxed": verifiers.boxed,
}
DEFAULT_NAMES = ("compute_score", "reward_func")  # what verl and OpenRLHF call the function of a file

RewardSpec = RewardSettings | str | Callable[..., Any] | Sequence[str | Callable[..., Any]]


def load_reward(spec: RewardSpec, *, settings: RewardSettings | None = None) -> Reward:
    """The reward of a recipe section, of one function or of several.

    Args:
        settings: weights and keyword arguments for functions given in Python; a section brings its own.
    """
    if isinstance(spec, RewardSettings):
        sources: Sequence[str | Callable[..., Any]] = spec.names
        settings = spec
    else:
        sources = [spec] if isinstance(spec, str) or callable(spec) else list(spec)
    weights = list(settings.weights) if settings else []
    kwargs = dict(settings.kwargs) if settings else {}
    if not sources:
        raise RecipeError(
            'reward.fn is empty: name a function, for example reward.fn = "score.py:score" or '
            f"one that ships with Cauce ({', '.join(SHIPPED)})"
        )
    if weights and len(weights) != len(sources):
        raise RecipeError(
            f"reward.weights has {len(weights)} numbers for {len(sources)} reward functions; give one for each"
        )
    located = [_locate(source) for source in sources]
    functions = _with_distinct_names([_adapted(source, kwargs) for source in located])
    for key in kwargs:
        if not any(function.accepts(key) for function in functions):
            raise RecipeError(
                f"reward.kwargs.{key} = {kwargs[key]!r}: no reward function has a parameter {key!r}; "
                f"{functions[0].name} takes {', '.join(functions[0].parameters)}"
            )
    return Reward(
        functions=tuple(functions),
        weights=tuple(weights or [1.0] * len(functions)),
        notes=tuple(source.note for source in located if isinstance(source, FileFunction) and source.note),
    )


@dataclass(slots=True)
class FileFunction:
    """A function of a file, which carries the file's text along."""

    path: str
    source: str
    name: str
    note: str = ""  # why this function, where none was named
    function: Callable[..., Any] | None = field(default=None, repr=False, compare=False)

    def resolve(self) -> Callable[..., Any]:
        """The function itself, by running the text at first use in this process."""
        if self.function is None:
            module = _run_source(self.path, self.source)
            self.function = _pick(vars(module), self.name, f"{self.path}")
        return self.function

    def __reduce__(self) -> tuple[Any, ...]:
        return FileFunction, (self.path, self.source, self.name)


@dataclass(slots=True)
class ModuleFunction:
    """A function of an importable module, which travels as a name."""

    module: str
    name: str
    folder: str  # working directory of the driver, searched last
    function: Callable[..., Any] | None = field(default=None, repr=False, compare=False)

    def resolve(self) -> Callable[..., Any]:
        """The function itself, by importing the module at first use in this process."""
        if self.function is None:
            _search_also(self.folder)
            try:
                module = importlib.import_module(self.module)
            except ModuleNotFoundError as error:
                raise RewardError(
                    f"reward {self.module}:{self.name}: {error}; it is looked for among installed packages "
                    f"and in {self.folder}. Install it, start from its folder, or give the file as "
                    "path.py:function"
                ) from error
            self.function = _pick(vars(module), self.name, self.module)
        return self.function

    def __reduce__(self) -> tuple[Any, ...]:
        return ModuleFunction, (self.module, self.name, self.folder)


@dataclass(frozen=True, slots=True)
class GivenFunction:
    """A callable handed over in Python."""

    function: Callable[..., Any]

    def resolve(self) -> Callable[..., Any]:
        """The callable as it was given."""
        return self.function


def _adapted(source: FileFunction | ModuleFunction | GivenFunction, kwargs: dict[str, Any]) -> RewardFunction:
    return adapt(source, name=function_name(source.resolve()), kwargs=kwargs)


def _locate(source: str | Callable[..., Any]) -> FileFunction | ModuleFunction | GivenFunction:
    if isinstance(source, str):
        return _locate_text(source)
    if not callable(source):
        raise RewardError(f"a reward is a function or its name, not {type(source).__name__}: {source!r}")
    return GivenFunction(source)


def _locate_text(text: str) -> FileFunction | ModuleFunction | GivenFunction:
    if text in SHIPPED:
        return GivenFunction(SHIPPED[text])
    where, colon, name = text.rpartition(":")
    if not colon or "/" in name or "\\" in name:  # a colon of C:\ is no separator
        where, name = text, ""
    if where.endswith(".py"):
        return _file_function(where, name, text)
    if not name:
        where, dot, name = where.rpartition(".")
        if not dot:
            raise RewardError(
                f"reward.fn = {text!r} names no function: write file.py:function or package.module:function, "
                f"or one that ships with Cauce ({', '.join(SHIPPED)})"
            )
    return ModuleFunction(where, name, str(Path.cwd()))


def _file_function(where: str, name: str, text: str) -> FileFunction:
    path = Path(where).expanduser()
    if not path.is_file():
        raise RewardError(f"reward.fn = {text!r}: there is no file {path} (looked in {Path.cwd()})")
    try:
        source = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RewardError(f"reward file {path} cannot be read as UTF-8 text: {_first_line(error)}") from error
    full = str(path.resolve())
    if name:
        return FileFunction(full, source, name)
    name, why = _only_choice(_run_source(full, source), where)
    return FileFunction(full, source, name, f"reward.fn = {text!r} names no function: {name} is taken, {why}")


def _only_choice(module: ModuleType, where: str) -> tuple[str, str]:
    """The function that a file without a name stands for, and why: the habitual name, or the only one that fits."""
    names = vars(module)
    found = [default for default in DEFAULT_NAMES if default in names]
    if len(found) == 1:
        return found[0], "the name that files for other trainers give it"
    own = [n for n, value in names.items() if isinstance(value, FunctionType) and value.__module__ == module.__name__]
    fitting = found or [n for n in own if n[:1] != "_" and is_reward_signature(names[n])]
    if len(fitting) == 1:
        return fitting[0], "the only function there with the parameters of a reward"
    several = f"{' and '.join(fitting)} could each be meant"
    problem = several if fitting else f"none has the parameters of a reward ({_functions_of(names)})"
    example = (fitting or own or ["score"])[0]
    raise RewardError(f"reward.fn = {where!r} names no function, and {problem}; write reward.fn={where}:{example}")


def _run_source(path: str, source: str) -> ModuleType:
    """The module of a file's text. Siblings of the file can be imported where its folder exists."""
    digest = hashlib.sha256(f"{path}\n{source}".encode()).hexdigest()[:12]
    name = f"cauce_reward_{Path(path).stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    module = ModuleType(name)
    module.__file__ = path
    _search_also(str(Path(path).parent))
    # Dataclasses and typing look classes up by their module's name, so the module has to be findable while it
    # runs.
    sys.modules[name] = module
    try:
        exec(compile(source, path, "exec"), module.__dict__)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, Exception | SystemExit):
            raise RewardError(f"reward file {path} fails while it is loaded: {_first_line(error)}") from error
        raise
    return module


def _pick(names: dict[str, Any], dotted: str, where: str) -> Callable[..., Any]:
    """A function, a static method as `Class.method`, or an instance of a class of that name."""
    first, *rest = dotted.split(".")
    found = names.get(first)
    for part in rest:
        found = vars(found).get(part) if isinstance(found, type | ModuleType) else None
        found = found.__func__ if isinstance(found, staticmethod) else found
    if found is None:
        raise RewardError(f"reward {where}:{dotted}: {where} has no {dotted!r} ({_functions_of(names)})")
    if isinstance(found, type):
        try:
            found = found()
        except Exception as error:
            raise RewardError(
                f"reward {where}:{dotted}: the class cannot be made without arguments ({_first_line(error)}); give "
                "them defaults, or name an instance of it"
            ) from error
    if not callable(found):
        raise RewardError(f"reward {where}:{dotted} is {type(found).__name__}, not a function")
    function: Callable[..., Any] = found
    return function


def _functions_of(names: dict[str, Any]) -> str:
    found = sorted(name for name, value in names.items() if isinstance(value, FunctionType) and name[:1] != "_")
    return f"its functions: {', '.join(found)}" if found else "it has no functions"


def _search_also(folder: str) -> None:
    if folder not in sys.path and Path(folder).is_dir():
        sys.path.append(folder)


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _with_distinct_names(functions: list[RewardFunction]) -> list[RewardFunction]:
    """A second function of one name becomes name_2: metrics must not be mixed."""
    seen: dict[str, int] = {}
    distinct = []
    for function in functions:
        seen[function.name] = seen.get(function.name, 0) + 1
        count = seen[function.name]
        distinct.append(function if count == 1 else function.renamed(f"{function.name}_{count}"))
    return distinct
