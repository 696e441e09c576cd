"""Rules of the house that a linter does not know: sizes, dependencies, floors, what may be committed."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "src").rglob("*.py"))
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
# Hosts of package registries, in pieces, so that this file does not name them either.
REGISTRY_HOSTS = [".".join(parts) for parts in (("pypi", "org"), ("pythonhosted", "org"), ("npmjs", "org"))]


def committed_files() -> list[Path]:
    """Files that git tracks or would track, so that a new one counts before it is added."""
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    if listed.returncode != 0:
        pytest.skip("this copy of the project is not a git checkout")
    return [ROOT / line for line in listed.stdout.splitlines() if (ROOT / line).is_file()]


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def num_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def test_files_are_short() -> None:
    long = {relative(path): num_lines(path) for path in SOURCES if num_lines(path) >= MAX_FILE_LINES}
    assert long == {}


def test_functions_are_short() -> None:
    long = {}
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines >= MAX_FUNCTION_LINES:
                    long[f"{relative(path)}:{node.lineno} {node.name}"] = lines
    assert long == {}


def test_every_module_says_what_it_is() -> None:
    silent = [
        relative(path)
        for path in SOURCES
        if path.read_text(encoding="utf-8").strip()
        and not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert silent == []


def test_at_most_ten_direct_dependencies() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert len(project["dependencies"]) <= 10


def test_every_dependency_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = project["dependencies"] + project["optional-dependencies"]["dev"] + ["setuptools", "pip"]
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert [line for line in pins if not re.fullmatch(r"[\w.-]+==[\w.]+", line)] == []
    pinned = {normal(line.partition("==")[0]) for line in pins}
    names = {normal(re.split(r"[^\w.-]", requirement)[0]) for requirement in asked}
    assert names - pinned == set()


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_no_registry_is_named() -> None:
    found = []
    for path in committed_files():
        text = path.read_bytes().decode("utf-8", errors="ignore")
        found += [f"{relative(path)}: {host}" for host in REGISTRY_HOSTS if host in text]
    assert found == []


@pytest.mark.parametrize(("name", "limit"), [("README.md", 200), ("ARCHITECTURE.md", 150)])
def test_the_pages_stay_short(name: str, limit: int) -> None:
    assert 10 < num_lines(ROOT / name) < limit


def test_links_between_pages_lead_somewhere() -> None:
    broken = []
    for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        targets = re.findall(r"\]\(([^)#:\s]+)\)", (ROOT / name).read_text(encoding="utf-8"))
        broken += [f"{name} -> {target}" for target in targets if not (ROOT / target).exists()]
    assert broken == []


def test_no_page_waits_for_a_figure() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    waiting = re.compile(r"\b(TODO|FIXME|TBD|XXX|MEASURED|PEAK|FIGURE)\b")
    assert [page.name for page in pages if waiting.search(page.read_text(encoding="utf-8"))] == []


def test_the_file_tree_of_the_readme_is_true() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    tree = text.split("<!-- tree -->")[1].split("```")[1]
    package = ROOT / "src/cauce"
    lines = [line for line in tree.splitlines() if line.strip()]
    named = [(package if line.startswith(" ") else ROOT) / line.split()[0] for line in lines]
    assert [relative(path) for path in named if not path.exists()] == []
    inside = {path for path in package.iterdir() if not path.name.startswith(("__", ".", "py.typed"))}
    assert inside - set(named) == set()


def test_imports_keep_to_their_floors() -> None:
    tool = Path(sys.executable).parent / "lint-imports"
    done = subprocess.run([tool, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]


def test_floor_0_loads_no_torch_no_ray_no_transformers() -> None:
    modules = ["cauce.types", "cauce.errors"]
    recipe = ROOT / "src/cauce/recipe"
    modules += [f"cauce.recipe.{path.stem}" for path in sorted(recipe.glob("*.py")) if path.stem != "__init__"]
    code = (
        f"import importlib, sys\nfor name in {modules!r}: importlib.import_module(name)\n"
        "print([name for name in ('torch', 'ray', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
