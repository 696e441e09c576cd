"""`weights_vs_copy` with a tiny model: a real store and four real readers."""

from pathlib import Path

import pytest
from benchmarks.bench import Bench
from benchmarks.weights_sync import READERS, as_result, weights_vs_copy

from tests.tiny import tiny_model


def test_the_ratio_compares_whole_rounds() -> None:
    ours = [{"seconds": 0.5, "publish_s": 0.2, "pull_s": 0.25}, {"seconds": 0.4, "publish_s": 0.1, "pull_s": 0.3}]
    copies = [{"seconds": 0.1, "fresh_s": 0.4}, {"seconds": 0.2, "fresh_s": 0.6}]
    result = as_result(ours, copies, settings={})
    assert (result.ours, result.peer) == (pytest.approx(0.45), pytest.approx(0.15))
    assert result.ratio == pytest.approx(1 / 3)
    assert result.spread["ratio"] == pytest.approx([0.2, 0.5])
    assert result.detail["copies_into_fresh_memory_s"] == pytest.approx(0.5)


@pytest.mark.slow
def test_four_readers_see_each_version(tmp_path: Path) -> None:
    bench = Bench(model=str(tiny_model(tmp_path / "tiny")), steps=2, cache=tmp_path / "cache", charts=tmp_path)
    result = weights_vs_copy(bench)["weights_vs_copy"]
    assert result.runs == 2
    assert result.settings["readers"] == READERS == 4
    assert result.ours >= result.detail["pull_s"] > 0
    assert not list(Path("/dev/shm").glob("cauce-bench-*"))
