"""Drawing tokens: hand-computed numbers, frequencies, edges."""

import numpy as np
import pytest
import torch

from cauce.engine.sampling import Sampler, uniforms


def draw(logits: list[float] | torch.Tensor, temperature: float, uniform: float) -> tuple[int, float]:
    row = torch.as_tensor(logits)[None]
    tokens, logps = Sampler().draw(row, np.array([temperature]), np.array([0]), np.array([uniform]))
    return int(tokens[0]), float(logps[0])


@pytest.mark.parametrize(("temperature", "logp"), [(1.0, -0.4076), (0.5, -0.1429), (2.0, -0.6803)])
def test_logp_is_of_the_tempered_distribution(temperature: float, logp: float) -> None:
    # C1
    assert draw([2.0, 1.0, 0.0], temperature, 0.1) == (0, pytest.approx(logp, abs=1e-4))


def test_inverse_cdf_at_its_edges() -> None:
    # Probabilities 0.25, 0.25, 0.5: the token changes exactly at 0.25 and 0.5.
    logits = torch.tensor([1.0, 1.0, 2.0]).log()
    for uniform, token in ((0.0, 0), (0.2499, 0), (0.2501, 1), (0.4999, 1), (0.5001, 2), (1.0 - 2**-53, 2)):
        assert draw(logits, 1.0, uniform)[0] == token


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1.0 - 2**-53])
def test_impossible_tokens_are_never_drawn(uniform: float) -> None:
    logits = torch.full((1000,), float("-inf"))
    logits[700] = 0.0
    assert draw(logits, 1.0, uniform) == (700, 0.0)


def test_temperature_zero_is_the_first_best_with_its_logp_at_one() -> None:
    # C4
    assert draw([0.0, 2.0, 1.0, 2.0], 0.0, 0.99) == (
        1,
        pytest.approx(float(torch.tensor([0.0, 2, 1, 2]).log_softmax(0)[1])),
    )


def test_rows_of_different_temperature_share_a_draw() -> None:
    logits = torch.randn(3, 600)
    temperature = np.array([0.0, 1.0, 0.5])
    row = np.array([2, 0, 1, 2])
    tokens, logps = Sampler().draw(logits, temperature, row, np.array([0.3, 0.3, 0.7, 0.9]))
    assert tokens[1] == int(logits[0].argmax())
    for r, token, logp in zip(row, tokens, logps, strict=True):
        expected = torch.log_softmax(logits[r] / (temperature[r] or 1.0), 0)[token]
        assert logp == pytest.approx(float(expected), abs=1e-6)


def test_frequencies_follow_the_probabilities() -> None:
    logits = torch.randn(1, 1000, generator=torch.Generator().manual_seed(0)) * 2
    count = 20_000
    rng = np.random.default_rng(0)
    tokens, _ = Sampler().draw(logits, np.array([1.0]), np.zeros(count, dtype=np.int64), rng.random(count))
    probability = torch.softmax(logits[0].double(), 0).numpy()
    observed = np.bincount(tokens, minlength=1000)
    spread = np.sqrt(count * probability * (1 - probability)) + 1
    assert (np.abs(observed - count * probability) / spread).max() < 5


def test_bf16_logits_are_normalised_in_fp32() -> None:
    # C5
    logits = torch.randn(1, 1000).bfloat16()
    tokens, logps = Sampler().draw(logits, np.array([1.0]), np.array([0]), np.array([0.5]))
    assert logps.dtype == np.float32
    assert logps[0] == pytest.approx(float(torch.log_softmax(logits[0].float(), 0)[tokens[0]]), abs=1e-5)


def test_kept_buffers_do_not_leak_between_vocabularies() -> None:
    sampler = Sampler()
    sampler.draw(torch.full((4, 500), 9.0), np.ones(4), np.arange(4), np.full(4, 0.5))
    tokens, logps = sampler.draw(torch.zeros(2, 300), np.ones(2), np.arange(2), np.full(2, 0.999999))
    assert tokens.tolist() == [299, 299]
    assert logps == pytest.approx(-np.log(300), abs=1e-5)


def test_uniforms_are_a_function_of_seed_task_and_index() -> None:
    # D13, D14
    assert np.array_equal(uniforms(1, 2, 3, 5), uniforms(1, 2, 3, 9)[:5])
    streams = [
        uniforms(*key, 4).tobytes() for key in ((1, 2, 3), (2, 2, 3), (1, 3, 3), (1, 2, 4), (2, 1, 3), (-1, 2, 3))
    ]
    assert len(set(streams)) == 6
    values = uniforms(0, 0, 0, 100_000)
    assert values.min() >= 0.0
    assert values.max() < 1.0
    assert abs(values.mean() - 0.5) < 0.01
