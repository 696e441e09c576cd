"""Files of every kind, odd content, and what is said when there is nothing to read."""

import csv
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cauce.data.source import RowSource, load_rows
from cauce.errors import DataError, RecipeError
from cauce.recipe.models import DataSettings

ROWS = [{"question": f"{n} + 1?", "answer": str(n + 1), "level": n % 2} for n in range(5)]


def load(spec: Any, **settings: Any) -> RowSource:
    """Training rows."""
    return load_rows(str(spec) if isinstance(spec, Path) else spec, settings=DataSettings(**settings), split="train")


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    """One JSON object a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_every_file_kind_and_an_iterable_give_the_same_rows(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "rows.jsonl", ROWS)
    write_jsonl(tmp_path / "lines.json", ROWS)
    (tmp_path / "list.json").write_text(json.dumps(ROWS))
    (tmp_path / "wrapped.json").write_text(json.dumps({"data": ROWS}))
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "rows.parquet", row_group_size=2)
    expected = load(iter(ROWS))
    for name in ("rows.jsonl", "lines.json", "list.json", "wrapped.json", "rows.parquet"):
        source = load(tmp_path / name)
        assert list(source) == list(expected), name
        assert source.digest == expected.digest
    assert [row.id for row in expected] == [f"train:{i}" for i in range(5)]
    assert expected.columns == ("question", "answer", "level", "gold")
    assert load([*ROWS[:4], {**ROWS[4], "answer": "7"}]).digest != expected.digest


def test_csv_reads_quoted_cells_and_empty_ones_as_none(tmp_path: Path) -> None:
    with (tmp_path / "rows.csv").open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.writer(file)
        writer.writerows([["question", "answer", "hint"], ["a,\nb?", "1", ""], ["c?", "2", "h"]])
    source = load(tmp_path / "rows.csv")
    assert [row.prompt for row in source] == ["a,\nb?", "c?"]
    assert [row.columns["hint"] for row in source] == [None, "h"]
    (tmp_path / "rows.csv").write_text("question,answer\na?,1\nb?\n")
    with pytest.raises(DataError, match=r"rows\.csv, line 3: another number of cells"):
        load(tmp_path / "rows.csv")


def test_globs_and_folders_keep_the_order_of_names_and_skip_empty_files(tmp_path: Path, caplog) -> None:
    write_jsonl(tmp_path / "b.jsonl", ROWS[3:])
    write_jsonl(tmp_path / "a.jsonl", ROWS[:3])
    (tmp_path / "c.jsonl").touch()
    (tmp_path / "README.md").write_text("not data")
    with caplog.at_level(logging.WARNING):
        for spec in (tmp_path / "*.jsonl", tmp_path):
            source = load(spec)
            assert list(source) == list(load(ROWS))
            assert any("c.jsonl is empty" in warning for warning in source.warnings)
    assert "c.jsonl is empty and was skipped" in caplog.text


def test_nested_parquet_becomes_plain_python(tmp_path: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": "q"}], "extra_info": {"ids": [1, 2], "deep": [{"a": [3]}]}}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    assert load(tmp_path / "rows.parquet")[0].columns["extra_info"] == rows[0]["extra_info"]
    frame_like = [{"prompt": np.array(rows[0]["prompt"], dtype=object), "extra_info": {"ids": np.array([1, 2])}}]
    assert load(frame_like)[0].prompt == rows[0]["prompt"]
    assert load(frame_like)[0].columns["extra_info"] == {"ids": [1, 2]}


def test_null_for_a_hundred_rows_then_text(tmp_path: Path) -> None:
    for part in range(4):
        rows = [{"question": "q", "answer": None if part == 0 else "7"} for _ in range(100)]
        write_jsonl(tmp_path / f"{part}.jsonl", rows)
    source = load(tmp_path)
    assert source.shape == "question_answer"
    assert [source.gold(row) for row in source] == [None] * 100 + ["7"] * 300
    assert any("100 of 400 rows have no gold answer" in warning for warning in source.warnings)


def test_numbers_in_one_file_and_text_in_another_become_text(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"question": "q", "answer": 7, "level": 1, "meta": {"n": 1}}])
    write_jsonl(tmp_path / "b.jsonl", [{"question": "q", "answer": "7", "level": 2, "meta": {"n": "x"}}])
    source = load(tmp_path)
    assert [source.gold(row) for row in source] == ["7", "7"]
    assert [row.columns["level"] for row in source] == [1, 2]
    assert [row.columns["meta"] for row in source] == [{"n": "1"}, {"n": "x"}]
    assert any("column answer holds numbers and text" in warning for warning in source.warnings)


def test_a_column_that_some_rows_lack_is_none_there() -> None:
    source = load([{"prompt": "p"}, {"prompt": "q", "answer": "4"}])
    assert [row.columns["answer"] for row in source] == [None, "4"]


def test_bad_lines_name_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "p"}\n\n{"prompt": oops}\n')
    with pytest.raises(DataError, match=r"rows\.jsonl, line 3: not JSON"):
        load(path)
    path.write_text('{"prompt": "p"}\n["no", "object"]\n')
    with pytest.raises(DataError, match=r"rows\.jsonl, line 2: a list, not an object"):
        load(path)
    path.write_text('{"prompt": "p"}\n\n{"prompt": ""}\n')
    with pytest.raises(DataError, match=r"rows\.jsonl, line 3: the prompt is empty"):
        load(path)
    (tmp_path / "rows.json").write_text('[\n{"prompt": }]')
    with pytest.raises(DataError, match=r"rows\.json, line 2: not JSON"):
        load(tmp_path / "rows.json")
    (tmp_path / "rows.parquet").write_bytes(b"no parquet at all")
    with pytest.raises(DataError, match=r"rows\.parquet: cannot be read as parquet"):
        load(tmp_path / "rows.parquet")


def test_nothing_to_read_is_said(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "rows.txt").write_text("text")
    for spec, words in (
        (tmp_path / "missing.jsonl", "no such file"),
        (tmp_path / "*.parquet", "no such file"),
        (tmp_path / "rows.txt", r"files of kind \.txt are not read"),
        (tmp_path / "empty.jsonl", r"has 0 rows; .*empty\.jsonl is empty"),
        ([], "the given rows has 0 rows"),
        ("builtin:substraction/train", "there are builtin:addition/train"),
        ({"train": [], "test": []}, r'mapping with the keys train, test.*rows\["train"\]'),
        (["text"], "element 0 is str, not a dict"),
    ):
        with pytest.raises(DataError, match=words):
            load(spec)
    with pytest.raises(RecipeError, match=r"data\.train is empty"):
        load("")


def test_a_hub_id_without_the_package_is_refused_in_words() -> None:
    if importable("datasets"):
        pytest.skip("datasets is installed here, so that hub ids are asked of the hub")
    with pytest.raises(DataError, match="needs the package datasets"):
        load("openai/gsm8k:main")


def importable(name: str) -> bool:
    """Whether a package is installed."""
    import importlib.util

    return importlib.util.find_spec(name) is not None


def test_builtin_addition() -> None:
    train, test = load("builtin:addition/train"), load("builtin:addition/test")
    assert len(test) >= 200
    assert train.gold(train[0]) == train[0].columns["answer"]
    assert train.digest != test.digest
