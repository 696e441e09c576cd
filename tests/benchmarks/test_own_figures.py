"""Figures made of the files of a run, and the chart."""

import os
import sys
from xml.etree import ElementTree

import pytest
from benchmarks.chart import BOTTOM, HEIGHT, TOP, line_chart
from benchmarks.journal_share import shares_of, sums_of
from benchmarks.machine import describe, tree_cpu_s
from benchmarks.own_run import OwnRun
from benchmarks.reward_curve import axis_top
from benchmarks.startup import first_reward_s, timed

PLAN = {"time/checksum": 0.5}
RUN = OwnRun(
    began=100.0,
    rows=(
        {"plan": 0, "time": 130.0},
        {"plan": 1, "time": 140.0, "time/learn": 2.5, "time/journal": 0.1, "time/total": 10.0, **PLAN},
        {"plan": 2, "time": 145.0, "time/learn": 1.0, "time/journal": 0.2, "time/total": 5.0, **PLAN},
    ),
    summary={},
)


def test_journal_share_weighs_plans_by_their_length() -> None:
    journal, total = sums_of(RUN)
    assert journal / total == pytest.approx(0.02)
    assert shares_of(RUN) == pytest.approx([0.01, 0.04])


def test_first_reward_is_before_the_first_training() -> None:
    assert first_reward_s(RUN) == pytest.approx(37.0)


def test_timed_takes_the_median_of_calls() -> None:
    result = timed([sys.executable, "-c", "import time; time.sleep(0.05)"], bound=2.0)
    low, high = result.spread["ours"]
    assert 0.05 < low <= result.ours <= high
    assert result.ratio == pytest.approx(2.0 / result.ours)
    assert result.runs == 5


def test_machine_is_described_without_its_paths_or_names() -> None:
    facts = describe()
    assert facts["cpus"] >= 1
    assert {"cpu", "memory_gb", "torch", "ray", "python"} <= facts.keys()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_cpu_time_counts_work() -> None:
    before = tree_cpu_s(os.getpid())
    total = 0
    while tree_cpu_s(os.getpid()) < before + 0.05:
        total += sum(range(10_000))
    assert total > 0
    assert tree_cpu_s(-1) == 0


def test_chart_puts_values_where_they_belong() -> None:
    svg = line_chart({"A": [0.0, 0.5, 1.0], "B & C": [1.0]}, title="T", x_name="step", y_name="reward", y_max=1.0)
    space = "{http://www.w3.org/2000/svg}"
    root = ElementTree.fromstring(svg)
    lines = [line.attrib["points"].split() for line in root.iter(f"{space}polyline")]
    heights = [float(point.split(",")[1]) for point in lines[0]]
    assert heights == [HEIGHT - BOTTOM, (HEIGHT - BOTTOM + TOP) / 2, TOP]
    assert len(lines) == 4  # two curves and their legend
    assert {"A", "B & C", "step", "reward", "T"} <= {text.text for text in root.iter(f"{space}text")}
    with pytest.raises(ValueError, match="3 curves"):
        line_chart({name: [1.0] for name in "abc"}, title="", x_name="", y_name="", y_max=1.0)


def test_axis_leaves_room_above_the_highest_value() -> None:
    assert [axis_top([x]) for x in (0.0, 0.19, 0.2, 0.55, 0.9, 1.0)] == [0.2, 0.2, 0.4, 0.6, 1.0, 1.0]
