"""Tiles against a loop over queries in float64; what a tile may hold, and what it may waste."""

import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cauce.models import tiled_attention as tiled
from cauce.packing import pack
from tests.learner.cases import random_sequences, sequence

CPU = torch.device("cpu")


def slow_attention(query, key, value, packed, window, scaling):
    """Each token of the row with the places of those before it, written out."""
    contexts = {}
    for start, length in packed.prompts_G:
        for t in range(length):
            contexts[start + t] = [*range(start, start + t + 1)]
    for start, length, prompt in packed.answers_A:
        before = contexts[sum(packed.prompts_G[prompt]) - 1]
        for t in range(length):
            contexts[start + t] = [*before, *range(start, start + t + 1)]
    shared = query.shape[1] // key.shape[1]
    rows = []
    for n in range(len(query)):
        seen = contexts[n] if window is None else contexts[n][-window:]
        heads = []
        for h in range(query.shape[1]):
            scores = scaling * (key[seen, h // shared] @ query[n, h])
            heads.append(scores.softmax(0) @ value[seen, h // shared])
        rows.append(torch.stack(heads))
    return torch.stack(rows)


def inputs_of(packed, seed, *, heads=4, key_heads=2, width=3):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((heads, width), (key_heads, width), (key_heads, width))
    return [
        torch.randn(packed.num_tokens, *shape, dtype=torch.float64, generator=generator).requires_grad_()
        for shape in shapes
    ]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 10_000),
    queries=st.integers(1, 12),
    pairs=st.integers(1, 400),
    window=st.one_of(st.none(), st.integers(1, 9)),
    key_heads=st.sampled_from([1, 2, 4]),
    share=st.booleans(),
)
def test_values_and_gradients_are_those_of_the_slow_loop(monkeypatch, seed, queries, pairs, window, key_heads, share):
    sequences = random_sequences(seed, groups=2, answers=3, longest=9)
    (packed,) = pack(sequences, 10_000, share_prompts=share)
    monkeypatch.setattr(tiled, "QUERIES", queries)
    monkeypatch.setitem(tiled.TILE_PAIRS, "cpu", pairs)
    inputs = inputs_of(packed, seed, key_heads=key_heads)
    given_NHE = torch.randn(packed.num_tokens, 4, 3, dtype=torch.float64)
    tiles = tiled.tiles_of(packed, window, device=CPU)
    found = tiled.tiled_attention(*inputs, tiles, window=window, scaling=0.7)
    expected = slow_attention(*inputs, packed, window, 0.7)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)
    found_grads = torch.autograd.grad(found, inputs, given_NHE)
    expected_grads = torch.autograd.grad(expected, inputs, given_NHE)
    for left, right in zip(found_grads, expected_grads, strict=True):
        torch.testing.assert_close(left, right, atol=1e-11, rtol=1e-11)


def group(prompt, lengths):
    random = np.random.default_rng(0)
    prompt_ids = random.integers(0, 250, prompt)
    return [sequence(0, prompt_ids, random.integers(0, 250, length)) for length in lengths]


def wanted_and_padded(packed, tiles):
    """Pairs that a causal mask lets through, and pairs that tiles hold."""
    wanted = sum(n * (n + 1) // 2 for _, n in packed.prompts_G)
    wanted += sum(n * (n + 1) // 2 + n * packed.prompts_G[p][1] for _, n, p in packed.answers_A)
    return wanted, sum(tile.query_BQ.numel() * tile.key_BS.shape[1] for tile in tiles)


@pytest.mark.parametrize(
    "lengths", [[1000] * 8, [1000] + [10] * 7, [1500, 900, 400, 200, 100, 50, 20, 2]], ids=["even", "one long", "mixed"]
)
def test_tiles_are_small_and_waste_little_whatever_the_lengths(lengths):
    (packed,) = pack(group(2000, lengths), 20_000)
    tiles = tiled.tiles_of(packed, None, device=CPU)
    limit = tiled.TILE_PAIRS["cpu"]
    for tile in tiles:
        blocks, num_queries = tile.query_BQ.shape
        pairs = blocks * num_queries * tile.key_BS.shape[1]
        assert pairs <= limit or (blocks == 1 and num_queries <= tiled.QUERIES)
    wanted, padded = wanted_and_padded(packed, tiles)
    assert padded < 1.25 * wanted
    places = torch.cat([tile.place for tile in tiles])
    assert places.sort().values.tolist() == list(range(packed.num_tokens))  # each query once


def test_a_window_leaves_out_the_keys_that_nobody_sees():
    (packed,) = pack(group(2000, [1000] * 2), 20_000)
    tiles = tiled.tiles_of(packed, 64, device=CPU)
    assert max(tile.key_BS.shape[1] for tile in tiles) == tiled.QUERIES + 63


def test_short_answers_share_a_few_tiles():
    (packed,) = pack(random_sequences(1, groups=8, answers=8, longest=40), 20_000)
    assert len(tiled.tiles_of(packed, None, device=CPU)) <= 12


def test_autograd_holds_queries_keys_and_values_alone():
    (packed,) = pack(group(300, [100] * 8), 20_000)
    inputs = inputs_of(packed, 0)
    held = {}

    def note(tensor):
        held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    tiles = tiled.tiles_of(packed, None, device=CPU)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        tiled.tiled_attention(*inputs, tiles, window=None, scaling=1.0)
    assert sum(held.values()) == sum(x.nbytes for x in inputs)


def test_bf16_is_computed_in_float32_here():
    (packed,) = pack(group(30, [20, 5]), 20_000)
    inputs = [x.detach().bfloat16() for x in inputs_of(packed, 1, width=16)]
    tiles = tiled.tiles_of(packed, None, device=CPU)
    found = tiled.tiled_attention(*inputs, tiles, window=None, scaling=0.25)
    exact = slow_attention(*(x.double() for x in inputs), packed, None, 0.25)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), exact, atol=0, rtol=2**-8)  # rounded once, at the end
    assert math.isfinite(float(found.sum()))
