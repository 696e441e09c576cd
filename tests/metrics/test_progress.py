"""What the views say of a run, without a terminal."""

from pathlib import Path

import pytest

from cauce.metrics.progress import Progress, duration, plan_line
from tests.metrics.run_info import plan_metrics, run_info, write_eval


def progress_after(run_dir: Path, num: int, *, seconds: float = 10.0, **changed: float) -> Progress:
    progress = Progress(run_info(run_dir), started=0.0)
    for plan in range(1, num + 1):
        progress.add_plan(plan, {**plan_metrics(plan), **changed}, now=30.0 + seconds * plan)
    return progress


def test_time_left_leaves_the_slow_first_plan_out(tmp_path: Path) -> None:
    progress = progress_after(tmp_path, 4)
    assert progress.seconds_per_plan() == pytest.approx(10.0)
    # 36 plans of 10 s, of which 4 s have passed.
    assert progress.seconds_left(74.0) == pytest.approx(356.0)


def test_time_left_of_a_resumed_run_counts_from_where_it_went_on(tmp_path: Path) -> None:
    progress = Progress(run_info(tmp_path), started=0.0)
    for plan in (21, 22):
        progress.add_plan(plan, plan_metrics(plan), now=5.0 * plan)
    assert progress.seconds_left(110.0) == pytest.approx(18 * 5.0)


def test_before_the_first_plan_nothing_is_known(tmp_path: Path) -> None:
    progress = Progress(run_info(tmp_path), started=0.0)
    assert progress.seconds_left(1.0) is None
    assert progress.time_shares() == []
    assert "untrained model" in progress.normal()


def test_time_shares_sum_to_one(tmp_path: Path) -> None:
    shares = dict(progress_after(tmp_path, 3).time_shares())
    seconds = {"generate": 9.0, "reward": 0.0, "learn": 15.0, "sync": 3.0, "record": 0.75, "idle": 2.25}
    seconds |= {"checkpoint": 0.0, "eval": 2.5}
    assert shares == pytest.approx({part: value / 32.5 for part, value in seconds.items()})
    assert sum(shares.values()) == pytest.approx(1.0)


def test_a_loss_near_zero_is_called_normal_at_first(tmp_path: Path) -> None:
    # Catalogue J5.
    assert "a loss near 0 is normal: group-relative advantages sum to zero" in progress_after(tmp_path, 1).normal()
    assert "loss" not in progress_after(tmp_path, 6).normal()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"optim/skipped": 1.0}, "skipped"),
        ({"response/truncated_fraction": 0.6}, "rollout.max_tokens"),
        ({"reward/zero_variance_fraction": 0.8}, "teach nothing"),
    ],
)
def test_what_deserves_attention_comes_first(tmp_path: Path, changed: dict[str, float], words: str) -> None:
    assert words in progress_after(tmp_path, 1, **changed).normal()


def test_evaluation_finds_the_interval_of_its_answers(tmp_path: Path) -> None:
    write_eval(tmp_path, "plan_000010", [1.0] * 5 + [0.0] * 5)
    progress = Progress(run_info(tmp_path), started=0.0)
    progress.add_eval(10, 0.5)
    assert progress.stats is not None
    assert progress.stats.low < 0.5 < progress.stats.high
    progress.add_eval(20, 0.5)
    assert progress.stats is None


def test_plain_line_of_a_plan(tmp_path: Path) -> None:
    line = plan_line(progress_after(tmp_path, 2), now=50.0)
    assert line == (
        "plan 2/40  reward 0.120  loss 0.0010  grad norm 1.25  length 14.0  tokens/s 400  seconds 10.0  6:20 left"
    )


@pytest.mark.parametrize(("seconds", "text"), [(5.4, "0:05"), (485, "8:05"), (3723, "1:02:03"), (59.7, "1:00")])
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text
