"""AdamW over the float32 masters: schedule, clipping by the global norm, and the guard against non-finite numbers.

A step whose loss or gradient is not finite changes nothing: no weight, no moment, no place in the schedule. Clipping
by norm alone would not stop it, since NaN divided by NaN is NaN. Weight decay is decoupled and leaves vectors
(biases, norms) alone. PyTorch's fused AdamW reads and writes each number once.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cauce.errors import WeightsError
from cauce.learner.schedule import learning_rate
from cauce.recipe.models import LearnerSettings

MOMENTS = ("exp_avg", "exp_avg_sq")


class Optimizer:
    """AdamW with a count of the steps taken."""

    def __init__(self, masters: Mapping[str, Tensor], *, settings: LearnerSettings, total_steps: int) -> None:
        self._masters = dict(masters)
        self._settings = settings
        self.total_steps = total_steps
        self.num_steps = 0
        decayed = [p for p in masters.values() if p.ndim >= 2]
        plain = [p for p in masters.values() if p.ndim < 2]
        groups: list[dict[str, Any]] = [{"params": decayed}, {"params": plain, "weight_decay": 0.0}]
        self._adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=settings.lr,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=True,
        )

    @property
    def next_lr(self) -> float:
        """The rate that the next step would take."""
        return learning_rate(
            self.num_steps,
            lr=self._settings.lr,
            schedule=self._settings.schedule,
            warmup_steps=self._settings.warmup_steps,
            total_steps=self.total_steps,
        )

    def step(self, gradients: Mapping[str, Tensor], *, is_loss_finite: bool) -> dict[str, float]:
        """Clip, guard, update. The gradients must be those of the masters, and are scaled in place."""
        lr = self.next_lr
        values = list(gradients.values())
        norm = float(torch.nn.utils.get_total_norm(values))
        if not (is_loss_finite and math.isfinite(norm)):
            return self._metrics(lr=lr, norm=norm, skipped=True)
        if norm > self._settings.max_grad_norm:
            torch._foreach_mul_(values, self._settings.max_grad_norm / norm)
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()
        self.num_steps += 1
        return self._metrics(lr=lr, norm=norm, skipped=False)

    def moments(self) -> dict[str, Tensor]:
        """Both moments of every parameter by name; zeros before the first step."""
        tensors = {}
        for name, master in self._masters.items():
            state = self._adamw.state.get(master, {})
            for moment in MOMENTS:
                tensors[f"{moment}.{name}"] = state.get(moment, torch.zeros_like(master))
        return tensors

    def load(self, moments: Mapping[str, Tensor], *, num_steps: int) -> None:
        """Put back what `moments` and `num_steps` gave; names must match exactly."""
        expected = {f"{moment}.{name}" for moment in MOMENTS for name in self._masters}
        if set(moments) != expected:
            odd = sorted(expected ^ set(moments))
            raise WeightsError(f"optimizer state does not fit this model: {len(odd)} names differ, such as {odd[0]}")
        self.num_steps = num_steps
        self._adamw.state.clear()
        if num_steps == 0:
            return
        for name, master in self._masters.items():
            self._adamw.state[master] = {
                "step": torch.tensor(float(num_steps)),
                **{moment: moments[f"{moment}.{name}"].to(master.device) for moment in MOMENTS},
            }

    def _metrics(self, *, lr: float, norm: float, skipped: bool) -> dict[str, float]:
        metrics = {"optim/lr": lr, "optim/step": float(self.num_steps), "optim/skipped": float(skipped)}
        if math.isfinite(norm):  # left out otherwise: JSON has no word for it
            metrics["optim/grad_norm"] = norm
        return metrics
