"""The pass that is written out against the same model through autograd."""

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from cauce.algorithms.advantages import make_batch
from cauce.engine import kernels as engine_kernels
from cauce.learner import kernels as learner_kernels
from cauce.learner import packed_decoder
from cauce.learner.kernels import load_training_kernels
from cauce.learner.learner import Learner
from tests.learner.cases import algorithm, group_of, loaded, random_sequences, settings

KERNELS, WHY = load_training_kernels()
needs_kernels = pytest.mark.skipif(KERNELS is None, reason=f"no kernels here: {WHY}")
KNOWN = ("llama", "llama_tied", "qwen2", "qwen3", "mistral")


@pytest.fixture(scope="module")
def learner_of(tmp_path_factory):
    folders: dict[str, Path] = {}

    def make(kind="llama", *, row=None, **changes):
        if kind not in folders:
            folders[kind] = tmp_path_factory.mktemp(kind) / "model"
        return Learner(
            loaded(folders[kind], kind),
            algorithm=row or algorithm(),
            settings=settings(**changes),
            temperature=0.8,
            total_steps=10,
        )

    return make


def gradients(learner):
    return {name: gradient.double() for name, gradient in learner._weights.named_gradients().items()}


def relative(found, expected):
    difference = sum(float((found[name] - expected[name]).square().sum()) for name in expected)
    return (difference / sum(float(each.square().sum()) for each in expected.values())) ** 0.5


@needs_kernels
@pytest.mark.parametrize("kind", KNOWN)
def test_loss_gradient_and_step_are_autograds(learner_of, kind):
    batch = make_batch(random_sequences(3, groups=4, answers=5, longest=30, masked=True))
    ours, plain = learner_of(kind), learner_of(kind, compiled=False)
    assert (ours.kernels, plain.kernels) == ("compiled", "switched off")
    found, expected = ours.forward_backward(batch), plain.forward_backward(batch)
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert relative(gradients(ours), gradients(plain)) < 1e-5
    steps = [learner.optim_step() for learner in (ours, plain)]
    for step in steps:
        del step["learner/peak_memory_mb"]  # of a process, which both are in
    assert steps[0] == pytest.approx(steps[1], rel=1e-5)
    for name, weight in plain.weights(torch.float32).items():
        assert torch.allclose(ours.weights(torch.float32)[name], weight, atol=2e-4)  # 2 % of Adam's step of 0.01


@needs_kernels
@pytest.mark.parametrize("kind", KNOWN)
def test_in_bf16_it_is_as_close_to_float32_as_autograd_is(learner_of, kind):
    batch = make_batch(random_sequences(4, groups=4, answers=5, longest=30))
    exact, ours, plain = (
        learner_of(kind),
        learner_of(kind, dtype="bf16"),
        learner_of(kind, dtype="bf16", compiled=False),
    )
    for learner in (exact, ours, plain):
        learner.forward_backward(batch)
    expected = gradients(exact)
    ours_error, plain_error = relative(gradients(ours), expected), relative(gradients(plain), expected)
    assert ours_error < 1.25 * plain_error
    assert ours_error < 0.1


@needs_kernels
@hypothesis_settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(budget=st.integers(1, 400), seed=st.integers(0, 50))
def test_the_cut_changes_no_gradient(learner_of, budget, seed):
    batch = make_batch(random_sequences(seed, groups=3, answers=3, longest=20, masked=True))
    whole, cut = learner_of(), learner_of(token_budget=budget)
    assert cut.forward_backward(batch)["loss/total"] == pytest.approx(
        whole.forward_backward(batch)["loss/total"], rel=1e-5, abs=1e-6
    )
    assert relative(gradients(cut), gradients(whole)) < 1e-5


@needs_kernels
@pytest.mark.parametrize("kind", KNOWN)
def test_what_is_remade_is_the_same_and_keeps_the_inputs_of_layers_alone(learner_of, kind):
    sequences = random_sequences(5, groups=1, answers=6, longest=40)
    batch = make_batch(sequences)
    whole, remade = learner_of(kind), learner_of(kind, token_budget=60)
    (packed,) = remade._pack(sequences)
    assert packed.is_remade
    logps = [learner._logps_of(packed, 1.0)[0].detach() for learner in (whole, remade)]
    assert torch.equal(*logps)
    with torch.no_grad():
        run = remade._logps_of.__self__._forward(packed, 1.0, keep=True)[2]
    assert all(isinstance(kept, torch.Tensor) and kept.shape == run.last_ND.shape for kept in run.layers)
    whole.forward_backward(batch)
    remade.forward_backward(batch)
    found, expected = gradients(remade), gradients(whole)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@needs_kernels
