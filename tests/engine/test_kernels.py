"""The compiled kernels against slow references: torch's operations in float64, and the same engine without them."""

import shutil
import stat
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cauce.engine import kernels as module
from cauce.engine.cache import RowCache
from cauce.engine.kernel_plan import Asked, KernelPlan
from cauce.engine.kernels import Kernels, load_kernels, with_room
from cauce.engine.sampling import Sampler
from cauce.errors import ModelError
from tests.engine.asking import engine_of, mixed_requests
from tests.tiny import tiny_model

KERNELS, WHY = load_kernels()
needs_kernels = pytest.mark.skipif(KERNELS is None, reason=f"no kernels here: {WHY}")
needs_tiles = pytest.mark.skipif(KERNELS is None or not KERNELS.has_tiles, reason="this CPU has no AMX")
DTYPES = (torch.float32, torch.bfloat16)
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-8}  # of the largest number: half a unit in the last place, twice


def kernels() -> Kernels:
    assert KERNELS is not None
    return KERNELS


def random(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(found: Tensor, expected: Tensor) -> None:
    scale = max(1.0, float(expected.abs().max()))
    assert float((found.double() - expected).abs().max()) <= TOLERANCE[found.dtype] * scale


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 7), (5, 1, 64), (3, 4, 576), (200, 1, 576)])
def test_rms_norm(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, weight = random(*shape, seed=0, dtype=dtype) * 3, random(shape[-1], seed=1, dtype=dtype)
    wide = x.double()
    expected = wide * (wide.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
    close(kernels().rms_norm(x, weight, 1e-5), expected)


class Case:
    """One layer of a decode step with everything drawn at random, and what it must give."""

    def __init__(self, *, lengths: list[tuple[int, int]], key_heads: int, shared: int, width: int, seed: int) -> None:
        self.heads, self.key_heads, self.width = key_heads * shared, key_heads, width
        self.num_rows, self.seed = len(lengths), seed
        self.prompt_S = np.array([prompt for prompt, _ in lengths])
        self.answer_S = np.array([answer for _, answer in lengths])
        self.prompt_row_S = np.random.default_rng(seed).permutation(self.num_rows)

    def tensors(self, dtype: torch.dtype) -> dict[str, Tensor]:
        rows, width, capacity = self.num_rows, self.width, 40
        angle = random(rows, 1, width // 2, seed=self.seed, dtype=torch.float32).repeat(1, 1, 2)
        joint_width = (self.heads + 2 * self.key_heads) * width
        made = {
            "joint": random(rows, 1, joint_width, seed=self.seed + 1, dtype=dtype),
            "cosine": angle.cos().to(dtype),
            "sine": angle.sin().to(dtype),
            "query_norm": random(width, seed=self.seed + 2, dtype=dtype),
            "key_norm": random(width, seed=self.seed + 3, dtype=dtype),
        }
        for number, name in enumerate(("answer_keys", "answer_values", "prompt_keys", "prompt_values")):
            made[name] = random(rows, capacity, self.key_heads, width, seed=self.seed + 4 + number, dtype=dtype)
        return made

    def run(self, given: dict[str, Tensor], *, window: int | None, normed: bool) -> Tensor:
        """By the kernel, which writes the new keys and values into the answers of `given`."""
        prompts, answers = RowCache(), RowCache()
        for cache, name in ((prompts, "prompt"), (answers, "answer")):
            cache.keys[0], cache.values[0] = given[f"{name}_keys"], given[f"{name}_values"]
            cache.rows, cache.capacity = cache.keys[0].shape[:2]
        plan = KernelPlan(
            kernels(),
            prompts=prompts,
            answers=answers,
            answer_S=self.answer_S,
            prompt_S=self.prompt_S,
            prompt_row_S=self.prompt_row_S,
        )
        norms = tuple(_Norm(given[name]) for name in ("query_norm", "key_norm")) if normed else None
        asked = Asked(
            layer=0,
            heads=self.heads,
            key_heads=self.key_heads,
            width=self.width,
            scaling=self.width**-0.5,
            window=window,
            norms=norms,
        )
        return plan.attend_joint(asked, given["joint"], given["cosine"], given["sine"])

    def expected(self, given: dict[str, Tensor], *, window: int | None, normed: bool) -> Tensor:
        """Row by row in float64; what the kernel rounds to the dtype (queries and keys) is rounded here too."""
        dtype, shared, out = given["joint"].dtype, self.heads // self.key_heads, []
        for s in range(self.num_rows):
            joint = given["joint"][s, 0].double().unflatten(0, (-1, self.width))
            query, key, value = joint.split((self.heads, self.key_heads, self.key_heads))
            if normed:
                query = _normed(query, given["query_norm"], dtype)
                key = _normed(key, given["key_norm"], dtype)
            query, key = (self._turned(each, given, s).to(dtype).double() for each in (query, key))
            prompt, answer = int(self.prompt_S[s]), int(self.answer_S[s])
            place = int(self.prompt_row_S[s])
            keys = torch.cat(
                [given["prompt_keys"][place, :prompt], given["answer_keys"][s, :answer], key[None].to(dtype)]
            )
            values = torch.cat(
                [given["prompt_values"][place, :prompt], given["answer_values"][s, :answer], value[None].to(dtype)]
            )
            first = 0 if window is None else max(0, prompt + answer + 1 - window)
            keys, values = keys[first:].double(), values[first:].double()
            for h in range(self.heads):
                weights = (keys[:, h // shared] @ query[h] * self.width**-0.5).softmax(0)
                out.append(weights @ values[:, h // shared])
        return torch.stack(out).view(self.num_rows, 1, -1)

    def _turned(self, heads: Tensor, given: dict[str, Tensor], s: int) -> Tensor:
        low, high = heads.chunk(2, dim=-1)
        return heads * given["cosine"][s, 0].double() + torch.cat([-high, low], -1) * given["sine"][s, 0].double()


class _Norm:
    variance_epsilon = 1e-6

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight


def _normed(heads: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    scaled = heads * (heads.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()
    return scaled.to(dtype).double()


@needs_kernels
@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 39)), min_size=1, max_size=5),
    key_heads=st.integers(1, 3),
    shared=st.integers(1, 5),
    width=st.sampled_from([8, 32, 64, 80, 128, 256]),
    window=st.sampled_from([None, 1, 7, 30]),
    normed=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1000),
)
def test_attention(
    lengths: list[tuple[int, int]],
    key_heads: int,
    shared: int,
    width: int,
    window: int | None,
    normed: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    case = Case(lengths=lengths, key_heads=key_heads, shared=shared, width=width, seed=seed)
    tensors = case.tensors(dtype)
    expected = case.expected(tensors, window=window, normed=normed)
    found = case.run(tensors, window=window, normed=normed)
    # In bf16 a query that rounds the other way moves a score by its last bit, and that a weight by as much.
    assert float((found.double() - expected).abs().max()) <= (1e-5 if dtype == torch.float32 else 0.06)
    value = tensors["joint"].view(len(lengths), -1, width)[:, -key_heads:]
    for s, (_, answer) in enumerate(lengths):
        torch.testing.assert_close(tensors["answer_values"][s, answer], value[s], rtol=0, atol=0)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_samples_attention_does_not_depend_on_its_batch_or_on_threads(dtype: torch.dtype) -> None:
    lengths = [(20, 3), (0, 0), (33, 18), (7, 39), (40, 1)]
    case = Case(lengths=lengths, key_heads=2, shared=3, width=64, seed=1)
    together = case.run(case.tensors(dtype), window=None, normed=False)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert torch.equal(case.run(case.tensors(dtype), window=None, normed=False), together)
    finally:
        torch.set_num_threads(before)
    for s in range(len(lengths)):
        alone = Case(lengths=[lengths[s]], key_heads=2, shared=3, width=64, seed=1)
        given = {name: tensor[s : s + 1] for name, tensor in case.tensors(dtype).items() if name[:5] != "query"}
        place = int(case.prompt_row_S[s])
        given |= {name: case.tensors(dtype)[name][place : place + 1] for name in ("prompt_keys", "prompt_values")}
        assert torch.equal(alone.run(given, window=None, normed=False)[0], together[s])


@needs_tiles
@pytest.mark.parametrize("rows", [1, 8, 16, 17, 32, 33, 64, 71])
@pytest.mark.parametrize("biased", [False, True])
def test_products_in_tiles(rows: int, biased: bool) -> None:
    bf16 = torch.bfloat16
    x, other = random(rows, 1, 96, seed=0, dtype=bf16), random(rows, 1, 64, seed=1, dtype=bf16)
    weight, up = (random(64, 96, seed=seed, dtype=bf16) * 0.1 for seed in (2, 3))
    bias = random(64, seed=4, dtype=bf16) if biased else None
    shift = 0.0 if bias is None else bias.double()
    packed = kernels().pack(weight)
    expected = x.double() @ weight.double().T + shift
    close(kernels().multiply(x, packed, bias, None), expected)
    close(kernels().multiply(x, packed, bias, other), expected + other.double())
    gated = torch.nn.functional.silu(expected) * (x.double() @ up.double().T + shift)
    close(kernels().gate(x, packed, kernels().pack(up), bias, bias), gated)


@needs_tiles
def test_a_rows_product_does_not_depend_on_its_batch() -> None:
    x, weight = (random(*shape, seed=0, dtype=torch.bfloat16) for shape in ((70, 96), (64, 96)))
    packed = kernels().pack(weight)
    together = kernels().multiply(x, packed, None, None)
    for row in (0, 31, 32, 69):
        assert torch.equal(kernels().multiply(x[row : row + 1], packed, None, None)[0], together[row])


@needs_tiles
def test_a_weight_that_does_not_fit_tiles_is_refused() -> None:
    with pytest.raises(ValueError, match=r"weight \(64, 40\).*multiples of 32"):
        kernels().pack(torch.zeros(64, 40, dtype=torch.bfloat16))


def test_room_behind_the_rows() -> None:
    tensor = with_room((33, 1, 8), torch.bfloat16)
    assert tensor.shape == (33, 1, 8)
    assert tensor.is_contiguous()
    assert tensor.untyped_storage().nbytes() == 64 * 8 * 2


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_draws_the_tokens_that_torch_draws(dtype: torch.dtype) -> None:
    random_numbers = np.random.default_rng(0)
    logits = random(6, 1000, seed=0, dtype=dtype) * 4
    logits[2, 500:] = float("-inf")
    temperature = np.array([1.0, 0.7, 1.0, 0.0, 2.0, 1.0])
    row_N = np.repeat(np.arange(6), 200)
    uniform_N = random_numbers.random(len(row_N))
    uniform_N[:3] = (0.0, 1.0 - 2**-53, 0.5)
    expected, expected_logp = Sampler().draw(logits.clone(), temperature, row_N, uniform_N)
    found, logp = Sampler(kernels()).draw(logits.clone(), temperature, row_N, uniform_N)
    assert (found != expected).mean() < 0.003  # a uniform number within rounding of a border falls on either side
    same = found == expected
    np.testing.assert_allclose(logp[same], expected_logp[same], atol=2e-5)
    reference = torch.log_softmax(logits.double() / torch.tensor([1.0, 0.7, 1.0, 1.0, 2.0, 1.0])[:, None], -1)
    np.testing.assert_allclose(logp, reference.numpy()[row_N, found], atol=2e-5)
    assert (found[row_N == 2] < 500).all()
    assert np.isfinite(logp).all()


@needs_kernels
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_logits_without_a_number_are_an_error(bad: float) -> None:
    logits = torch.zeros(2, 300)
    logits[1, 7 : 8 if bad == bad and bad > 0 else 300] = bad
    logits[1, :7] = bad
    with pytest.raises(ModelError, match="not finite"):
        Sampler(kernels()).draw(logits, np.ones(2), np.array([0]), np.array([0.5]))


@needs_kernels
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral"])
def test_an_engine_gives_the_same_with_and_without(tmp_path: Path, kind: str) -> None:
    folder = tiny_model(tmp_path, kind, vocab=288)
    compiled, plain = engine_of(folder, slots=6), engine_of(folder, slots=6, compiled=False)
    assert (compiled.status()["kernels"], plain.status()["kernels"]) == ("compiled", "switched off")
    requests = mixed_requests(6)
    for expected, found in zip(plain.generate(requests), compiled.generate(requests), strict=True):
        assert expected.token_ids.tolist() == found.token_ids.tolist()
        np.testing.assert_allclose(found.logps, expected.logps, atol=3e-5)


def test_without_a_compiler_the_reason_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert load_kernels.__wrapped__() == (None, "there is no C++ compiler (c++, g++, clang++)")


def test_a_compiler_that_fails_is_told_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "bin" / "c++"
    broken.parent.mkdir()
    broken.write_text('#!/bin/sh\n[ "$1" = --version ] && echo broken 1 && exit 0\necho "no such thing" >&2\nexit 1\n')
    broken.chmod(broken.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{broken.parent}:/bin")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert load_kernels.__wrapped__() == (None, "c++ failed: no such thing")
    assert list((tmp_path / "cache" / "cauce" / "kernels").iterdir()) == []


@needs_kernels
def test_compiled_once_for_a_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = module._compiled(module._openmp_of_torch())
    stamp = first.stat().st_mtime_ns
    assert module._compiled(module._openmp_of_torch()) == first
    assert first.stat().st_mtime_ns == stamp
    assert [path.name for path in first.parent.iterdir()] == [first.name]
    shutil.rmtree(tmp_path)
