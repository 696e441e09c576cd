"""The kernels of a training pass against torch's operations and autograd in float64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from cauce.learner.kernels import (
    SPARE_ROWS,
    AdamWStep,
    HeadShape,
    PackedRows,
    TrainingKernels,
    load_training_kernels,
)
from cauce.packing import PackedBatch, pack
from tests.learner.cases import sequence

KERNELS, WHY = load_training_kernels()
pytestmark = pytest.mark.skipif(KERNELS is None, reason=f"no kernels here: {WHY}")
DTYPES = (torch.float32, torch.bfloat16)
# Of the largest number there. bf16 rounds what it stores by 2^-9, and weights and gradients of scores on the way.
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 2**-6}


def kernels() -> TrainingKernels:
    assert KERNELS is not None
    return KERNELS


def random(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    expected = expected.detach()
    assert found.shape == expected.shape
    scale = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
    assert float((found.double() - expected).abs().max()) <= tolerance * scale


def wide(x: Tensor) -> Tensor:
    return x.double().requires_grad_()


def packed_of(groups: list[tuple[int, list[int]]]) -> PackedBatch:
    """Prompts and answers of these lengths."""
    rows = [
        sequence(number, list(range(prompt)), list(range(answer)))
        for number, (prompt, answers) in enumerate(groups)
        for answer in answers
    ]
    (packed,) = pack(rows, 1_000_000)
    return packed


def slow_attention(joint_NW: Tensor, packed: PackedBatch, shape: HeadShape) -> Tensor:
    """Token by token: each sees its prompt and its own answer up to itself, as far back as the window goes."""
    query, key, value = joint_NW.unflatten(1, (-1, shape.width)).split(
        (shape.heads, shape.key_heads, shape.key_heads), 1
    )
    shared = shape.heads // shape.key_heads
    out: list[Tensor | None] = [None] * len(joint_NW)
    runs = [(start, length, 0, 0) for start, length in packed.prompts_G]
    runs += [(start, length, *packed.prompts_G[prompt]) for start, length, prompt in packed.answers_A]
    for start, length, prompt_start, before in runs:
        for t in range(length):
            seen = [*range(prompt_start, prompt_start + before), *range(start, start + t + 1)]
            seen = seen[-shape.window :] if shape.window else seen
            heads = [
                ((key[seen, h // shared] @ query[start + t, h]) * shape.scaling).softmax(0) @ value[seen, h // shared]
                for h in range(shape.heads)
            ]
            out[start + t] = torch.cat(heads)
    return torch.stack([row for row in out if row is not None])


def check_attention(
    groups: list[tuple[int, list[int]]], shape: HeadShape, dtype: torch.dtype, *, seed: int, in_tiles: bool = True
) -> None:
    packed, made = packed_of(groups), kernels()
    joint = random(packed.num_tokens + SPARE_ROWS, shape.joint, seed=seed, dtype=dtype)
    joint[packed.num_tokens :] = torch.nan  # may be read, must not be used
    joint_NW, rows = joint[: packed.num_tokens], PackedRows(packed)
    reference = wide(joint_NW)
    expected = slow_attention(reference, packed, shape)
    grad = random(*expected.shape, seed=seed + 1, dtype=dtype)
    expected.backward(grad.double())
    has_tiles, made._kernels.has_tiles = made._kernels.has_tiles, made._kernels.has_tiles and in_tiles
    try:
        attended = made.attend(rows, joint_NW, shape)
        found = made.attend_grad(rows, joint_NW, shape, attended, grad)
    finally:
        made._kernels.has_tiles = has_tiles
    close(attended[0], expected, TOLERANCE[dtype])
    assert reference.grad is not None
    close(found, reference.grad, TOLERANCE[dtype])


@pytest.mark.parametrize("in_tiles", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=20, deadline=None)
@given(
    groups=st.lists(
        st.tuples(st.integers(1, 70), st.lists(st.integers(1, 40), min_size=1, max_size=4)), min_size=1, max_size=3
    ),
    key_heads=st.integers(1, 3),
    shared=st.integers(1, 4),
    width=st.sampled_from([8, 32, 64]),
    window=st.sampled_from([None, 1, 7, 33]),
    seed=st.integers(0, 1000),
)
def test_attention(in_tiles, dtype, groups, key_heads, shared, width, window, seed) -> None:
    shape = HeadShape(heads=key_heads * shared, key_heads=key_heads, width=width, scaling=width**-0.5, window=window)
    check_attention(groups, shape, dtype, seed=seed, in_tiles=in_tiles)


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_over_many_blocks_and_one_prompt_shared_by_many(dtype: torch.dtype) -> None:
    """Blocks of queries and keys by the dozen, and answers that several tasks share out."""
    shape = HeadShape(heads=2, key_heads=1, width=32, scaling=0.2, window=None)
    check_attention([(300, [170, 1, 33, 64, 5, 31, 32, 90])], shape, dtype, seed=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_numbers_each_time_and_whatever_shares_the_batch(dtype: torch.dtype) -> None:
    shape = HeadShape(heads=6, key_heads=2, width=64, scaling=0.125, window=None)
    both, first = packed_of([(40, [30, 20]), (50, [10, 60])]), packed_of([(40, [30, 20])])
    joint = random(both.num_tokens + SPARE_ROWS, shape.joint, seed=3, dtype=dtype)
    grad = random(both.num_tokens, shape.heads * shape.width, seed=4, dtype=dtype)

    def run(packed: PackedBatch) -> tuple[Tensor, Tensor]:
        rows, num = PackedRows(packed), packed.num_tokens
        attended = kernels().attend(rows, joint[:num], shape)
        return attended[0], kernels().attend_grad(rows, joint[:num], shape, attended, grad[:num].contiguous())

    once, again, alone = run(both), run(both), run(first)
    for left, right, part in zip(once, again, alone, strict=True):
        assert torch.equal(left, right)
        close(part, left[: len(part)].double(), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotation_and_its_transpose(dtype: torch.dtype) -> None:
    shape = HeadShape(heads=3, key_heads=2, width=16, scaling=1.0, window=None)
    joint = random(9, shape.joint, seed=0, dtype=dtype)
    cosine, sine = random(9, 16, seed=1, dtype=dtype), random(9, 16, seed=2, dtype=dtype)
    reference = wide(joint)
    heads = reference.unflatten(1, (-1, 16))
    low, high = heads[:, :5].chunk(2, dim=-1)
    turned = heads[:, :5] * cosine[:, None].double() + torch.cat([-high, low], -1) * sine[:, None].double()
    expected = torch.cat([turned, heads[:, 5:]], 1).flatten(1)
    grad = random(*expected.shape, seed=3, dtype=dtype)
    expected.backward(grad.double())
    kernels().rotate(joint, shape, (cosine, sine))
    kernels().rotate(grad, shape, (cosine, sine), back=True)
    close(joint, expected, TOLERANCE[dtype])
    assert reference.grad is not None
    close(grad, reference.grad, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 7), (5, 64), (300, 576)])
def test_rms_norm_grad_is_added(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x, weight = random(*shape, seed=0, dtype=dtype) * 3, random(shape[1], seed=1, dtype=dtype)
    given_, before = random(*shape, seed=2, dtype=dtype), random(*shape, seed=3, dtype=dtype)
    wide_x, wide_weight = wide(x), wide(weight)
    functional.rms_norm(wide_x, (shape[1],), wide_weight, 1e-5).backward(given_.double())
    into = before.clone()
    grad_weight = kernels().rms_norm_grad(x, weight, 1e-5, given_, into)
    assert wide_x.grad is not None
    assert wide_weight.grad is not None
    close(into, wide_x.grad + before.double(), TOLERANCE[dtype])
    close(grad_weight, wide_weight.grad, 1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [3, 100])
def test_gate_and_its_gradient_in_place(dtype: torch.dtype, rows: int) -> None:
    joint, grad = random(rows, 2 * 1000, seed=0, dtype=dtype) * 4, random(rows, 1000, seed=1, dtype=dtype)
    reference = wide(joint)
    gates, ups = reference.chunk(2, dim=1)
    expected = functional.silu(gates) * ups
    expected.backward(grad.double())
    close(kernels().gate(joint), expected, TOLERANCE[dtype])
    kernels().gate_grad(joint, grad)
    assert reference.grad is not None
    close(joint, reference.grad, TOLERANCE[dtype])
    close(grad, expected, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_token_logps_entropy_and_gradient(dtype: torch.dtype, temperature: float) -> None:
    logits, target = random(7, 5003, seed=0, dtype=dtype) * 5, torch.arange(7) * 700
    logits[1, 10:] = -torch.inf  # as a head that forbids tokens writes it
    target[1] = 3
    reference = wide(logits)
    logp_MV = (reference / temperature).log_softmax(-1)
    expected = logp_MV.gather(1, target[:, None])[:, 0]
    probability_MV = logp_MV.detach().exp()
    entropy = -(probability_MV * logp_MV.detach().clamp(min=-1e4)).sum(-1)
    grad = random(7, seed=1, dtype=torch.float32)
    expected.backward(grad.double())
    logp, found_entropy, normaliser = kernels().token_logps(logits, target, temperature)
    close(logp, expected, 1e-6)
    close(found_entropy, entropy, 1e-5)
    kernels().token_logps_grad(logits, target, normaliser, grad, temperature)
    assert reference.grad is not None
    close(logits, reference.grad, TOLERANCE[dtype])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_number_that_is_none_is_seen_in_its_row_alone(bad: float) -> None:
    logits = random(3, 400, seed=0, dtype=torch.float32)
    logits[1, 7] = bad
    logp, entropy, _ = kernels().token_logps(logits, torch.tensor([0, 1, 2]), 1.0)
    assert torch.equal(logp.isnan(), torch.tensor([False, True, False]))
    assert torch.equal(entropy.isnan(), torch.tensor([False, True, False]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adamw_is_pytorchs(dtype: torch.dtype, weight_decay: float) -> None:
    weight = random(70_001, seed=0, dtype=torch.float32)
    parameter = torch.nn.Parameter(weight.double())
    reference = torch.optim.AdamW([parameter], lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=weight_decay)
    moments, copy = (torch.zeros_like(weight), torch.zeros_like(weight)), weight.bfloat16()
    for number in range(1, 5):
        grad = random(70_001, seed=number, dtype=dtype)
        parameter.grad = grad.double() * 0.25
        reference.step()
        step = AdamWStep(number=number, lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=weight_decay, scale=0.25)
        kernels().adamw(step, weight, moments, grad, copy)
        close(weight, parameter, 2e-6)
        assert torch.equal(copy, weight.bfloat16())
    close(moments[0], reference.state[parameter]["exp_avg"], 1e-6)
    close(moments[1], reference.state[parameter]["exp_avg_sq"], 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_of_all_numbers(dtype: torch.dtype) -> None:
    tensors = [random(200_003, seed=0, dtype=dtype), random(5, seed=1, dtype=dtype) * 100, torch.zeros(0, dtype=dtype)]
    expected = math.sqrt(sum(float(t.double().square().sum()) for t in tensors))
    assert kernels().norm(tensors) == pytest.approx(expected, rel=1e-6)
    tensors[1][2] = torch.nan
    assert math.isnan(kernels().norm(tensors))
    tensors[1][2] = torch.inf
    assert kernels().norm(tensors) == math.inf


@pytest.mark.parametrize("shape", [(1, 1), (8, 8), (64, 16), (7, 9), (65, 23), (300, 576)])
def test_turning(shape: tuple[int, int]) -> None:
    x = random(*shape, seed=0, dtype=torch.bfloat16)
    assert torch.equal(kernels().turned(x), x.t())
    assert torch.equal(kernels().turned(x.float()), x.float().t())
