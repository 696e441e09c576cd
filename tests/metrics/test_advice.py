"""Each branch of the advice, by hand-computed shares."""

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cauce.metrics.advice import MIN_PLANS, Setup, Usage, advise, measure
from cauce.metrics.ending import print_ending
from cauce.metrics.observer import RunInfo
from cauce.report.tables import tiles

SETUP = Setup(
    actors=1,
    engine_threads=2,
    slots=64,
    answers_per_plan=64,
    max_staleness=0,
    reward_workers=1,
    max_redo_s=60.0,
    checkpoint_every=0,
    eval_every=10,
    weights_every=1,
    cpus=2,
)
BUSY = Usage(
    plans=10,
    learner_idle=0.2,
    waited_for_rewards=0.0,
    actors_idle=0.1,
    empty_slots=0.1,
    sync=0.01,
    record=0.02,
    checkpoint=0.02,
    eval=0.1,
)
ROOMY = replace(SETUP, cpus=4)


def row(plan: int, **more: float) -> dict[str, Any]:
    """A plan of 10 s: 4 s for answers, 1 s for rewards alone, 4 s learning, half a second each of sync and record."""
    parts = {"time/generate": 4.0, "time/reward": 1.0, "time/learn": 4.0, "time/sync": 0.5, "time/journal": 0.3}
    row = {"plan": plan, "time/total": 10.0, "time/checksum": 0.2, **parts, "tokens_per_s": 64.0}
    return {**row, "rollout/busy_fraction": 0.4, "rollout/live_slots": 16.0, **more}


def test_shares_by_hand() -> None:
    """Two plans of 10 s, an evaluation of 4 s and a checkpoint of 1 s between them: 25 s."""
    rows = [{"plan": 0, "eval/test/accuracy": 0.5}, row(1), row(2, **{"time/eval": 4.0, "time/checkpoint": 1.0})]
    found = measure(rows, SETUP)
    assert found is not None
    assert found.plans == 2
    assert found.learner_idle == pytest.approx(10 / 25)
    assert found.waited_for_rewards == pytest.approx(2 / 25)
    assert found.actors_idle == pytest.approx(1 - (4 + 4 + 4) / 25)
    assert found.empty_slots == pytest.approx(1 - 16 / 64)
    assert (found.sync, found.record) == (pytest.approx(1 / 25), pytest.approx(1 / 25))
    assert (found.checkpoint, found.eval) == (pytest.approx(1 / 25), pytest.approx(4 / 25))


def test_live_slots_weigh_by_steps() -> None:
    """640 tokens in 40 steps and 640 in 10: 1280 / 50 = 25.6 live, of 64."""
    found = measure([row(1), row(2, **{"rollout/live_slots": 64.0})], SETUP)
    assert found is not None
    assert found.empty_slots == pytest.approx(1 - 25.6 / 64)


def test_slots_that_a_plan_cannot_fill_are_not_empty() -> None:
    """16 answers a plan on two actors: 8 each, all of them live."""
    found = measure([row(1, **{"rollout/live_slots": 8.0})], replace(SETUP, answers_per_plan=16, actors=2))
    assert found is not None
    assert found.empty_slots == 0.0


def test_plans_that_sampled_nothing_are_no_measure() -> None:
    recorded = {name: value for name, value in row(1).items() if name != "tokens_per_s"}
    assert measure([recorded], SETUP) is None
    assert measure([], SETUP) is None
    assert advise(None, SETUP) == ""


def test_too_few_plans_are_no_advice() -> None:
    waits = replace(BUSY, learner_idle=0.41)
    assert advise(replace(waits, plans=MIN_PLANS - 1), ROOMY) == ""
    assert advise(replace(waits, plans=MIN_PLANS), ROOMY) != ""


def test_nothing_stands_out() -> None:
    assert advise(BUSY, ROOMY) == ""


