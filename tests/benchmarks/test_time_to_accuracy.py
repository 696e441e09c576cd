"""`time_to_accuracy_vs_trl`: when the target counts as reached, which seconds count, and the evaluator."""

from pathlib import Path

import pytest
import torch
from benchmarks.held_out import HeldOut
from benchmarks.own_run import OwnRun
from benchmarks.time_to_accuracy import Point, as_result, points_of, reached, workload_of
from safetensors.torch import load_file

from cauce.engine.native import NativeEngine
from cauce.models.load import load_model
from cauce.recipe.load import load_recipe
from cauce.stages.prepare import prepare
from cauce.types import GenerationRequest
from tests.tiny import tiny_model


def points(*accuracies: float) -> list[Point]:
    return [Point(step=2 * (i + 1), seconds=10.0 * (i + 1), accuracy=value) for i, value in enumerate(accuracies)]


def test_a_target_has_to_be_confirmed() -> None:
    assert reached(points(0.5, 0.6, 0.7)) == Point(step=4, seconds=20.0, accuracy=0.6)
    assert reached(points(0.65, 0.55, 0.61, 0.6)) == Point(step=6, seconds=30.0, accuracy=0.61)
    assert reached(points(0.1, 0.9)) is None
    assert reached([]) is None


def test_evaluations_do_not_count_and_checkpoints_do() -> None:
    rows = (
        {"plan": 0, "eval/test/accuracy": 0.2},
        {"plan": 1, "time/total": 5.0, "time/eval": 7.0, "time/checkpoint": 0.0},
        {"plan": 2, "time/total": 4.0, "time/eval": 0.0, "time/checkpoint": 0.0, "eval/test/accuracy": 0.4},
        {"plan": 3, "time/total": 3.0, "time/eval": 6.0, "time/checkpoint": 1.5, "eval/test/accuracy": 0.7},
    )
    assert points_of(OwnRun(began=0.0, rows=rows, summary={})) == [
        Point(step=2, seconds=9.0, accuracy=0.4),
        Point(step=3, seconds=13.5, accuracy=0.7),
    ]


def test_a_peer_that_never_gets_there_is_said_not_to() -> None:
    result = as_result(points(0.6, 0.6), points(0.1, 0.2, 0.3), dtype="", title="TRL 1", settings={})
    assert (result.ours, result.peer, result.ratio) == (10.0, 30.0, 3.0)
    assert result.peer_is == "TRL 1, which did not reach it in 6 steps"
    with pytest.raises(RuntimeError, match="our run did not reach"):
        as_result(points(0.1), points(0.6, 0.6), dtype="", title="TRL 1", settings={})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_model(tmp_path / "tiny")


def test_trl_gets_the_rows_in_the_order_of_our_run(folder: Path, tmp_path: Path) -> None:
    prepared = prepare(load_recipe("quickstart", [f"model.path={folder}", "run.plans=2", "rollout.stop=[]"]))
    work = workload_of(prepared, tmp_path)
    assert prepared.source is not None
    assert [row["prompt"] for row in work.read_rows()] == [prepared.source.task(n).row.prompt for n in range(32)]
    assert (work.num_prompts, work.group_size, work.max_tokens, work.lr) == (16, 4, 16, 2e-5)


def test_held_out_takes_the_weights_it_is_given(folder: Path, tmp_path: Path) -> None:
    other = tiny_model(tmp_path / "other", seed=1)
    settings = [f"model.path={folder}", "rollout.stop=[]", "eval.tasks=5", "engine.dtype=fp32"]
    evaluator = HeldOut(prepare(load_recipe("quickstart", settings)))
    evaluator.accuracy(other)
    found = dict(evaluator._engine._model.named_parameters())
    for name, tensor in load_file(other / "model.safetensors").items():
        torch.testing.assert_close(found[name], tensor)


def test_held_out_accuracy_is_the_mean_reward(folder: Path) -> None:
    prepared = prepare(load_recipe("quickstart", [f"model.path={folder}", "rollout.stop=[]", "engine.dtype=fp32"]))
    engine = NativeEngine(load_model(str(folder), dtype=torch.float32, attention="sdpa"), slots=4)
    assert prepared.source is not None
    tasks = [prepared.source.of_row(number, row) for number, row in enumerate(prepared.test_rows)]
    right = 0
    for task in tasks:
        (answer,) = engine.generate(
            [
                GenerationRequest(
                    task=task.id,
                    attempt=0,
                    indices=(0,),
                    prompt_ids=task.prompt_ids,
                    sampling=prepared.eval_sampling,
                )
            ]
        )
        digits = "".join(c if c.isdigit() else " " for c in prepared.source.answer_text(answer.token_ids)).split()
        right += bool(digits) and digits[-1] == task.row.columns["answer"]
    assert HeldOut(prepared).accuracy(folder) == pytest.approx(right / 200)
