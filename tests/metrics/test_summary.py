"""Evaluations in numbers, and summary.json."""

from pathlib import Path

import pytest

from cauce.metrics.summary import (
    build_summary,
    environment,
    eval_stats,
    gold_of,
    mean_interval,
    read_eval,
    tokens_per_s,
    wilson,
)
from tests.metrics.run_info import plan_metrics, write_eval


def test_wilson_interval_by_hand() -> None:
    # 8 of 10: centre (0.8 + 0.19207) / 1.38415 = 0.71674, half width 0.22658 (z = 1.95996).
    assert wilson(0.8, 10) == pytest.approx((0.49016, 0.94331), abs=1e-4)


def test_wilson_interval_has_width_where_nothing_or_everything_is_right() -> None:
    assert wilson(0.0, 20) == pytest.approx((0.0, 3.8415 / 23.8415), abs=1e-4)
    assert wilson(1.0, 20) == pytest.approx((20 / 23.8415, 1.0), abs=1e-4)


def test_interval_of_rewards_that_are_no_shares_is_the_normal_one() -> None:
    # Mean 2, standard deviation 1 (ddof 1) over 3: 1.95996 / sqrt(3) = 1.13158.
    assert mean_interval([1.0, 2.0, 3.0]) == pytest.approx((0.86842, 3.13158), abs=1e-4)


def test_evaluation_counts_truncated_answers_and_leaves_failed_rewards_out(tmp_path: Path) -> None:
    write_eval(tmp_path, "before", [1.0, 0.0, None, 1.0])
    stats = eval_stats(read_eval(tmp_path / "eval" / "before.jsonl"))
    assert stats is not None
    assert (stats.count, stats.unscored) == (4, 1)
    assert stats.accuracy == pytest.approx(2 / 3)
    # Catalogue J10: the truncated answer's 8 tokens count, (8 + 2 + 2 + 2) / 4.
    assert stats.length_mean == pytest.approx(3.5)
    assert stats.truncated_fraction == pytest.approx(0.25)


def test_an_evaluation_without_a_score_has_no_accuracy(tmp_path: Path) -> None:
    write_eval(tmp_path, "before", [None, None])
    assert eval_stats(read_eval(tmp_path / "eval" / "before.jsonl")) is None
    assert eval_stats(read_eval(tmp_path / "eval" / "missing.jsonl")) is None


def test_tokens_per_second_is_no_mean_of_means() -> None:
    # Catalogue J6: 1 s at 1000 tokens/s and 9 s at 100 tokens/s are 1900 tokens in 10 s.
    rows = [{"tokens_per_s": 1000.0, "time/total": 1.0}, {"tokens_per_s": 100.0, "time/total": 9.0}]
    assert tokens_per_s(rows) == 190.0


def test_summary_of_a_run(tmp_path: Path) -> None:
    write_eval(tmp_path, "before", [0.0, 0.0, 1.0, 0.0])
    rows = [{"plan": 0, "eval/test/accuracy": 0.25}]
    rows += [{"plan": plan, **plan_metrics(plan)} for plan in (1, 2)]
    summary = build_summary(
        rows,
        run="quickstart-1",
        status="stopped",
        num_plans=40,
        wall_s=21.0004,
        before=eval_stats(read_eval(tmp_path / "eval" / "before.jsonl")),
        after=None,
        peak_memory_mb=1024.06,
        details={"model": "tiny"},
    )
    assert summary["plans"] == 2
    assert summary["eval_before"] == 0.25
    assert summary["eval_after"] is None
    assert summary["eval_tasks"] == 4
    assert (summary["reward_first"], summary["reward_last"]) == pytest.approx((0.11, 0.12))
    assert summary["tokens_per_s"] == 400.0
    split = {"generate": 6.0, "reward": 0.0, "learn": 10.0, "sync": 2.0, "record": 0.5, "idle": 1.5}
    assert summary["time_s"] == {**split, "checkpoint": 0.0, "eval": 2.5}
    assert (summary["wall_s"], summary["peak_memory_mb"]) == (21.0, 1024.1)
    assert (summary["model"], summary["run"], summary["status"]) == ("tiny", "quickstart-1", "stopped")


def test_summary_of_a_run_without_a_plan() -> None:
    summary = build_summary(
        [],
        run="r",
        status="failed",
        num_plans=4,
        wall_s=1.0,
        before=None,
        after=None,
        peak_memory_mb=1.0,
        details={},
    )
    assert summary["plans"] == 0
    assert summary["tokens_per_s"] is None
    assert summary["reward_last"] is None


def test_environment_names_what_numbers_depend_on() -> None:
    facts = environment()
    assert {"python", "torch", "ray", "transformers", "cauce", "cpus"} <= facts.keys()
    assert int(facts["cpus"]) >= 1


def test_gold_is_read_from_the_usual_columns() -> None:
    assert gold_of({"id": "x", "columns": {"answer": 5}}) == "5"
    assert gold_of({"ground_truth": "7"}) == "7"
    assert gold_of({"id": "x", "columns": {"prompt": "?"}}) == ""
