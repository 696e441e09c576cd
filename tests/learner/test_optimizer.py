"""AdamW against the equations in float64, clipping, and the guard."""

import numpy as np
import pytest
import torch

from cauce.errors import WeightsError
from cauce.learner.optimizer import Optimizer
from tests.learner.cases import settings


def masters():
    generator = torch.Generator().manual_seed(0)
    return {"matrix": torch.randn(3, 4, generator=generator), "bias": torch.randn(5, generator=generator)}


def gradients_at(step):
    generator = torch.Generator().manual_seed(100 + step)
    return {name: torch.randn(t.shape, generator=generator) for name, t in masters().items()}


def take(optimizer, weights, gradients):
    for name, gradient in gradients.items():
        weights[name].grad = gradient.clone()
    return optimizer.step({name: w.grad for name, w in weights.items()}, is_loss_finite=True)


def test_equals_the_equations():
    chosen = settings(lr=0.1, weight_decay=0.5, beta1=0.8, beta2=0.95, eps=1e-6, max_grad_norm=1e9)
    weights = masters()
    optimizer = Optimizer(weights, settings=chosen, total_steps=3)
    slow = {name: t.double().numpy() for name, t in masters().items()}
    first = {name: np.zeros_like(t) for name, t in slow.items()}
    second = {name: np.zeros_like(t) for name, t in slow.items()}
    for step in range(1, 4):
        take(optimizer, weights, gradients_at(step))
        for name, gradient in gradients_at(step).items():
            g = gradient.double().numpy()
            if name == "matrix":  # vectors do not decay
                slow[name] = slow[name] * (1 - 0.1 * 0.5)
            first[name] = 0.8 * first[name] + 0.2 * g
            second[name] = 0.95 * second[name] + 0.05 * g * g
            scale = np.sqrt(second[name] / (1 - 0.95**step)) + 1e-6
            slow[name] = slow[name] - 0.1 * first[name] / (1 - 0.8**step) / scale
    for name, weight in weights.items():
        np.testing.assert_allclose(weight.numpy(), slow[name], atol=1e-5)


def test_clips_by_the_norm_of_all_gradients_together():
    weights = masters()
    optimizer = Optimizer(weights, settings=settings(lr=0.0, max_grad_norm=0.5), total_steps=1)
    norm = float(torch.cat([g.flatten() for g in gradients_at(0).values()]).norm())
    metrics = take(optimizer, weights, gradients_at(0))
    assert metrics["optim/grad_norm"] == pytest.approx(norm, rel=1e-5)
    clipped = torch.cat([w.grad.flatten() for w in weights.values()])
    assert float(clipped.norm()) == pytest.approx(0.5, rel=1e-4)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing(value):
    """G15."""
    weights = masters()
    optimizer = Optimizer(weights, settings=settings(schedule="linear"), total_steps=4)
    take(optimizer, weights, gradients_at(0))
    before = {name: w.clone() for name, w in weights.items()}
    moments = {name: m.clone() for name, m in optimizer.moments().items()}
    lr = optimizer.next_lr
    bad = gradients_at(1)
    bad["bias"][2] = value
    metrics = take(optimizer, weights, bad)
    assert metrics["optim/skipped"] == 1
    assert metrics["optim/step"] == 1
    assert "optim/grad_norm" not in metrics
    assert optimizer.next_lr == lr
    for name, weight in weights.items():
        assert torch.equal(weight, before[name])
    for name, moment in optimizer.moments().items():
        assert torch.equal(moment, moments[name])


def test_state_of_another_model_is_refused():
    optimizer = Optimizer(masters(), settings=settings(), total_steps=4)
    with pytest.raises(WeightsError, match=r"2 names differ, such as exp_avg\.bias"):
        optimizer.load({k: v for k, v in optimizer.moments().items() if "bias" not in k}, num_steps=1)
