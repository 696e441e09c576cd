"""Our side of a comparison, as a real run on Ray with a tiny model."""

from pathlib import Path

import pytest
from benchmarks.bench import Bench
from benchmarks.duel import start_ours

from tests.tiny import tiny_model


@pytest.mark.slow
def test_a_run_waits_for_its_turns(tmp_path: Path) -> None:
    bench = Bench(model=str(tiny_model(tmp_path / "tiny")), cache=tmp_path / "cache", charts=tmp_path)
    work = bench.workload(tmp_path, reward="ramp", num_steps=2)
    with start_ours(bench, work, name="test", dtype="fp32", run_folder=tmp_path / "runs") as player:
        ready = player.expect("ready", timeout_s=120)
        assert ready["dtype"] == "float32"
        run_dir = next((tmp_path / "runs").iterdir())
        assert not (run_dir / "metrics.jsonl").exists()
        for plan in (1, 2):
            player.go()
            step = player.expect("step", timeout_s=120)
            assert step["silent_groups"] == 0.0
            assert step["reward"] == pytest.approx(0.5)
            assert step["split"]["total"] == pytest.approx(step["seconds"], rel=0.2)
            assert len((run_dir / "metrics.jsonl").read_text().splitlines()) == plan
        assert not (run_dir / "checkpoints").exists()
        player.go()
        assert player.expect("end", timeout_s=120)["status"] == "finished"
    assert (run_dir / "model").is_dir()
