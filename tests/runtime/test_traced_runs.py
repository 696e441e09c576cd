"""The timeline of whole runs on Ray: lanes, sums, tokens, a death, a kill, a resume."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from cauce import spans
from cauce.errors import RecipeError
from cauce.metrics.observer import NullObserver
from cauce.metrics.writer import read_metrics
from cauce.stages import rl
from tests.runtime.test_ray_runs import ROWS, recorded, script, trainer


def read(path: Path, *, ended: bool = True) -> list[dict[str, Any]]:
    text = path.read_text()
    return json.loads(text if ended else text + "]")


def lanes(events: list[dict[str, Any]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Spans by the names of process and thread; a span without them is a KeyError."""
    actors = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found = defaultdict(list)
    for event in events:
        if event["ph"] in ("X", "i"):
            found[actors[event["pid"]], names[event["pid"], event["tid"]]].append(event)
    return dict(found)


def seconds(found: list[dict[str, Any]]) -> float:
    return sum(event["dur"] for event in found) / 1e6


def inside(inner: list[dict[str, Any]], outer: list[dict[str, Any]]) -> bool:
    """Whether each inner span lies in an outer one, but for the rounding of microseconds."""
    return all(
        any(o["ts"] - 1 <= i["ts"] and i["ts"] + i["dur"] <= o["ts"] + o["dur"] + 1 for o in outer) for i in inner
    )


def test_every_lane_is_named_nests_and_adds_up(model: str, tmp_path: Path, shared_ray: None) -> None:
    run = tmp_path / "run"
    summary = trainer(model, run, logging__trace=True, run__plans=5).train()
    assert spans.listener() is None
    events = read(run / "trace-1.json")
    found = lanes(events)
    for (actor, lane), members in found.items():
        ordered = sorted((e for e in members if e["ph"] == "X"), key=lambda e: e["ts"])
        for one, two in itertools.pairwise(ordered):
            assert one["ts"] + one["dur"] <= two["ts"] + 1, (actor, lane)
    expected = {
        "driver": "wait collect learn checksum plan publish checkpoint eval commit events",
        "rollout-0": "work pull load_state generate prefill decode",
        "learner-0": "score forward_backward micro_batch optim_step checksum publish save_checkpoint",
    }
    for actor, names in expected.items():
        assert set(names.split()) <= {lane for who, lane in found if who == actor}
    assert {"start learner-0", "start rollout-0", "start reward-0"} <= {lane for who, lane in found if who == "driver"}
    assert {lane for who, lane in found if who == "reward-0"} <= {"score", "score_many"}
    work = found["rollout-0", "work"]
    for lane in ("pull", "load_state", "generate"):
        assert inside(found["rollout-0", lane], work)
    for lane in ("prefill", "decode"):
        assert inside(found["rollout-0", lane], found["rollout-0", "generate"])
    assert inside(found["learner-0", "micro_batch"], found["learner-0", "forward_backward"])
    # A worker's call lies between the driver's asking and its turn: its clock is the driver's.
    assert inside(found["learner-0", "forward_backward"], found["driver", "learn"])
    assert inside(found["learner-0", "save_checkpoint"], found["driver", "checkpoint"])
    # The plans' lanes are the metrics' seconds.
    rows = [row for row in read_metrics(run) if row["plan"]]
    assert len(found["driver", "plan"]) == 5
    assert seconds(found["driver", "learn"]) == pytest.approx(sum(row["time/learn"] for row in rows), rel=0.01)
    parts = sum(seconds(found["driver", lane]) for lane in ("collect", "learn", "checksum"))
    assert parts == pytest.approx(seconds(found["driver", "plan"]), rel=0.1)
    # Every sampled token is in a slice, and every one of the trained answers is in the journal.
    trained = sum(len(ids) for _, _, ids, _ in recorded(run))
    evaluated = sum(
        json.loads(line)["num_tokens"]
        for name in ("before", "after")
        for line in (run / "eval" / f"{name}.jsonl").read_text().splitlines()
    )
    assert sum(e["args"]["tokens"] for e in found["rollout-0", "generate"]) == trained + evaluated
    assert sum(e["args"]["tokens"] for e in found["rollout-0", "decode"]) == trained + evaluated
    marks = {e["name"] for e in found["driver", "events"]}
    assert {"start", *(f"plan {k}" for k in range(1, 6)), "evaluated version 0"} <= marks
    assert {"slots", "ready groups"} <= {e["name"] for e in events if e["ph"] == "C"}
    assert events[-1]["args"]["seconds"] < 0.02 * summary["wall_s"]
    assert summary["usage"]["plans"] == 5
    assert 0 < summary["usage"]["learner_idle"] < 1
    assert isinstance(summary["advice"], str)


def test_a_run_without_the_key_writes_none_and_a_bad_value_is_refused(
    model: str, tmp_path: Path, shared_ray: None
) -> None:
    trainer(model, tmp_path / "run", run__plans=1).train()
    assert not list((tmp_path / "run").glob("trace*"))
    with pytest.raises(RecipeError, match=r"logging\.trace"):
        trainer(model, tmp_path / "other", logging__trace="sometimes").train()


def test_a_death_is_a_lost_call_and_a_lane_of_its_successor(model: str, tmp_path: Path, shared_ray: None) -> None:
    run = tmp_path / "run"

    class Killer(NullObserver):
        done = False

        def on_plan(self, plan: int, metrics: Any) -> None:
            if not self.done:
                self.done = True
                os.kill(
                    int((run / "logs" / "rollout-0.log").read_text().split("process ")[1].split()[0]), signal.SIGKILL
                )

    made = trainer(model, run, logging__trace=True)
    made._observer = Killer()
    made.train()
    found = lanes(read(run / "trace-1.json"))
    assert ("rollout-0", "lost") in found
    assert ("rollout-1", "generate") in found
    assert any("died" in e.get("args", {}).get("text", "") for e in found["driver", "events"])


def test_a_killed_run_leaves_a_file_that_opens_and_its_resume_writes_another(model: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    program = script(tmp_path, model, run, logging__trace=True, run__plans=200, checkpoint__every=2)
    process = subprocess.Popen([sys.executable, str(program)], env={**os.environ, "PYTHONPATH": os.getcwd() + "/src:."})
    deadline = time.monotonic() + 120
    while len(read_metrics(run)) < 20 and time.monotonic() < deadline:
        time.sleep(0.1)
    process.kill()
    process.wait()
    first = run / "trace-1.json"
    before = first.read_bytes()
    found = lanes(read(first, ended=False))
    assert found["driver", "plan"]
    assert not before.rstrip().endswith(b"]")
    done = len(read_metrics(run))

    def score(completions: list[Any], **_: Any) -> list[float]:
        texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
        return [sum(letter == "e" for letter in text) / 6 for text in texts]

    rl.resume(run, rows=ROWS, reward=score, overrides=[f"run.plans={done + 2}"])
    assert first.read_bytes() == before
    second = lanes(read(run / "trace-2.json"))
    assert ("learner-0", "load_checkpoint") in second
