"""docs/recipe.md says what the code says."""

from pathlib import Path

import pytest

from cauce.recipe.document import main, render
from cauce.recipe.foreign import FOREIGN
from cauce.recipe.models import SECTIONS

PAGE = Path(__file__).parents[2] / "docs" / "recipe.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text("utf-8") == render(), "run: python -m cauce.recipe.document"


def test_the_page_holds_every_setting_and_every_foreign_name() -> None:
    page = render()
    for section, model in SECTIONS.items():
        part = page.split(f"## [{section}]\n")[1].split("\n## ")[0]
        rows = [line.split(" | ")[0].removeprefix("| ") for line in part.splitlines() if line.startswith("| `")]
        assert rows == [f"`{name}`" for name in model.model_fields]
    for rows in FOREIGN.values():
        for row in rows:
            assert all(f"`{name}`" in page for name in row.names)


def test_tables_are_well_formed_and_ascii() -> None:
    page = render()
    assert page.isascii()
    width = 0
    for line in page.splitlines():
        if not line.startswith("|"):
            width = 0
            continue
        width = width or line.count("|")
        assert line.count("|") == width, line


def test_the_page_is_written_where_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(tmp_path / "page.md")])
    assert (tmp_path / "page.md").read_text("utf-8") == render()
    assert "page.md" in capsys.readouterr().out
