"""Engine and learner on an NVIDIA GPU (`make test-gpu`). The same bodies run on the CPU in the quick tests, through the
torch paths that a GPU takes too, so that they stay right where there is none.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from cauce.algorithms.advantages import make_batch
from cauce.engine.native import NativeEngine
from cauce.engine.probe import largest_difference
from cauce.learner.learner import Learner
from cauce.models.load import LoadedModel, load_model
from cauce.types import TrainSequence
from cauce.weights.store import WeightStore
from tests.engine.asking import ask, mixed_requests, random_prompt
from tests.learner.cases import algorithm, assert_close, random_sequences, settings
from tests.tiny import tiny_model

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU is visible to torch here"),
        ],
    ),
]
KINDS = ("llama", "qwen2", "gpt2")
# Of float32 sums in another order: cuBLAS against the CPU's products, without TF32.
LOGP_TOLERANCE = 2e-4
GRADIENT_TOLERANCE = 1e-4

on_each_device = pytest.mark.parametrize("device", DEVICES)


def model_on(device: str, folder: Path, kind: str = "llama") -> LoadedModel:
    if not folder.is_dir():
        tiny_model(folder, kind)
    loaded = load_model(str(folder), dtype=torch.float32, attention="sdpa")
    loaded.model.to(device)
    return loaded


def engine_on(device: str, folder: Path, kind: str = "llama", *, deterministic: bool = False) -> NativeEngine:
    """Without the kernels for CPUs."""
    return NativeEngine(model_on(device, folder, kind), slots=4, deterministic=deterministic, compiled=False)


def learner_on(device: str, folder: Path, kind: str = "llama", **changes: object) -> Learner:
    return Learner(
        model_on(device, folder, kind),
        algorithm=algorithm(kl_coef=0.1, correction_cap=2.0),
        settings=settings(**{"compiled": False, **changes}),
        temperature=1.0,
        total_steps=10,
    )


def summed(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: gradient.cpu() for name, gradient in learner._weights.named_gradients().items()}


@on_each_device
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("deterministic", [False, True])
def test_the_engine_says_what_the_plain_model_and_the_learner_say(tmp_path, device, kind, deterministic) -> None:
    engine = engine_on(device, tmp_path / kind, kind, deterministic=deterministic)
    assert largest_difference(engine, plain_attention="sdpa") < LOGP_TOLERANCE
    requests = [ask(task, random_prompt(5 + task), samples=3, max_tokens=6) for task in range(4)]
    completions = engine.generate(requests)
    assert [(c.task, c.index) for c in completions] == [(task, index) for task in range(4) for index in range(3)]
    learner = learner_on(device, tmp_path / kind, kind)
    sequences = [
        TrainSequence(
            group=c.task,
            prompt_ids=requests[c.task].prompt_ids,
            token_ids=c.token_ids,
            mask=c.mask,
            advantages=np.ones(len(c.token_ids), np.float32),
            behaviour_logps=c.logps,
            proximal_logps=None,
            reference_logps=c.logps,
        )
        for c in completions
    ]
    metrics = learner.forward_backward(make_batch(sequences))
    assert metrics["sampler/log_ratio_abs_mean"] < LOGP_TOLERANCE


@on_each_device
def test_samples_join_and_leave_and_keep_their_cache(tmp_path, device) -> None:
    engine = engine_on(device, tmp_path / "model")
    completions = engine.generate(mixed_requests(6))
    assert len(completions) == 18
    assert all(np.isfinite(c.logps).all() and (c.logps <= 0).all() for c in completions)
    assert engine.is_idle


@on_each_device
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("budget", [4096, 30])  # one micro-batch; several, of which some are remade
def test_loss_gradient_and_step_are_the_cpus(tmp_path, device, kind, budget) -> None:
    batch = make_batch(random_sequences(3, groups=3, answers=4, longest=12, masked=True, scored=True))
    ours = learner_on(device, tmp_path / kind, kind, token_budget=budget)
    exact = learner_on("cpu", tmp_path / kind, kind)
    found, expected = ours.forward_backward(batch), exact.forward_backward(batch)
    assert found["loss/total"] == pytest.approx(expected["loss/total"], rel=1e-4, abs=1e-5)
    assert_close(summed(ours), summed(exact), GRADIENT_TOLERANCE)
    step = ours.optim_step()
    assert step["optim/grad_norm"] == pytest.approx(exact.optim_step()["optim/grad_norm"], rel=1e-3)
    assert step["learner/peak_memory_mb"] > 0
    for name, weight in exact.weights(torch.float32).items():
        # A fifth of Adam's first step of 0.01, which turns the rounding of a tiny gradient into a part of itself.
        torch.testing.assert_close(ours.weights(torch.float32)[name].cpu(), weight, atol=2e-3, rtol=0)


@on_each_device
def test_bf16_trains_and_masters_stay_float32(tmp_path, device) -> None:
    learner = learner_on(device, tmp_path / "model", dtype="bf16")
    exact = learner_on("cpu", tmp_path / "model")
    batch = make_batch(random_sequences(4, scored=True))
    for each in (learner, exact):
        each.forward_backward(batch)
    left, right = (torch.cat([g.float().flatten() for g in summed(each).values()]) for each in (learner, exact))
    assert float(torch.nn.functional.cosine_similarity(left, right, dim=0)) > 0.98
    assert learner.optim_step()["optim/skipped"] == 0
    assert {tensor.dtype for tensor in learner.weights(torch.float32).values()} == {torch.float32}


@on_each_device
def test_published_weights_arrive_in_the_engine(tmp_path, device) -> None:
    learner = learner_on(device, tmp_path / "model")
    engine = engine_on(device, tmp_path / "model")
    learner.forward_backward(make_batch(random_sequences(5, scored=True)))
    learner.optim_step()
    store = WeightStore(tmp_path / "store", keep=1)
    digest = store.publish(learner.weights(torch.float32), version=1, lineage="main")
    pulled = store.pull(1)
    assert (pulled.checksum, digest) == (digest, learner.checksum())
    engine.load_state(pulled.tensors, version=1, lineage=pulled.lineage)
    for name, parameter in engine._model.named_parameters():
        assert parameter.device.type == device
        assert torch.equal(parameter.cpu(), pulled.tensors[name])
    (completion,) = engine.generate([ask(0, random_prompt(7))])
    assert completion.versions.tolist() == [1] * len(completion.token_ids)
    assert largest_difference(engine, plain_attention="sdpa") < LOGP_TOLERANCE


@on_each_device
def test_a_checkpoint_goes_on_where_it_was_written(tmp_path, device) -> None:
    batch = make_batch(random_sequences(6, scored=True))
    first, second = (learner_on(device, tmp_path / "model") for _ in range(2))
    first.forward_backward(batch)
    first.optim_step()
    first.save(tmp_path / "saved")
    second.load(tmp_path / "saved")
    assert second.checksum() == first.checksum()
    for each in (first, second):
        each.forward_backward(batch)
        assert each.optim_step()["optim/step"] == 2
    for name, weight in first.weights(torch.float32).items():
        torch.testing.assert_close(second.weights(torch.float32)[name], weight, atol=2e-3, rtol=0)
