"""metrics.jsonl: each plan once, whatever happened to the process."""

import json
import logging
from pathlib import Path

import pytest

from cauce.metrics.writer import MetricsWriter, read_metrics


def lines(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def write_plans(run_dir: Path, plans: range, reward: float) -> MetricsWriter:
    writer = MetricsWriter(run_dir, clock=lambda: 100.0 + reward)
    for plan in plans:
        writer.on_plan(plan, {"reward/mean": reward, "optim/step": plan})
    return writer


def test_every_line_is_on_disk_when_the_call_returns(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, clock=lambda: 100.0)
    writer.on_eval(0, "test", 0.25)
    writer.on_plan(1, {"optim/step": 2, "reward/mean": 0.5})
    assert lines(tmp_path) == [
        {"plan": 0, "time": 100.0, "eval/test/accuracy": 0.25},
        {"plan": 1, "time": 100.0, "optim/step": 2, "reward/mean": 0.5},
    ]


def test_a_redo_after_a_crash_leaves_each_plan_once_and_the_later_value_wins(tmp_path: Path) -> None:
    # Catalogue G10: a crash at plan 12, the checkpoint at plan 10, on to plan 14.
    crashed = write_plans(tmp_path, range(1, 13), reward=0.1)
    crashed.on_eval(12, "test", 0.75)
    write_plans(tmp_path, range(11, 15), reward=0.9)
    rows = lines(tmp_path)
    assert [row["plan"] for row in rows] == list(range(1, 15))
    assert [row["reward/mean"] for row in rows] == [0.1] * 10 + [0.9] * 4
    assert rows[11]["time"] == 100.9
    # The redo does not evaluate again, so the first process' evaluation stays.
    assert rows[11]["eval/test/accuracy"] == 0.75
    assert rows == read_metrics(tmp_path)


def test_an_evaluation_joins_the_row_of_its_plan(tmp_path: Path) -> None:
    writer = write_plans(tmp_path, range(1, 4), reward=0.5)
    writer.on_eval(3, "test", 0.7)
    writer.on_plan(4, {"reward/mean": 0.6})
    assert [row["plan"] for row in lines(tmp_path)] == [1, 2, 3, 4]
    assert lines(tmp_path)[2]["eval/test/accuracy"] == 0.7


def test_a_torn_last_line_is_left_out_and_mended(tmp_path: Path) -> None:
    write_plans(tmp_path, range(1, 3), reward=0.5).close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"plan": 3, "reward/me')
    assert [row["plan"] for row in read_metrics(tmp_path)] == [1, 2]
    write_plans(tmp_path, range(3, 4), reward=0.5)
    assert [row["plan"] for row in lines(tmp_path)] == [1, 2, 3]


def test_numbers_that_json_does_not_know_become_null(tmp_path: Path) -> None:
    MetricsWriter(tmp_path).on_plan(1, {"loss/policy": float("nan"), "optim/grad_norm": float("inf")})
    row = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=pytest.fail)
    assert row["loss/policy"] is None
    assert row["optim/grad_norm"] is None


def test_a_name_outside_the_list_is_written_and_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = MetricsWriter(tmp_path)
    with caplog.at_level(logging.WARNING):
        writer.on_plan(1, {"policy/entorpy": 0.5, "reward/mean": 0.5})
        writer.on_plan(2, {"policy/entorpy": 0.5})
    assert [record.getMessage().split(": ")[1] for record in caplog.records] == ["policy/entorpy"]
    assert lines(tmp_path)[1]["policy/entorpy"] == 0.5


def test_plans_that_only_the_journal_knows_are_restored(tmp_path: Path) -> None:
    write_plans(tmp_path, range(1, 3), reward=0.5).close()
    writer = MetricsWriter(tmp_path)
    writer.restore({plan: {"reward/mean": 0.25} for plan in (1, 2, 3)})
    writer.on_plan(4, {"reward/mean": 0.75})
    found = [(row["plan"], row["reward/mean"]) for row in lines(tmp_path)]
    assert found == [(1, 0.5), (2, 0.5), (3, 0.25), (4, 0.75)]
