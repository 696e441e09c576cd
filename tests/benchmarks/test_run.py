"""`make bench NAME...`: which names there are, and what becomes of their figures."""

import json
from pathlib import Path

import pytest
from benchmarks.bench import Bench
from benchmarks.results import Result
from benchmarks.run import MEASUREMENTS, main, run

PROMISED = {
    "grpo_step_vs_trl",
    "grpo_step_vs_trl_fp32",
    "grpo_step_vs_trl_bf16",
    "grpo_step_vs_trl_all_signal",
    "reward_curve_vs_trl",
    "first_plan_log_ratio_fp32",
    "first_plan_log_ratio_bf16",
    "journal_share",
    "startup",
    "weights_vs_copy",
    "control_plane_memory",
    "control_plane_1000",
    "decode_vs_gemm",
    "learner_vs_gemm",
    "learner_vs_padded",
    "learner_surface",
    "learner_long",
    "generate_vs_transformers",
    "generate_vs_vllm",
    "time_to_accuracy_vs_trl",
}


def test_the_promised_names_are_there() -> None:
    assert MEASUREMENTS.keys() == PROMISED


def test_an_unknown_name_lists_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["journal_share", "grpo_stp"]) == 2
    text = capsys.readouterr().err
    assert "unknown: grpo_stp" in text
    assert all(f"\n  {name}\n" in text for name in PROMISED)


def test_a_failure_keeps_the_figures_of_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def figure(value: float) -> dict[str, Result]:
        return {"fine": Result(ours=value, peer=4.0, unit="s", dtype="", runs=1)}

    def breaks(bench: Bench) -> dict[str, Result]:
        raise OSError("no room")

    path = tmp_path / "results.json"
    known = {"breaks": breaks, "zero": lambda bench: figure(0.0), "fine": lambda bench: figure(2.0)}
    assert run(["breaks", "zero", "fine"], Bench(), path, known) == 1
    assert json.loads(path.read_text())["fine"]["ratio"] == 2.0
    printed = capsys.readouterr()
    assert "OSError: no room" in printed.err
    assert "not measured: breaks, zero" in printed.err
    assert "fine: 2 s, peer 4: 2 times better" in printed.out
    assert run(["fine"], Bench(), path, known) == 0
