"""The page as text: what it says, what it escapes, what it does without."""

import json
import logging
import re
from pathlib import Path

import pytest

from cauce.errors import DataError
from cauce.report.html import script_json, write_report
from cauce.report.observer import ReportObserver
from tests.metrics.run_info import run_info
from tests.report.run_folder import HOSTILE, make_run


def test_texts_of_the_run_are_escaped(report: Path) -> None:
    page = report.read_text(encoding="utf-8")
    assert "window.broken = 1</script>" not in page
    assert "&lt;/pre&gt;&lt;script&gt;window.broken = 3" in page  # the recipe
    assert "killed by signal 9 &lt;b&gt;bold&lt;/b&gt;" in page  # an event
    assert "tiny &lt;model&gt;" in page  # the summary


def test_json_block_survives_the_html_around_it(report: Path) -> None:
    page = report.read_text(encoding="utf-8")
    block = re.search(r'<script type="application/json" id="report-data">(.*?)</script>', page, re.DOTALL)
    assert block is not None
    data = json.loads(block[1])
    assert "".join(data["samples"][2]["tokens"]) == HOSTILE + "<|im_end|>"
    assert json.loads(script_json("</script>&<!--")) == "</script>&<!--"


def test_page_tells_the_run(report: Path) -> None:
    page = report.read_text(encoding="utf-8")
    for words in (
        "0.150 &rarr; 0.750",
        "0.052 to 0.360",  # Wilson of 3 of 20
        "50.0 %",  # truncated before
        "<td class=time>2001-09-09 01:46:40</td><td>death</td>",
        "Plans with skipped steps (non-finite numbers): 3",
        "threads 2",
        "isa avx512",
    ):
        assert words in page


def test_a_journal_of_another_format_does_not_cost_the_report(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", num_plans=1)
    for leftover in run_dir.glob("journal.db*"):
        leftover.unlink()
    (run_dir / "journal.db").write_bytes(b"not a database" * 100)
    page = write_report(run_dir).read_text(encoding="utf-8")
    assert "The journal could not be read" in page
    assert "0.150 &rarr; 0.750" in page


def test_a_folder_without_anything_is_a_page_and_no_folder_is_an_error(tmp_path: Path) -> None:
    assert "No plan has been applied yet." in write_report(tmp_path).read_text(encoding="utf-8")
    with pytest.raises(DataError, match="no run at"):
        write_report(tmp_path / "missing")


def test_observer_writes_the_report_at_the_end(tmp_path: Path) -> None:
    observer = ReportObserver()
    observer.on_start(run_info(tmp_path))
    assert not (tmp_path / "report.html").exists()
    observer.on_end({})
    assert (tmp_path / "report.html").exists()


def test_a_report_that_fails_does_not_fail_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "summary.json").write_text("{")
    observer = ReportObserver()
    observer.on_start(run_info(tmp_path))
    with caplog.at_level(logging.ERROR):
        observer.on_end({})
    assert f"cauce report {tmp_path}" in caplog.text
