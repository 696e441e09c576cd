"""The bound that decoding and learning are held to: which products, how many FLOPs, and which way counts."""

import time
from pathlib import Path

import pytest
import torch
from benchmarks.bench import Bench
from benchmarks.gemm import (
    Products,
    WeightGroup,
    backward_products,
    fastest,
    forward_flops,
    forward_products,
    groups_of,
)
from benchmarks.rates import as_result, measure

from cauce.models.load import load_model
from tests.tiny import VOCAB, tiny_model

# hidden 32, 4 heads of 8, 2 of them for keys, 64 between, 2 layers
LAYER = 32 * 32 + 2 * 16 * 32 + 32 * 32 + 2 * 64 * 32 + 32 * 64


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tiny_model(tmp_path / "tiny"))


def test_flops_of_a_model_by_hand(folder: str) -> None:
    model = load_model(folder, dtype=torch.float32, attention="sdpa").model
    groups = groups_of(model, rows=10, head_rows=3)
    assert [group.name for group in groups] == ["qkv", "o", "gate_up", "down"] * 2 + ["head"]
    assert forward_flops(groups) == 2 * (2 * LAYER * 10 + VOCAB * 32 * 3)
    addresses = {weight.data_ptr() for group in groups for weight in group.weights}
    assert len(addresses) == 2 * 7 + 1  # every layer has weights of its own


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_way_makes_the_same_products(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weights = tuple(torch.randn(rows, 16).to(dtype) for rows in (32, 16))
    group = WeightGroup(name="g", weights=weights, rows=8)
    (forward,) = forward_products([group])
    joint = torch.cat([call() for call in forward.ways["plain"]], dim=-1)
    for calls in forward.ways.values():
        found = torch.cat([call() for call in calls], dim=-1)
        torch.testing.assert_close(found, joint, atol=0.05, rtol=0.02)
    to_input, to_weight = backward_products([group])
    shapes = {way: [tuple(call().shape) for call in calls] for way, calls in to_input.ways.items()}
    assert shapes["plain"] == [(8, 16), (8, 16)]
    assert shapes["plain, joint"] == [(8, 16)]
    shapes = {way: [tuple(call().shape) for call in calls] for way, calls in to_weight.ways.items()}
    assert shapes == {
        "plain": [(32, 16), (16, 16)],
        "plain, joint": [(48, 16)],
        "turned, joint": [(16, 48)],
        "turned before, joint": [(48, 16)],
    }


def test_the_fastest_way_of_each_name_counts_over_all_layers() -> None:
    def sleeps(seconds: float) -> list[object]:
        return [lambda: time.sleep(seconds)]

    products = [
        Products(name="a", ways={"x": sleeps(0.02), "y": sleeps(0.001)}),  # type: ignore[dict-item]
        Products(name="a", ways={"x": sleeps(0.02), "y": sleeps(0.001)}),  # type: ignore[dict-item]
        Products(name="b", ways={"x": sleeps(0.004)}),  # type: ignore[dict-item]
    ]
    seconds, winners = fastest(products, repeats=2)
    assert winners == {"a": "y", "b": "x"}
    assert 0.006 <= seconds < 0.02


def test_the_ratio_is_our_share_of_the_bound() -> None:
    played = [{"rate": 30.0, "gemm_rate": 100.0}, {"rate": 50.0, "gemm_rate": 100.0}, {"rate": 40.0, "gemm_rate": 80.0}]
    result = as_result(played, dtype="bf16", settings={})
    assert (result.ours, result.peer, result.ratio) == (40.0, 100.0, pytest.approx(0.4))
    assert result.spread["ratio"] == [0.3, 0.5]


@pytest.mark.slow
@pytest.mark.parametrize("what", ["decode", "learner"])
def test_both_rates_of_a_tiny_model(folder: str, tmp_path: Path, what: str) -> None:
    bench = Bench(model=folder, steps=1, cache=tmp_path / "cache", charts=tmp_path)
    result = measure(bench, what, {})
    facts = result.detail
    assert result.ours == pytest.approx(facts["gflop"] / facts["seconds"])
    assert result.peer == pytest.approx(facts["gflop"] / facts["gemm_s"])
    if what == "decode":
        assert facts["gflop"] == pytest.approx(2 * 64 * (2 * LAYER + VOCAB * 32) / 1e9)
    else:
        flops = 6 * (2 * LAYER * facts["packed_tokens"] + VOCAB * 32 * facts["trained_tokens"])
        assert facts["gflop"] == pytest.approx(flops / 1e9)
