"""AdamW over the float32 masters: schedule, clipping by the global norm, and the guard against non-finite numbers.

A step whose loss or gradient is not finite changes nothing: no weight, no moment, no place in the schedule. Clipping
by norm alone would not stop it, since NaN divided by NaN is NaN. Weight decay is decoupled and leaves vectors
(biases, norms) alone. Each number is read and written once: by the kernels, which clip and make the compute copy on
the way, or by PyTorch's fused AdamW, their reference.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from cauce.errors import WeightsError
from cauce.learner.kernels import AdamWStep, TrainingKernels
from cauce.learner.schedule import learning_rate
from cauce.recipe.models import LearnerSettings

MOMENTS = ("exp_avg", "exp_avg_sq")


class Optimizer:
    """AdamW with a count of the steps taken; `kernels`, where given, do its arithmetic."""

    def __init__(
        self,
        masters: Mapping[str, Tensor],
        *,
        settings: LearnerSettings,
        total_steps: int,
        kernels: TrainingKernels | None = None,
    ) -> None:
        self._masters = dict(masters)
        self._settings = settings
        self._kernels = kernels
        self.total_steps = total_steps
        self.num_steps = 0
        self._moments: dict[str, tuple[Tensor, Tensor]] = {}  # from the first step on

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

    def step(
        self, gradients: Mapping[str, Tensor], copies: Mapping[str, Tensor] | None = None, *, is_loss_finite: bool
    ) -> dict[str, float]:
        """Clip, guard, update masters and `copies` of them. Gradients have any dtype, and may be scaled in place."""
        lr = self.next_lr
        if self._kernels is None:
            gradients = {name: gradient.float() for name, gradient in gradients.items()}
            norm = float(torch.nn.utils.get_total_norm(list(gradients.values())))
        else:
            gradients = {name: gradient.contiguous() for name, gradient in gradients.items()}
            norm = self._kernels.norm(gradients.values())
        if not (is_loss_finite and math.isfinite(norm)):
            return self._metrics(lr=lr, norm=norm, skipped=True)
        if not self._moments:
            self._moments = {name: (torch.zeros_like(m), torch.zeros_like(m)) for name, m in self._masters.items()}
        scale = min(1.0, self._settings.max_grad_norm / norm) if norm > 0 else 1.0
        self.num_steps += 1
        with torch.no_grad():
            for is_decayed in (True, False):
                names = [name for name, master in self._masters.items() if (master.ndim >= 2) == is_decayed]
                step = self._step_of(lr=lr, scale=scale, weight_decay=self._settings.weight_decay * is_decayed)
                if self._kernels is None:
                    self._update(step, names, gradients, copies or {})
                    continue
                for name in names:
                    copy = (copies or {}).get(name)
                    self._kernels.adamw(step, self._masters[name], self._moments[name], gradients[name], copy)
        return self._metrics(lr=lr, norm=norm, skipped=False)

    def moments(self) -> dict[str, Tensor]:
        """Both moments of every parameter by name; zeros before the first step."""
        tensors: dict[str, Tensor] = {}
        for name, master in self._masters.items():
            found = self._moments.get(name, (torch.zeros_like(master), torch.zeros_like(master)))
            tensors |= {f"{moment}.{name}": tensor for moment, tensor in zip(MOMENTS, found, strict=True)}
        return tensors

    def load(self, moments: Mapping[str, Tensor], *, num_steps: int) -> None:
        """Put back what `moments` and `num_steps` gave; names must match exactly."""
        expected = {f"{moment}.{name}" for moment in MOMENTS for name in self._masters}
        if set(moments) != expected:
            odd = sorted(expected ^ set(moments))
            raise WeightsError(f"optimizer state does not fit this model: {len(odd)} names differ, such as {odd[0]}")
        self.num_steps = num_steps
        self._moments = {}
        if num_steps == 0:
            return
        for name, master in self._masters.items():
            first, second = (moments[f"{moment}.{name}"].to(master.device) for moment in MOMENTS)
            self._moments[name] = (first, second)

    def _step_of(self, *, lr: float, scale: float, weight_decay: float) -> AdamWStep:
        settings = self._settings
        return AdamWStep(
            number=self.num_steps,
            lr=lr,
            beta1=settings.beta1,
            beta2=settings.beta2,
            eps=settings.eps,
            weight_decay=weight_decay,
            scale=scale,
        )

    def _update(
        self, step: AdamWStep, names: list[str], gradients: Mapping[str, Tensor], copies: Mapping[str, Tensor]
    ) -> None:
        """PyTorch's fused AdamW."""
        if not names:
            return
        values = [gradients[name] for name in names]
        if step.scale != 1:
            torch._foreach_mul_(values, step.scale)
        masters = [self._masters[name].detach() for name in names]
        adamw(
            masters,
            values,
            [self._moments[name][0] for name in names],
            [self._moments[name][1] for name in names],
            [],
            [torch.tensor(float(step.number - 1), device=master.device) for master in masters],
            fused=True,
            amsgrad=False,
            beta1=step.beta1,
            beta2=step.beta2,
            lr=step.lr,
            weight_decay=step.weight_decay,
            eps=step.eps,
            maximize=False,
        )
        for name, master in zip(names, masters, strict=True):
            if name in copies:
                copies[name].copy_(master)

    def _metrics(self, *, lr: float, norm: float, skipped: bool) -> dict[str, float]:
        metrics = {"optim/lr": lr, "optim/step": float(self.num_steps), "optim/skipped": float(skipped)}
        if math.isfinite(norm):  # left out otherwise: JSON has no word for it
            metrics["optim/grad_norm"] = norm
        return metrics
