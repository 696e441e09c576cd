"""H1: what goes wrong while a run starts is the last thing that is printed, once, and nothing is tried again."""

import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.tiny import tiny_model

ROWS = '{"question": "1 + 1?", "answer": "2"}\n' * 16


@pytest.mark.slow
def test_an_error_in_a_worker_at_start_is_the_last_thing_printed(tmp_path: Path) -> None:
    """H1: the learner cannot load its model; the driver could not know, since it never reads weights."""
    weights = tiny_model(tmp_path / "model") / "model.safetensors"
    tensors = load_file(weights)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, weights, metadata={"format": "pt"})
    (tmp_path / "rows.jsonl").write_text(ROWS)
    settings = [
        "model.path=model",
        "data.train=rows.jsonl",
        "reward.fn=last_number",
        "run.name=run",
        "cluster.dashboard=false",
        "rollout.max_tokens=16",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "cauce", "train", "grpo", *settings],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
    )
    assert done.returncode == 2, done.stdout  # the model is the user's, wherever it is found out
    lines = done.stdout.rstrip().splitlines()
    (said,) = (number for number, line in enumerate(lines) if line.startswith("error: "))
    assert "learner learner-0" in lines[said]
    assert "model.layers.1.mlp.up_proj.weight" in lines[said]
    assert all(line.startswith("    | ") for line in lines[said + 1 :])  # its log, which belongs to the message
    assert "Traceback" not in done.stdout
    logs = sorted(log.name for log in (tmp_path / "runs" / "run" / "logs").glob("*.log"))
    assert [name for name in logs if name.startswith("learner")] == ["learner-0.log"]
    assert [name for name in logs if name.startswith("rollout")] in ([], ["rollout-0.log"])
