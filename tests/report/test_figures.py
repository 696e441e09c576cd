"""Which numbers reach which figure."""

import pytest

from cauce.metrics.summary import EvalStats
from cauce.report.figures import learning_figure, metric_figures, reward_bins, reward_figure, time_figure


def test_held_out_accuracy_has_its_interval() -> None:
    stats = EvalStats(count=10, unscored=0, accuracy=0.5, low=0.25, high=0.875, length_mean=2.0, truncated_fraction=0.0)
    figure = learning_figure([{"plan": 1, "reward/mean": 0.5}], {"test": [(0, 0.5, stats)]})
    assert figure is not None
    error = figure.traces[1]["error_y"]
    assert (error["array"], error["arrayminus"]) == ([0.375], [0.25])


def test_without_all_intervals_none_is_drawn() -> None:
    figure = learning_figure([], {"test": [(0, 0.5, None)]})
    assert figure is not None
    assert "error_y" not in figure.traces[0]
    assert learning_figure([], {}) is None


def test_a_gap_stays_a_gap_and_the_row_before_training_has_no_loss() -> None:
    rows = [
        {"plan": 0, "loss/policy": 9.0},
        {"plan": 1, "loss/policy": 0.5},
        {"plan": 2, "loss/policy": None},
    ]
    (figure,) = metric_figures(rows)
    assert (figure.traces[0]["x"], figure.traces[0]["y"]) == ([1, 2], [0.5, None])


def test_clip_fractions_are_shown_where_something_was_clipped() -> None:
    name = "policy/clip_fraction_high"
    assert metric_figures([{"plan": 1, name: 0.0}]) == []
    assert len(metric_figures([{"plan": 1, name: 0.25}])) == 1


def test_time_is_stacked_in_the_order_of_a_plan() -> None:
    figure = time_figure([{"plan": 1, "time/learn": 2.0, "time/generate": 3.0}])
    assert figure is not None
    assert [(trace["name"], trace["y"]) for trace in figure.traces] == [("generate", [3.0]), ("learn", [2.0])]


def test_rewards_of_first_and_last_plans_are_compared() -> None:
    figure = reward_figure({1: [0.0, 1.0], 2: [0.0, 1.0]}, {19: [1.0], 20: [1.0, 1.0, 1.0]})
    assert figure is not None
    assert [trace["name"] for trace in figure.traces] == ["plans 1 to 2", "plans 19 to 20"]
    assert figure.traces[0]["x"] == ["0", "1"]
    assert [trace["y"] for trace in figure.traces] == [[0.5, 0.5], [0.0, 1.0]]


def test_many_different_rewards_go_into_bins_and_none_is_lost() -> None:
    samples = [[i / 50 for i in range(51)], [0.0, 1.0, 1.0]]
    labels, counts = reward_bins(samples)
    assert len(labels) == 20
    assert [sum(count) for count in counts] == [51, 3]
    assert counts[1][0] == 1
    assert counts[1][-1] == 2
    assert labels[0] == "0 to 0.05"


def test_one_plan_is_compared_with_nothing() -> None:
    figure = reward_figure({1: [0.0, 1.0]}, {})
    assert figure is not None
    assert [trace["name"] for trace in figure.traces] == ["plan 1"]
    assert reward_figure({}, {}) is None
    assert figure.traces[0]["y"] == pytest.approx([0.5, 0.5])
