"""The learner: trainable weights behind the verbs score, forward_backward, optim_step, weights, save and load.

It turns a batch into gradients through the packed forward, and gradients into new weights. What enters the loss and
how it is divided is decided before (algorithms/): the learner sums parts that are already divided by the counts of
the whole optimizer step. Dropout is off throughout, so that a sequence has one log-probability. Left out: any
knowledge of plans, versions and journals, and more than one rank.
"""

import copy
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from cauce import spans
from cauce.algorithms.losses import policy_terms
from cauce.algorithms.reducers import aggregate
from cauce.algorithms.table import Algorithm
from cauce.errors import DataError
from cauce.faults import fault_point
from cauce.learner import training_state
from cauce.learner.kernels import TrainingKernels, load_training_kernels
from cauce.learner.master_weights import MasterWeights
from cauce.learner.optimizer import Optimizer
from cauce.learner.packed_decoder import Gradients, PackedDecoder
from cauce.learner.peak_memory import PeakMemory
from cauce.models.forward import token_logps
from cauce.models.load import LoadedModel, resolve_dtype
from cauce.models.probe import choose_packing
from cauce.models.remaking import can_remake
from cauce.models.weights_hash import checksum
from cauce.packing import PackedBatch, pack
from cauce.recipe.models import LearnerSettings
from cauce.types import Batch, Group, ScoredBatch, TrainSequence

LogpsOf = Callable[[PackedBatch, float], tuple[Tensor, Tensor]]  # as models.forward.token_logps

# Metrics that are means over trained tokens, and the sums of policy_terms they are made of.
TOKEN_MEANS = {
    "policy/entropy": "entropy",
    "policy/kl_reference": "kl_reference",
    "policy/clip_fraction_low": "clip_low",
    "policy/clip_fraction_high": "clip_high",
    "policy/ratio_mean": "ratio",
    "sampler/log_ratio_abs_mean": "log_ratio_abs",
    "sampler/correction_mean": "correction_weight",
    "sampler/correction_capped_fraction": "correction_capped",
}


@dataclass(slots=True)
class _Sums:
    """What the micro-batches of one step add up to."""

    loss: float = 0.0
    policy_loss: float = 0.0
    tokens: int = 0  # trained tokens that went through the model
    packed_tokens: int = 0
    by_name: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, value: Tensor) -> None:
        self.by_name[name] = self.by_name.get(name, 0.0) + float(value.sum())


