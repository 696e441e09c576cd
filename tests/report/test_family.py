"""The report of a fork shows its source, that of the source its forks: real tiny runs, forked."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from cauce.report.family import family
from cauce.report.html import write_report
from cauce.stages.fork import fork
from tests.local_session import train_locally, use_local_session
from tests.tiny import tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source, two forks of it, a fork of a fork, and a stranger."""
    folder = tmp_path_factory.mktemp("runs")
    model = tiny_model(tmp_path_factory.mktemp("model"))
    with pytest.MonkeyPatch.context() as patch:
        use_local_session(patch)
        for name in ("source", "stranger"):
            train_locally(model, folder / name, run__plans=4)
        for name, origin, at, change in (
            ("faster", "source", 1, "learner.lr=0.05"),
            ("dr", "source", 2, "algorithm.name=dr_grpo"),
            ("grandchild", "dr", 3, "learner.lr=0.001"),
        ):
            fork(folder / origin, at=at, overrides=[f"run.name={name}", change])
    return folder


def names(run: Path) -> list[str]:
    return [relative.name for relative in family(run)[1]]


def test_relatives_are_the_source_the_forks_and_their_siblings(folder: Path) -> None:
    assert names(folder / "source") == ["dr", "faster"]
    assert names(folder / "faster") == ["source", "dr"]
    assert names(folder / "dr") == ["source", "faster", "grandchild"]
    assert names(folder / "grandchild") == ["dr"]
    assert names(folder / "stranger") == []
    own, others = family(folder / "dr")
    assert (own.forked_at, own.changes) == (2, "algorithm.name: 'grpo' -> 'dr_grpo'")
    assert others[0].forked_at is None
    assert [row["plan"] for row in others[1].rows] == [2, 3, 4]


def figures_of(page: str) -> dict[str, Any]:
    block = re.search(r'<script type="application/json" id="report-data">(.*?)</script>', page, re.DOTALL)
    assert block is not None
    return {figure["key"]: figure for figure in json.loads(block[1])["figures"]}


def test_the_page_of_a_fork_overlays_both(folder: Path) -> None:
    page = write_report(folder / "faster").read_text(encoding="utf-8")
    assert "Original and forks" in page
    assert "learner.lr: 0.01 -&gt; 0.05" in page
    assert "A fork generates nothing, so it has no evaluation." in page
    assert "reward of training samples" not in page  # the source's, not its own
    assert "Nothing went wrong and nothing was restarted." in page  # a fork is no incident
    figures = figures_of(page)
    assert [trace["name"] for trace in figures["loss-policy"]["traces"]] == ["source", "dr", "faster"]
    source, other, own = figures["optim-grad_norm"]["traces"]
    assert (source["x"], other["x"], own["x"]) == ([1, 2, 3, 4], [3, 4], [2, 3, 4])
    assert source["y"][1:] != own["y"]
    assert [len(figures[key]["traces"]) for key in ("sampler-effective_sample_size", "response-length_mean")] == [2, 1]
    assert "tokens_per_s" not in figures


def test_a_run_that_is_alone_has_no_such_section(folder: Path) -> None:
    page = write_report(folder / "stranger").read_text(encoding="utf-8")
    assert "Original and forks" not in page
    assert [trace["name"] for trace in figures_of(page)["loss-policy"]["traces"]] == ["loss/policy"]
