"""The list of metric names, and the page made from it."""

from pathlib import Path

import pytest

from cauce.metrics.names import METRICS, TIME_PARTS, is_known, markdown


def test_the_page_is_current() -> None:
    page = Path(__file__).parents[2] / "docs" / "metrics.md"
    assert page.read_text() == markdown(), "run: python -m cauce.metrics.names > docs/metrics.md"


@pytest.mark.parametrize(
    "name",
    [
        "reward/mean",
        "reward/last_number/mean",
        "eval/test/accuracy",
        "time/checksum",
        "reward/acc",
        "rollout/dropped_stale",
    ]
    + [name for names in TIME_PARTS.values() for name in names],
)
def test_known_names(name: str) -> None:
    assert is_known(name)


@pytest.mark.parametrize(
    "name",
    [
        "policy/entorpy",
        "rollout/dropped_",
        "reward/a/b/mean",
        "eval/accuracy",
        "rewardXmean",
        "reward/mean/x/y",
    ],
)
def test_unknown_names(name: str) -> None:
    assert not is_known(name)


def test_each_name_once_with_a_meaning_of_one_line() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    assert all(metric.meaning and "\n" not in metric.meaning for metric in METRICS)
