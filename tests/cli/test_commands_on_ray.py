"""The commands as a person types them, on one run with a real Ray: look at it live, pause it by SIGTERM, change and
resume it, replay it, fork it, read it."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from cauce.journal import Journal
from tests.tiny import tiny_model

REWARD = """
def score(completions, **_):
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [sum("a" <= letter <= "z" for letter in text) / 6 for text in texts]
"""
SETTINGS = (
    *("run.name=run", "run.plans=200", "rollout.max_tokens=6", "rollout.group_size=4", "learner.tasks_per_plan=3"),
    *("learner.lr=1e-2", "engine.dtype=fp32", "learner.dtype=fp32", "eval.every=0", "eval.at_start=false"),
    *("cluster.dashboard=false", "logging.tensorboard=false"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("work")
    tiny_model(folder / "model")
    (folder / "score.py").write_text(REWARD)
    rows = [json.dumps({"prompt": f"say {i}", "answer": str(i)}) for i in range(40)]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    return folder


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "cauce", *words]


def cauce(folder: Path, *words: str, code: int = 0) -> str:
    """Runs a command to its end and returns what it printed."""
    done = subprocess.run(
        command(*words), cwd=folder, env=environment(), capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == code, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


def environment() -> dict[str, str]:
    return {**os.environ, "TMPDIR": "/tmp", "COLUMNS": "160"}


def recorded(run: Path) -> list[Any]:
    with Journal.read_only(run) as journal:
        return [(record.plan, record.state, record.checksum) for record in journal.plans()]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_from_its_start_to_its_fork(folder: Path) -> None:
    run = folder / "runs" / "run"
    given = ("train", "grpo", "model.path=model", "data.train=rows.jsonl", "reward.fn=score.py:score", *SETTINGS)
    process = subprocess.Popen(
        command(*given), cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    metrics, deadline = run / "metrics.jsonl", time.time() + 200
    while time.time() < deadline and process.poll() is None:
        if metrics.exists() and len(metrics.read_text().splitlines()) >= 3:
            break
        time.sleep(0.05)

    # Live: read, and not disturbed.
    listed = cauce(folder, "runs")
    assert "running" in listed
    assert f"by process {process.pid} on" in cauce(folder, "show", "runs/run")
    lines = cauce(folder, "samples", "runs/run", "--format", "jsonl", "--limit", "4", "--ids").splitlines()
    assert [json.loads(line)["task"] for line in lines] == [0, 0, 0, 0]
    assert process.poll() is None

    # Paused: the plan under way ends, with a checkpoint.
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output
    assert "stopping after the current plan" in output
    assert re.search(r"stopped; nothing is lost. Go on with: \S*cauce resume runs/run", output)
    assert "Traceback" not in output
    summary = json.loads((run / "summary.json").read_text())
    stopped_at = summary["plans"]
    assert summary["status"] == "stopped"
    with Journal.read_only(run) as journal:
        assert [record.state for record in journal.plans()] == ["applied"] * stopped_at
        assert journal.checkpoints()[-1].plan == stopped_at
        assert journal.events("ended")[-1].detail["status"] == "stopped"
    assert "stopped" in cauce(folder, "runs")

    # Changed and resumed: nothing is redone, a semantic key is refused.
    refusal = cauce(folder, "resume", "runs/run", "learner.lr=1", code=2)
    assert "cauce fork runs/run --at PLAN --set learner.lr=1.0" in refusal
    before, last = recorded(run), stopped_at + 2
    said = cauce(folder, "resume", "runs/run", f"run.plans={last}", "rollout.actors=2", "rollout.cpus=0.4")
    assert "trained again" not in said
    assert recorded(run)[:stopped_at] == before
    assert len(recorded(run)) == last
    shown = cauce(folder, "show", "runs/run")
    assert "rollout.actors: 1 -> 2" in shown
    assert "finished" in shown

    # Proven, and trained otherwise on the same samples.
    assert f"{last} plans replayed from the initial weights" in cauce(folder, "replay", "runs/run")
    forked = cauce(
        folder, "fork", "runs/run", "--at", str(last - 2), "--set", "learner.lr=1e-3", "--set", "run.name=slower"
    )
    assert "its samples come from the policy of the source" in forked
    fork = folder / "runs" / "slower"
    assert [plan for plan, *_ in recorded(fork)] == [plan for plan, *_ in recorded(run)]
    assert recorded(fork)[:-2] == recorded(run)[:-2]
    assert recorded(fork)[-1] != recorded(run)[-1]
    assert f"2 plans replayed from checkpoint plan_{last - 2:06d}" in cauce(folder, "replay", "runs/slower")
    assert "Original and forks" in (fork / "report.html").read_text()
    assert "fork" in cauce(folder, "runs")