@pytest.mark.parametrize(
    ("usage", "setup", "line"),
    [
        (
            {"learner_idle": 0.41},
            {"cpus": 4},
            "learner idle 41 %, waiting for answers: set rollout.actors=2, or in a new run buffer.max_staleness=1",
        ),
        (
            {"learner_idle": 0.41},
            {"cpus": None},
            "learner idle 41 %, waiting for answers: set rollout.actors=2, or in a new run buffer.max_staleness=1",
        ),
        (
            {"learner_idle": 0.41},
            {"cpus": 4, "max_staleness": 1},
            "learner idle 41 %, waiting for answers: set rollout.actors=2",
        ),
        ({"learner_idle": 0.41}, {}, ""),  # two cores, both the engine's: no actor more helps
        ({"learner_idle": 0.41}, {"max_staleness": 1}, ""),
        (
            {"learner_idle": 0.41, "empty_slots": 0.6},
            {},
            "learner idle 41 %, waiting for answers, with 60 % of the engine's usable slots empty (a few long answers "
            "end each plan): in a new run set buffer.max_staleness=1, or a lower rollout.max_tokens",
        ),
        (
            {"learner_idle": 0.45, "waited_for_rewards": 0.25},
            {"reward_workers": 2},
            "waited 25 % for rewards alone: set reward.workers=3",
        ),
        (
            {"actors_idle": 0.5},
            {"max_staleness": 1, "actors": 2},
            "rollout actors idle 50 %, waiting for the learner: set rollout.actors=1",
        ),
        (
            {"actors_idle": 0.5},
            {"max_staleness": 1},
            "rollout actors idle 50 %, waiting for the learner: in a new run set learner.threads higher and "
            "engine.threads lower",
        ),
        ({"actors_idle": 0.5}, {"max_staleness": 1, "cpus": 1}, ""),
        ({"actors_idle": 0.5}, {}, ""),  # synchronous: actors wait while the learner works, by design
        ({"checkpoint": 0.2}, {}, "checkpoints took 20 %: set checkpoint.max_redo_s=120"),
        ({"checkpoint": 0.2}, {"checkpoint_every": 2}, "checkpoints took 20 %: set checkpoint.every=4"),
        ({"eval": 0.5}, {}, "evaluations took 50 %: set eval.every=20"),
        ({"eval": 0.5}, {"eval_every": 0}, "evaluations took 50 %: set eval.at_start=false"),
        ({"sync": 0.3}, {}, "new weights took 30 % to reach the engines: in a new run set weights.every=2"),
        ({"record": 0.3}, {}, "the record took 30 %: put run.dir on a faster disk"),
    ],
)
def test_each_cause_has_its_line(usage: dict[str, float], setup: dict[str, Any], line: str) -> None:
    assert advise(replace(BUSY, **usage), replace(SETUP, **setup)) == line  # type: ignore[arg-type]


def test_the_largest_share_is_told_and_a_mute_one_gives_way() -> None:
    both = replace(BUSY, checkpoint=0.2, learner_idle=0.41)
    assert advise(both, ROOMY).startswith("learner idle 41 %")
    assert advise(both, SETUP).startswith("checkpoints took 20 %")


def test_the_line_is_read_at_the_end_and_in_the_report(tmp_path: Path) -> None:
    info = RunInfo(
        run_dir=tmp_path,
        recipe_name="r",
        model="m",
        num_plans=4,
        algorithm="grpo",
        cluster="",
        dashboard=None,
        eval_tasks=0,
    )
    for text in ("learner idle 41 %: <more>", ""):
        console = Console(file=io.StringIO(), width=100)
        print_ending(console, info, {"status": "finished", "plans": 4, "advice": text})
        said = console.file.getvalue()  # type: ignore[attr-defined]
        page = tiles([], {"advice": text}, None, None)
        assert ("learner idle 41 %: <more>" in said) == bool(text)
        assert ("learner idle 41 %: &lt;more&gt;" in page) == bool(text)
        assert ("advice" in page) == bool(text)
