"""Every setting has an effect: some code outside the recipe layer reads it.

A reading is an attribute access `<owner>.<name>` in src/cauce, where the owner is `....<section>` or a name
that the same file binds to that section: by an annotation with the section's class, or by assignment from one
that is bound.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from cauce.errors import RecipeError
from cauce.recipe import models
from cauce.recipe.checks import check_recipe
from cauce.recipe.load import recipe_from_tables
from cauce.recipe.models import SECTIONS
from cauce.recipe.names import KNOWN_KEYS

PACKAGE = Path(models.__file__).parents[1]

# Refused by a check unless they have the one value that exists, so nothing reads them; with a refused value.
REFUSED_UNLESS_DEFAULT = {
    "stage": "sft",
    "journal.keep": "since_checkpoint",
    "rollout.top_p": 0.5,
    "rollout.top_k": 5,
}

SECTION_OF_CLASS = {model.__name__: section for section, model in SECTIONS.items()}


def settings_read(source: str) -> set[str]:
    """The settings that a source text reads."""
    tree = ast.parse(source)
    bound = _bound_names(tree)
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            for section in _sections_of(node.value, bound):
                found |= {f"{section}.{name}" for name in _fields_behind(section, node.attr)}
    return found


def _bound_names(tree: ast.Module) -> dict[str, set[str]]:
    """Names and attributes of a file that hold a section, found by going round until nothing is new."""
    bound: dict[str, set[str]] = {}
    pairs = list(_assignments(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.arg) and node.annotation is not None:
            _add(bound, node.arg, _annotated(node.annotation))
        elif isinstance(node, ast.AnnAssign):
            _add(bound, _last_name(node.target), _annotated(node.annotation))
    grew = True
    while grew:
        grew = False
        for target, value in pairs:
            grew |= _add(bound, _last_name(target), _sections_of(value, bound))
    return bound


def _assignments(tree: ast.Module) -> Iterator[tuple[ast.expr, ast.expr]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    yield from zip(target.elts, node.value.elts, strict=False)
                else:
                    yield target, node.value
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            yield node.target, node.value


def _add(bound: dict[str, set[str]], name: str, sections: set[str]) -> bool:
    known = bound.setdefault(name, set()) if name and sections else set()
    grew = not sections <= known
    known |= sections
    return grew and bool(name)


def _annotated(annotation: ast.expr) -> set[str]:
    text = ast.unparse(annotation)
    return {section for name, section in SECTION_OF_CLASS.items() if name in text}


def _sections_of(node: ast.expr, bound: dict[str, set[str]]) -> set[str]:
    name = _last_name(node)
    own = {name} if isinstance(node, ast.Attribute) and name in SECTIONS else set()
    return own | bound.get(name, set())


def _last_name(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _fields_behind(section: str, attribute: str) -> set[str]:
    """The field itself, or those that a property of the section's class reads."""
    fields = set(SECTIONS[section].model_fields)
    if attribute in fields:
        return {attribute}
    tree = ast.parse(Path(models.__file__).read_text("utf-8"))
    owner = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == SECTIONS[section].__name__)
    for method in owner.body:
        if isinstance(method, ast.FunctionDef) and method.name == attribute:
            return {n.attr for n in ast.walk(method) if isinstance(n, ast.Attribute)} & fields
    return set()


def unread_settings() -> set[str]:
    found: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        if "recipe" not in path.relative_to(PACKAGE).parts[:-1]:
            found |= settings_read(path.read_text("utf-8"))
    return set(KNOWN_KEYS) - found


def test_every_setting_is_read_outside_the_recipe_layer() -> None:
    """J1."""
    assert unread_settings() - set(REFUSED_UNLESS_DEFAULT) == set()


@pytest.mark.parametrize("key", sorted(REFUSED_UNLESS_DEFAULT))
def test_settings_that_nothing_reads_are_refused_unless_at_their_default(key: str) -> None:
    """J1."""
    section, _, name = key.partition(".")
    value = REFUSED_UNLESS_DEFAULT[key]
    with pytest.raises(RecipeError, match=key):
        check_recipe(recipe_from_tables({section: {name: value}} if name else {section: value}))


def test_the_allow_list_names_settings_that_exist() -> None:
    assert {"stage", *KNOWN_KEYS} >= set(REFUSED_UNLESS_DEFAULT)


@pytest.mark.parametrize(
    ("source", "read"),
    [
        ("print(recipe.learner.lr)", {"learner.lr"}),
        ("def f(s: LearnerSettings): return s.lr + s.eps", {"learner.lr", "learner.eps"}),
        ("def f(s: 'LearnerSettings | None'): return s.lr", {"learner.lr"}),
        ("class A:\n def __init__(self, s: EvalSettings): self._s = s\n def g(self): return self._s.every",
         {"eval.every"}),
        ("a, b = recipe.eval, recipe.weights\nprint(a.tasks, b.every)", {"eval.tasks", "weights.every"}),
        ("print(recipe.reward.names)", {"reward.fn"}),
        ("print(lr, thing.lr, other.every, names)", set()),
        ("recipe.learner.lr = 3", set()),
        ("# recipe.learner.lr\nx = 'recipe.learner.lr'", set()),
    ],
)  # fmt: skip
def test_the_reader_of_sources_sees_readings_and_nothing_else(source: str, read: set[str]) -> None:
    assert settings_read(source) == read