def test_logits_are_made_again_in_chunks_where_they_are_too_many(learner_of, monkeypatch):
    batch = make_batch(random_sequences(5, longest=20))
    whole, chunked = learner_of(), learner_of()
    whole.forward_backward(batch)
    monkeypatch.setattr(packed_decoder, "KEEP_BYTES", 0)
    monkeypatch.setattr(packed_decoder, "CHUNK_BYTES", 7 * 260 * 4)
    assert len(chunked._logps_of.__self__._chunks(50, keep=True)) == 8
    chunked.forward_backward(batch)
    assert relative(gradients(chunked), gradients(whole)) < 1e-6


@needs_kernels
def test_the_same_bits_each_time(learner_of):
    batch = make_batch(random_sequences(6, groups=6, answers=6, longest=40))
    first, second = learner_of(dtype="bf16"), learner_of(dtype="bf16")
    for learner in (first, second):
        for _ in range(2):
            learner.forward_backward(batch)
            learner.optim_step()
    assert first.checksum() == second.checksum()


@needs_kernels
def test_scores_of_policy_and_reference_are_the_plain_ones(learner_of):
    row = algorithm(kl_coef=0.1)
    groups = [group_of(0, [5, 6, 7], [[1, 2, 3], [4]]), group_of(1, [9], [[8, 8], [7, 6, 5, 4]])]
    ours, plain = (learner_of(row=row, compiled=compiled).score(groups, proximal=True) for compiled in (True, False))
    for name in ("proximal_logps", "reference_logps"):
        for left, right in zip(getattr(ours, name), getattr(plain, name), strict=True):
            for found, expected in zip(left, right, strict=True):
                assert found == pytest.approx(expected, abs=1e-5)


@needs_kernels
def test_a_frozen_parameter_gets_no_gradient(learner_of, tmp_path):
    model = loaded(tmp_path / "model")
    frozen = "model.layers.0.mlp.up_proj.weight"
    model.model.get_parameter(frozen).requires_grad_(False)
    learner = Learner(model, algorithm=algorithm(), settings=settings(), temperature=1.0, total_steps=10)
    assert learner.kernels == "compiled"
    learner.forward_backward(make_batch(random_sequences(7)))
    assert frozen not in learner._weights.named_gradients()
    assert learner.optim_step()["optim/skipped"] == 0


@needs_kernels
def test_other_models_train_through_autograd_and_say_so(learner_of):
    learner = learner_of("gpt2")
    assert "has parts that the kernels do not know" in learner.kernels
    assert learner.forward_backward(make_batch(random_sequences(8)))["loss/total"] != 0


@needs_kernels
def test_a_model_that_computes_something_else_is_found_out(learner_of, tmp_path):
    """Known parts, another sum: the comparison at load sees it."""
    model = loaded(tmp_path / "model")
    head = model.model.get_output_embeddings()
    head.register_forward_hook(lambda module, inputs, output: output * 0.5)
    learner = Learner(model, algorithm=algorithm(), settings=settings(), temperature=1.0, total_steps=10)
    assert "log-probs differ by" in learner.kernels


def test_without_a_compiler_everything_still_trains(learner_of, monkeypatch):
    monkeypatch.setattr(engine_kernels, "find_compiler", lambda: None)
    monkeypatch.setenv("XDG_CACHE_HOME", "/nonexistent")
    load_training_kernels.cache_clear()
    engine_kernels.load_kernels.cache_clear()
    try:
        learner = learner_of()
        assert "no C++ compiler" in learner.kernels
        assert learner.forward_backward(make_batch(random_sequences(9)))["loss/total"] != 0
        assert learner.optim_step()["optim/skipped"] == 0
    finally:
        learner_kernels.load_training_kernels.cache_clear()
        engine_kernels.load_kernels.cache_clear()
