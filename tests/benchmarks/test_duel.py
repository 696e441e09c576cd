"""Two sides in turns: nobody works during the other's turn, and the figures made of what they say."""

from pathlib import Path

import pytest
from benchmarks.duel import Side, Step, take_turns
from benchmarks.grpo_step import as_result, require_signal
from benchmarks.trl_environment import TrlEnvironment
from benchmarks.trl_settings import Trial, TrlSettings
from benchmarks.turns import PlayerFailed
from benchmarks.workload import Workload

from tests.benchmarks.conftest import StartPlayer

WORK = Workload(model="folder/tiny", rows="rows.jsonl", reward="correct", num_steps=3)


def side(seconds: list[float], *, dtype: str = "bfloat16", silent_groups: float = 0.0) -> Side:
    steps = tuple(
        Step(seconds=s, reward=0.5, silent_groups=silent_groups, length=20.0, waiting_cpu_s=0.0, split={"learn": s / 2})
        for s in seconds
    )
    return Side(ready={"dtype": dtype, "settings": {}, "threads": 2}, steps=steps, end={})


def test_one_side_works_at_a_time_and_the_first_move_alternates(start_player: StartPlayer, diary: Path) -> None:
    ours, peer = start_player("cauce", num_steps=3), start_player("TRL", num_steps=3)
    sides = take_turns(ours, peer, num_steps=3, warm_up=1)
    order = [("cauce", 0), ("TRL", 0), ("TRL", 1), ("cauce", 1), ("cauce", 2), ("TRL", 2)]
    expected = [f"{name} {what} {step}" for name, step in order for what in ("begins", "ends")]
    assert diary.read_text().splitlines() == expected
    assert [s.seconds for s in sides] == [[2.0, 3.0], [2.0, 3.0]]  # the warm-up, 1.0, is dropped
    assert [step.split for step in sides[0].steps] == [{"learn": 1.0}, {"learn": 2.0}]
    assert sides[0].end == {"status": "finished"}


def test_sides_with_other_prompts_are_not_compared(start_player: StartPlayer, diary: Path) -> None:
    ours, peer = start_player("cauce"), start_player("TRL", behaviour="other_prompts")
    with pytest.raises(PlayerFailed, match="render the prompts differently"):
        take_turns(ours, peer, num_steps=2, warm_up=1)
    assert not diary.exists()


def test_the_figure_is_a_ratio_of_medians() -> None:
    chosen = TrlSettings(weights="bfloat16", autocast=False, batch=64)
    slower = TrlSettings(weights="float32", autocast=False, batch=64)
    result = as_result(
        side([4.0, 5.0, 12.0]),
        side([40.0, 60.0, 30.0]),
        WORK,
        chosen=chosen,
        trials=[Trial(settings=chosen, seconds=39.0), Trial(settings=slower, seconds=None, failure="out of memory")],
        environment=TrlEnvironment(python=Path("python"), versions={"trl": "1.16.0"}),
    )
    assert (result.ours, result.peer, result.ratio, result.runs) == (5.0, 40.0, 8.0, 3)
    assert result.dtype == "bf16 against bf16"
    assert result.peer_is == "TRL 1.16.0"
    assert result.spread["ratio"] == [2.5, 12.0]
    assert result.settings["peer_tried_s"] == {
        "bfloat16 weights, batch 64": 39.0,
        "float32 weights, batch 64": "out of memory",
    }
    assert result.settings["work"]["model"] == "tiny"
    assert result.detail["ours"]["split"] == {"learn": 2.5}


def test_a_group_without_signal_spoils_the_variant_where_all_have_one() -> None:
    require_signal(side([1.0]), side([1.0]))
    with pytest.raises(RuntimeError, match=r"0\.125 of the groups"):
        require_signal(side([1.0]), side([1.0], silent_groups=0.125))
