"""The packed forward against plain rows and a slow float64 loop; the arithmetic of one log-probability."""

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, GraniteConfig

from cauce.errors import DataError, ModelError
from cauce.models import forward, packed_attention
from cauce.models.forward import logps_of, token_logps
from cauce.packing import pack
from tests.learner.cases import (
    assert_close,
    float64_copy,
    gradients,
    plain_model,
    random_sequences,
    sequence,
    slow_logps,
)
from tests.tiny import KINDS


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Tiny models by kind; a test that trains one must copy it."""
    made = {}

    def get(kind, packed=True):
        if kind not in made:
            made[kind] = plain_model(tmp_path_factory.mktemp(kind), kind)
        made[kind].set_attn_implementation(packed_attention.NAME if packed else "sdpa")
        made[kind].zero_grad()
        return made[kind]

    return get


def logps_by_sequence(model, sequences, budget, temperature=1.0, share=True):
    """Log-probs as one array per sequence, NaN where nothing was trained."""
    out = [np.full(len(s.token_ids), np.nan, np.float32) for s in sequences]
    for packed in pack(sequences, budget, share_prompts=share):
        logp_M, _ = token_logps(model, packed, temperature)
        packed.scatter(logp_M.detach().numpy(), out)
    return out


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_packed_equals_slow_float64_loop(models, kind, temperature):
    """C6, C8."""
    sequences = random_sequences(1, longest=12, masked=True)
    double = float64_copy(models(kind))
    found = logps_by_sequence(models(kind), sequences, 10_000, temperature)
    for made, logps in zip(sequences, found, strict=True):
        with torch.no_grad():
            expected = slow_logps(double, made, temperature).numpy()
        np.testing.assert_allclose(logps[made.mask == 1], expected[made.mask == 1], atol=2e-5)
        assert np.isnan(logps[made.mask == 0]).all()


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_equal_plain_rows_and_float64(models, kind):
    sequences = random_sequences(2, longest=12)
    weights = torch.randn(sum(len(s.token_ids) for s in sequences), generator=torch.Generator().manual_seed(0))

    def backward(model, share):
        model.zero_grad()
        (packed,) = pack(sequences, 10_000, share_prompts=share)
        logp_M, _ = token_logps(model, packed, 1.0)
        (logp_M * weights.to(logp_M.dtype)).sum().backward()
        return gradients(model)

    double = float64_copy(models(kind))
    packed = backward(models(kind), True)
    plain = backward(models(kind, packed=False), False)
    slow = torch.cat([slow_logps(double, s) for s in sequences])
    (slow * weights.double()).sum().backward()
    assert_close(packed, plain, 2e-5)
    assert_close(packed, gradients(double), 2e-5)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 1000),
    budget=st.integers(1, 80),
    order=st.randoms(use_true_random=False),
    kind=st.sampled_from(["llama", "qwen2", "mistral", "gpt2"]),
)
def test_budget_order_and_grouping_change_nothing(models, seed, budget, order, kind):
    """C6, C8."""
    sequences = random_sequences(seed, longest=11, masked=True)
    shuffled = list(range(len(sequences)))
    order.shuffle(shuffled)
    with torch.no_grad():
        whole = logps_by_sequence(models(kind), sequences, 10_000)
        cut = logps_by_sequence(models(kind), [sequences[i] for i in shuffled], budget)
        apart = logps_by_sequence(models(kind), sequences, budget, share=False)
    for place, i in enumerate(shuffled):
        np.testing.assert_allclose(cut[place], whole[i], atol=2e-5)
        np.testing.assert_allclose(apart[i], whole[i], atol=2e-5)


@pytest.mark.parametrize("kind", ["llama", "mistral", "gpt2"])
def test_answers_and_groups_do_not_see_each_other(models, kind):
    """C19."""
    a = sequence(0, [1, 2, 3], [4, 5, 6, 7, 8])
    same_group = sequence(0, [1, 2, 3], [9, 10, 11])
    other_group = sequence(1, [12, 13, 14, 15, 16, 17], [18, 19])
    changed = sequence(0, [1, 2, 3], [200, 5, 201, 7, 202])
    with torch.no_grad():
        alone = [logps_by_sequence(models(kind), [s], 99)[0] for s in (same_group, other_group)]
        first = logps_by_sequence(models(kind), [a, same_group, other_group], 99)[1:]
        second = logps_by_sequence(models(kind), [changed, same_group, other_group], 99)[1:]
    for k in range(2):
        np.testing.assert_array_equal(first[k], second[k])
        np.testing.assert_allclose(first[k], alone[k], atol=1e-5)


def test_sliding_window_stays_a_window_on_positions(models):
    # A window of 8: what stands before it reaches a later token through two layers at most, 14 places back.
    model = models("mistral")
    prompt = list(range(1, 21))
    changed = [99, *prompt[1:]]
    answers = [[30, 31, 32], [40, 41, 42, 43, 44]]
    made = [[sequence(0, p, answer) for answer in answers] for p in (prompt, changed)]
    with torch.no_grad():
        first, second = (logps_by_sequence(model, sequences, 99) for sequences in made)
    for left, right in zip(first, second, strict=True):
        np.testing.assert_array_equal(left, right)
    with torch.no_grad():
        near = logps_by_sequence(model, [sequence(0, [*prompt[:-1], 99], answer) for answer in answers], 99)
    assert np.abs(near[0] - first[0]).min() > 1e-3


def test_scaled_logits_go_through_the_models_own_head():
    config = GraniteConfig(
        vocab_size=260,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        logits_scaling=0.1,
        attention_multiplier=0.3,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    sequences = random_sequences(3)
    with torch.no_grad():
        plain = logps_by_sequence(model, sequences, 10_000, share=False)
        model.set_attn_implementation(packed_attention.NAME)
        packed = logps_by_sequence(model, sequences, 10_000)
        config.logits_scaling = 1.0
        model.config.logits_scaling = 1.0
        unscaled = logps_by_sequence(model, sequences, 10_000)
    np.testing.assert_allclose(np.concatenate(packed), np.concatenate(plain), atol=1e-5)
    assert np.abs(np.concatenate(packed) - np.concatenate(unscaled)).max() > 1e-2
    assert "forward" not in vars(model.base_model)


def test_chunks_and_remaking_logits_change_nothing(models, monkeypatch):
    sequences = random_sequences(4)

    def run():
        model = models("llama_tied")
        (packed,) = pack(sequences, 10_000)
        logp_M, entropy_M = token_logps(model, packed, 0.9)
        logp_M.square().sum().backward()
        return logp_M.detach(), entropy_M, gradients(model)

    logp_M, entropy_M, expected = run()
    monkeypatch.setattr(forward, "CHUNK_BYTES", 4 * 260 * 7)  # seven rows at a time
    monkeypatch.setattr(forward, "KEEP_BYTES", 0)
    again_M, entropy_again_M, found = run()
    torch.testing.assert_close(again_M, logp_M, atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy_again_M, entropy_M, atol=1e-5, rtol=0)
    assert_close(found, expected, 1e-5)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2"])
def test_bf16_is_near_float32(models, kind):
    sequences = random_sequences(5)
    half = copy.deepcopy(models(kind))
    for parameter in half.parameters():
        parameter.data = parameter.data.bfloat16()
    rounded = copy.deepcopy(half)
    for parameter in rounded.parameters():  # the same weights, computed with in float32
        parameter.data = parameter.data.float()
    with torch.no_grad():
        found = np.concatenate(logps_by_sequence(half, sequences, 10_000))
        expected = np.concatenate(logps_by_sequence(rounded, sequences, 10_000))
    assert found.dtype == np.float32
    assert np.abs(found - expected).mean() < 0.03
    assert np.abs(found - expected).max() < 0.25


@pytest.mark.parametrize(
    ("temperature", "logp", "entropy"),
    [(1.0, -0.4076, 0.8324), (0.5, -0.1429, 0.4411), (2.0, -0.6803, 1.0202)],
)
def test_temperature_by_hand(temperature, logp, entropy):
    """C1, C3."""
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    found, spread = logps_of(logits, torch.tensor([0]), temperature)
    assert float(found) == pytest.approx(logp, abs=1e-4)
    assert float(spread) == pytest.approx(entropy, abs=1e-4)


def test_log_softmax_of_bf16_logits_is_float32():
    """C5."""
    logits = torch.randn(16, 1000, generator=torch.Generator().manual_seed(0)).mul(4).bfloat16()
    target = torch.arange(16)
    found, entropy = logps_of(logits, target, 1.0)
    expected = torch.log_softmax(logits.double(), -1).gather(-1, target[:, None])[:, 0]
    assert found.dtype == torch.float32
    assert float((found - expected).abs().max()) < 1e-4
    assert (entropy >= 0).all()
    assert (entropy <= math.log(1000)).all()


def test_gradient_of_one_log_probability():
    logits = torch.randn(5, 11, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([0, 10, 3, 3, 7])
    assert torch.autograd.gradcheck(lambda x: logps_of(x, target, 0.7)[0], (logits,))


def test_impossible_words_leave_the_entropy_finite():
    logits = torch.tensor([[0.0, 0.0, -torch.inf]], requires_grad=True)
    logp, entropy = logps_of(logits, torch.tensor([1]), 1.0)
    logp.sum().backward()
    assert float(entropy) == pytest.approx(math.log(2))
    assert logits.grad.isfinite().all()


def test_lengths_that_disagree_raise():
    """C7."""
    with pytest.raises(ModelError, match="positions of logits"):
        logps_of(torch.zeros(6, 9), torch.zeros(4, dtype=torch.int64), 1.0)


def test_token_outside_the_vocabulary_raises(models):
    (packed,) = pack([sequence(0, [1, 2], [3, 260])], 99)
    with pytest.raises(DataError, match="260"):
        token_logps(models("llama"), packed, 1.0)


def test_packed_attention_refuses_what_it_would_get_wrong(models):
    with pytest.raises(ModelError, match="packed rows only"):
        models("llama")(input_ids=torch.tensor([[1, 2, 3]]))