class Learner:
    """Owns the weights of one model, loaded in float32; the model belongs to the learner from here on."""

    def __init__(
        self,
        model: LoadedModel,
        *,
        algorithm: Algorithm,
        settings: LearnerSettings,
        temperature: float,
        total_steps: int,
    ) -> None:
        self._loaded = model
        self._model: PreTrainedModel = model.model.eval()
        self._algorithm = algorithm
        self._settings = settings
        self._temperature = temperature
        self.packing = choose_packing(model.model)
        self.dtype = resolve_dtype(settings.dtype)
        self._weights = MasterWeights(self._model, compute_dtype=self.dtype)
        kernels, why = load_training_kernels() if settings.compiled else (None, "switched off")
        kernels = kernels if next(self._model.parameters()).device.type == "cpu" else None
        self._optimizer = Optimizer(self._weights.masters, settings=settings, total_steps=total_steps, kernels=kernels)
        reference = _frozen_copy(self._model) if algorithm.needs_reference else None
        self._logps_of, text = _logps_of(self._model, kernels, gradients=self._weights)
        self.kernels = why or text
        self._can_remake = self.kernels == "compiled" or can_remake(self._model)
        self._reference = None if reference is None else _logps_of(reference, kernels, gradients=None)[0]
        self._is_loss_finite = True
        self._num_skipped = 0
        self._peak_memory = PeakMemory(next(self._model.parameters()).device)

    def score(self, groups: Sequence[Group], *, proximal: bool) -> ScoredBatch:
        """Log-probs of the groups' answers under the current weights and, where KL needs it, the reference.

        Tokens that an environment wrote get 0.
        """
        return ScoredBatch(
            groups=tuple(groups),
            proximal_logps=self._logps(self._logps_of, groups) if proximal else None,
            reference_logps=self._logps(self._reference, groups) if self._reference is not None else None,
        )

    def forward_backward(self, batch: Batch) -> dict[str, float]:
        """Add the gradient of the batch's loss to the sums; metrics are means over the tokens that were run.

        Sequences whose gradient is known to be 0 are not run; they still count in the loss's divisors.
        """
        self._peak_memory.begin()
        trained = [s for s in batch.sequences if s.mask.any()]
        run = [s for s in trained if not self._is_silent(s)]
        self._check_lengths(run)
        sums = _Sums()
        for packed in self._pack(run):
            with spans.span("micro_batch"):
                loss = self._micro_batch_loss(packed, run, batch, sums)
                if not math.isfinite(sums.loss):
                    self._is_loss_finite = False  # the whole step is lost; optim_step drops the gradients
                    break
                loss.backward()
            fault_point("between_micro_batches")
        groups = {s.group for s in trained}
        metrics = {
            "loss/total": sums.loss,
            "loss/policy": sums.policy_loss,
            "learner/tokens": float(batch.num_tokens),
            "learner/packed_tokens": float(sums.packed_tokens),
            "learner/skipped_groups": float(len(groups - {s.group for s in run})),
        }
        for name, part in TOKEN_MEANS.items():
            if sums.tokens and part in sums.by_name:
                metrics[name] = sums.by_name[part] / sums.tokens
        return {name: value for name, value in metrics.items() if math.isfinite(value)}

    def optim_step(self) -> dict[str, float]:
        """One AdamW step on the summed gradients, or none at all if anything was not finite."""
        gradients, copies = self._weights.named_gradients(), self._weights.copies
        metrics = self._optimizer.step(gradients, copies, is_loss_finite=self._is_loss_finite)
        self._num_skipped += int(metrics["optim/skipped"])
        self._is_loss_finite = True
        self._weights.zero_gradients()
        return {**metrics, "learner/peak_memory_mb": self._peak_memory.end()}

    def weights(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The trainable weights by name, tied ones once; views where masters or compute copy have that dtype."""
        return self._weights.in_dtype(dtype)

    def checksum(self) -> str:
        """Of the float32 masters."""
        return checksum(self.weights(torch.float32))

    def save(self, folder: Path) -> None:
        """Write the model as a Hugging Face folder and, beside it, what training goes on with."""
        self.save_model(folder)
        training_state.save(folder, optimizer=self._optimizer)

    def load(self, folder: Path) -> None:
        """Go on exactly where `save` was called: weights, moments, step and random generators."""
        tensors = training_state.load_weights(folder, expected=self.weights(torch.float32), name=self._loaded.path)
        training_state.load(folder, optimizer=self._optimizer)
        self._weights.load(tensors)
        self._weights.zero_gradients()

    def save_model(self, folder: Path) -> None:
        """Write the model alone, in float32, so that `from_pretrained` loads it."""
        training_state.save_model(folder, self._loaded, self.weights(torch.float32))

    def status(self) -> dict[str, Any]:
        """What is worth showing to a person."""
        return {
            "dtype": str(self.dtype).removeprefix("torch."),
            "packing": self.packing.path,
            "packing_reason": self.packing.text,
            "kernels": self.kernels,
            "parameters": sum(master.numel() for master in self._weights.masters.values()),
            "optim_step": self._optimizer.num_steps,
            "total_steps": self._optimizer.total_steps,
            "skipped_steps": self._num_skipped,
            "lr": self._optimizer.next_lr,
        }

    def _micro_batch_loss(
        self, packed: PackedBatch, sequences: Sequence[TrainSequence], batch: Batch, sums: _Sums
    ) -> Tensor:
        """This micro-batch's share of the loss; adds its metrics to the sums."""
        logp_M, entropy_M = self._logps_of(packed, self._temperature)
        device = logp_M.device
        mask_M = torch.ones_like(logp_M, dtype=torch.bool)  # only trained tokens are here
        sequence_M = torch.from_numpy(packed.answer_M).to(device)
        inputs = _loss_inputs(packed, sequences, device)

        def reduce(loss_M: Tensor) -> Tensor:
            counts = {"num_tokens": batch.num_tokens, "num_sequences": batch.num_sequences}
            return aggregate(loss_M, mask_M, sequence_M, algorithm=self._algorithm, **counts)

        loss_M, parts = policy_terms(self._algorithm, logp_N=logp_M, mask_N=mask_M, **inputs)
        loss = reduce(loss_M)
        policy_loss = loss.detach()
        if self._has_kl_loss:
            without_kl = replace(self._algorithm, kl_coef=0.0)
            with torch.no_grad():
                policy_loss = reduce(policy_terms(without_kl, logp_N=logp_M, mask_N=mask_M, **inputs)[0])
        sums.loss += float(loss.detach())
        sums.policy_loss += float(policy_loss)
        sums.tokens += packed.num_trained
        sums.packed_tokens += packed.num_tokens
        sums.add("entropy", entropy_M)
        for name, part in parts.items():
            sums.add(name, part)
        return loss

    @property
    def _has_kl_loss(self) -> bool:
        return self._algorithm.kl_coef > 0 and self._algorithm.kl_in == "loss"

    def _is_silent(self, sequence: TrainSequence) -> bool:
        """Whether the gradient is 0 whatever the weights: no advantage, and no KL term in the loss."""
        return not self._has_kl_loss and not (sequence.advantages[sequence.mask != 0] != 0).any()

    def _logps(self, logps_of: LogpsOf, groups: Sequence[Group]) -> tuple[tuple[np.ndarray, ...], ...]:
        sequences = [_unscored(group, index) for group in groups for index in range(len(group.samples))]
        self._check_lengths(sequences)
        logps = [np.zeros(len(s.token_ids), np.float32) for s in sequences]
        with torch.no_grad():
            for packed in self._pack(sequences):
                logp_M, _ = logps_of(packed, self._temperature)
                packed.scatter(logp_M.cpu().numpy(), logps)
        remaining = iter(logps)
        return tuple(tuple(next(remaining) for _ in group.samples) for group in groups)

    def _pack(self, sequences: Sequence[TrainSequence]) -> list[PackedBatch]:
        shared = self.packing.path == "apart"
        return pack(sequences, self._settings.token_budget, share_prompts=shared, can_remake=self._can_remake)

    def _check_lengths(self, sequences: Sequence[TrainSequence]) -> None:
        limit = self._loaded.context_length
        for sequence in sequences:
            length = len(sequence.prompt_ids) + len(sequence.token_ids)
            if length > limit:
                raise DataError(
                    f"task {sequence.group}: {length} tokens of prompt and answer, the model reads at most "
                    f"{limit}; lower data.max_prompt_tokens or rollout.max_tokens"
                )


def _logps_of(
    model: PreTrainedModel, kernels: TrainingKernels | None, *, gradients: Gradients | None
) -> tuple[LogpsOf, str]:
    """How this model's log-probabilities are computed, and "compiled" or why they are not in kernels."""
    decoder, why = (None, "") if kernels is None else PackedDecoder.of(model, kernels, gradients=gradients)
    if decoder is not None:
        return decoder.token_logps, "compiled"
    return functools.partial(token_logps, model), why


def _frozen_copy(model: PreTrainedModel) -> PreTrainedModel:
    reference = copy.deepcopy(model)
    return reference.requires_grad_(False).eval()


def _unscored(group: Group, index: int) -> TrainSequence:
    """A sample in the shape that is packed, before advantages exist."""
    answer = group.samples[index].completion
    return TrainSequence(
        group=group.task,
        prompt_ids=group.prompt_ids,
        token_ids=answer.token_ids,
        mask=answer.mask,
        advantages=np.zeros(len(answer.token_ids), np.float32),
        behaviour_logps=answer.logps,
        proximal_logps=None,
        reference_logps=None,
    )


def _loss_inputs(packed: PackedBatch, sequences: Sequence[TrainSequence], device: torch.device) -> dict[str, Any]:
    """The per-token arrays of the trained tokens, as policy_terms names them."""
    arrays: dict[str, list[np.ndarray | None]] = {
        "behaviour_N": [s.behaviour_logps for s in sequences],
        "proximal_N": [s.proximal_logps for s in sequences],
        "reference_N": [s.reference_logps for s in sequences],
        "advantage_N": [s.advantages for s in sequences],
    }
    inputs: dict[str, Any] = {}
    for name, values in arrays.items():
        present = [value for value in values if value is not None]
        if len(present) not in (0, len(values)):
            raise ValueError(f"{name}: some sequences of the batch have it and others lack it; score them together")
        inputs[name] = torch.from_numpy(packed.collect(present)).to(device) if present else None
    return inputs
