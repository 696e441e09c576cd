"""Which of its settings TRL is measured with."""

from pathlib import Path

import pytest
from benchmarks.trl_environment import read_requirements
from benchmarks.trl_settings import CANDIDATES, Trial, TrlSettings, choose, table, tried

FP32 = TrlSettings(weights="float32", autocast=False, batch=64)
BF16 = TrlSettings(weights="bfloat16", autocast=False, batch=16)
AUTOCAST = TrlSettings(weights="float32", autocast=True, batch=64)


def test_dtype_is_that_of_the_arithmetic() -> None:
    assert [settings.dtype for settings in (FP32, BF16, AUTOCAST)] == ["fp32", "bf16", "bf16"]


def test_the_fastest_of_a_dtype_is_chosen() -> None:
    trials = [
        Trial(settings=FP32, seconds=70.0),
        Trial(settings=AUTOCAST, seconds=90.0),
        Trial(settings=BF16, seconds=None, failure="killed"),
    ]
    assert choose(trials, None).settings == FP32
    assert choose(trials, "bf16").settings == AUTOCAST
    with pytest.raises(RuntimeError, match=r"no candidate of dtype bf16 could be run\. .*killed"):
        choose(trials[2:], "bf16")


def test_trials_are_kept_until_the_key_changes(tmp_path: Path) -> None:
    asked: list[str] = []

    def try_one(settings: TrlSettings) -> Trial:
        asked.append(settings.label)
        failed = settings.autocast
        return Trial(
            settings=settings, seconds=None if failed else 1.0 + len(asked), failure="no room" if failed else ""
        )

    def trials(dtype: str | None, machine: str) -> list[Trial]:
        return tried(try_one, dtype=dtype, key={"machine": machine}, cache=tmp_path / "kept" / "trials.json")

    first = trials("fp32", "one")
    assert asked == [settings.label for settings in CANDIDATES if settings.dtype == "fp32"]
    assert trials("fp32", "one") == first
    everything = trials(None, "one")
    assert len(everything) == len(asked) == len(CANDIDATES)
    assert [t for t in everything if t.settings.dtype == "fp32"] == first
    trials(None, "two")
    assert len(asked) == 2 * len(CANDIDATES)
    assert "no room" in table(everything).values()


def test_every_candidate_has_a_label_of_its_own() -> None:
    assert len({settings.label for settings in CANDIDATES}) == len(CANDIDATES)
    assert {settings.dtype for settings in CANDIDATES} == {"fp32", "bf16"}


def test_requirements_are_pinned() -> None:
    assert read_requirements("# why\ntrl==1.2\n\ntorch==2.3 # cpu\n") == {"trl": "1.2", "torch": "2.3"}
    with pytest.raises(ValueError, match="length 1"):
        read_requirements("trl>=1.2\n")
