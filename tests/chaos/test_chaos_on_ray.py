"""A real run on Ray, of a tiny model, whose actors, learner and driver are killed while it works."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny import tiny_model

ROOT = Path(__file__).parents[2]
SETTINGS = [
    "run.plans=40", "data.train=rows.jsonl", "reward.fn=score.py:score", "engine.deterministic=true",
    "engine.dtype=fp32", "learner.dtype=fp32", "rollout.group_size=2", "rollout.max_tokens=12",
    "learner.tasks_per_plan=2", "checkpoint.every=3", "logging.tensorboard=false", "cluster.dashboard=false",
]  # fmt: skip
REWARD = """
def score(prompts, completions, **columns):
    import time
    time.sleep(0.35)  # long enough that a fault of each kind falls due, however fast the rest is
    return [float(len(text) % 3) for text in completions]
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_nothing_is_lost_and_the_weights_are_those_of_a_run_in_peace(tmp_path: Path) -> None:
    tiny_model(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"{i} and"}) + "\n" for i in range(200)))
    (tmp_path / "score.py").write_text(REWARD)
    faults = "rollout=5,reward=5,learner=4,driver=3"
    command = [sys.executable, "-m", "cauce", "chaos", "grpo", "model.path=model", *SETTINGS, "--folder", "chaos"]
    done = subprocess.run(
        [*command, "--faults", faults, "--seed", "3"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "TMPDIR": "/tmp"},
        capture_output=True,
        text=True,
        timeout=840,
    )
    print(done.stdout, done.stderr)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "chaos" / "chaos.json").read_text())
    assert (found["lost"], found["trained_twice"], found["regenerated"]) == (0, 0, 0)
    assert found["plans_with_equal_weights"] == found["plans"]["disturbed"] == 40
    assert {"rollout", "reward", "learner", "driver"} == set(found["by_kind"])
    ends = [fault["time"] for fault in found["faults"] if fault["kind"] == "driver"]
    for fault in found["faults"]:  # one that its driver lived to see the end of
        if not any(0 < end - fault["time"] < 30 for end in ends) and fault is not found["faults"][-1]:
            assert fault["replaced_s"] < 30, fault
    assert 0 < found["effective"] < 1
