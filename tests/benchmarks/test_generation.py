"""The comparisons of generation: their work, what counts as a token, and real rounds with a tiny model."""

import json
import sys
from pathlib import Path

import pytest
from benchmarks.bench import Bench
from benchmarks.generation import OURS, TRANSFORMERS, VLLM, as_result, env_of, start, work_of
from benchmarks.generation_work import CHAT, SUMS, GenerationWork, answer_length, facts_of
from benchmarks.rounds import alone

from tests.tiny import EOS_ID, tiny_model


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(model=str(tiny_model(tmp_path / "tiny")), steps=1, cache=tmp_path / "cache", charts=tmp_path)


def test_an_answer_ends_with_its_first_end_token() -> None:
    assert answer_length([5, 6, 2, 2, 2], [2]) == 3
    assert answer_length([5, 6, 7], [2]) == 3
    assert answer_length([2, 5], [2, 9]) == 1
    assert facts_of(2.0, [3, 5]) == {"seconds": 2.0, "tokens": 8, "rate": 4.0, "longest": 5}


def test_work_is_16_prompts_of_two_kinds_and_travels_as_json(bench: Bench) -> None:
    work = work_of(bench, num_rounds=2)
    assert GenerationWork.from_json(work.to_json()) == work
    assert (len(work.prompts), work.num_samples, work.end_ids) == (16, 8, (EOS_ID,))
    texts = [bytes(token for token in ids if token < 256) for ids in work.prompts]
    assert len({len(text) for text in texts[:8]}) == 1  # sums
    assert len(set(texts)) == len(SUMS + CHAT) == 16
    assert bench.model not in json.dumps(work.settings())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("side", "settings"),
    [
        ("ours", {"slots": 8}),
        ("transformers", {"cache": "dynamic", "batch": 5, "malloc": False}),
        ("transformers", {"cache": "static", "batch": 8, "malloc": True}),
    ],
)
def test_a_side_plays_its_rounds(bench: Bench, side: str, settings: dict[str, object]) -> None:
    prompts = tuple(ids[-4 - place :] for place, ids in enumerate(work_of(bench, num_rounds=2).prompts[:3]))
    work = GenerationWork(
        model=bench.model, prompts=prompts, end_ids=(EOS_ID,), num_rounds=2, num_samples=4, max_tokens=6
    )
    with start(bench, work, side=side, settings={**settings, "dtype": "fp32"}, python=sys.executable) as player:
        rounds = alone(player, num_rounds=2, warm_up=0)
    for facts in rounds:
        assert 12 <= facts["tokens"] <= 72
        assert facts["rate"] == pytest.approx(facts["tokens"] / facts["seconds"])
        assert facts["longest"] <= 6


def test_the_figure_is_a_median_of_rates_and_higher_is_better() -> None:
    ours = [{"rate": rate} for rate in (100.0, 300.0, 200.0)]
    peer = [{"rate": rate} for rate in (50.0, 100.0, 200.0)]
    result = as_result(ours, peer, dtype="bf16", title="P", settings={})
    assert (result.ours, result.peer, result.ratio, result.runs) == (200.0, 100.0, 2.0, 3)
    assert result.spread == {"ours": [100.0, 300.0], "peer": [50.0, 200.0], "ratio": [1.0, 3.0]}


def test_every_candidate_has_its_surroundings() -> None:
    for side, candidates in (("ours", OURS), ("transformers", TRANSFORMERS), ("vllm", VLLM)):
        for settings in candidates.values():
            env = env_of(side, settings)
            assert ("GLIBC_TUNABLES" in env) == (side == "ours" or settings["malloc"])
            assert ("VLLM_CPU_KVCACHE_SPACE" in env) == (side == "vllm")
            assert ("OMP_NUM_THREADS" in env) == settings.get("omp", True)
