"""Random training sequences, and a slow float64 loop that scores one token at a time."""

import copy
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from cauce.algorithms.table import Algorithm
from cauce.models.load import LoadedModel, load_model
from cauce.recipe.models import LearnerSettings
from cauce.types import Completion, Group, Outcome, Sample, TrainSequence
from tests.tiny import tiny_model

VOCABULARY = 260


def plain_model(folder: Path, kind: str = "llama", **config: object) -> PreTrainedModel:
    """A tiny model in float32 with its own attention."""
    path = folder if folder.is_dir() and any(folder.iterdir()) else tiny_model(folder, kind, **config)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa")
    return model.eval()


def loaded(folder: Path, kind: str = "llama", **config: object) -> LoadedModel:
    """What a learner is given."""
    if not folder.is_dir():
        tiny_model(folder, kind, **config)
    return load_model(str(folder), dtype=torch.float32, attention="sdpa")


def settings(**changes: object) -> LearnerSettings:
    return LearnerSettings(**{"dtype": "fp32", "lr": 1e-2, "token_budget": 4096, **changes})


def algorithm(**changes: object) -> Algorithm:
    row = {
        "name": "grpo",
        "advantage": "group_std",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "dual_clip": None,
        "aggregation": "token_mean",
        "aggregation_length": 8,
        "kl_coef": 0.0,
        "kl_estimator": "k3",
        "kl_in": "loss",
        "correction_cap": None,
        "mask_truncated": False,
    }
    return Algorithm(**{**row, **changes})


def sequence(
    group: int, prompt: Sequence[int], answer: Sequence[int], seed: int = 0, **changes: object
) -> TrainSequence:
    random = np.random.default_rng((seed, group, len(answer)))
    length = len(answer)
    fields = {
        "mask": np.ones(length, np.uint8),
        "advantages": np.full(length, random.normal(), np.float32),
        "behaviour_logps": random.normal(-3, 0.5, length).astype(np.float32),
        "proximal_logps": None,
        "reference_logps": None,
        **changes,
    }
    return TrainSequence(
        group=group, prompt_ids=np.array(prompt, np.int32), token_ids=np.array(answer, np.int32), **fields
    )


def random_sequences(
    seed: int,
    *,
    groups: int = 3,
    answers: int = 3,
    longest: int = 9,
    masked: bool = False,
    scored: bool = False,
) -> list[TrainSequence]:
    """Groups of unequal lengths; `masked` writes environment tokens, `scored` adds other policies."""
    random = np.random.default_rng(seed)
    made = []
    for group in range(groups):
        prompt = random.integers(0, VOCABULARY, random.integers(1, longest + 4))
        for _ in range(answers):
            length = int(random.integers(1, longest + 1))
            changes: dict[str, object] = {}
            if masked:
                changes["mask"] = (random.random(length) < 0.6).astype(np.uint8)
            if scored:
                changes["proximal_logps"] = random.normal(-5, 1, length).astype(np.float32)
                changes["reference_logps"] = random.normal(-5, 1, length).astype(np.float32)
            answer = random.integers(0, VOCABULARY, length)
            made.append(sequence(group, prompt, answer, int(random.integers(1 << 30)), **changes))
    return made


def group_of(task: int, prompt: Sequence[int], answers: Sequence[Sequence[int]], **arrays: object) -> Group:
    """A scored group; its rewards are 0, 1, 0, 1 ..."""
    samples = []
    for index, answer in enumerate(answers):
        length = len(answer)
        completion = Completion(
            task=task,
            index=index,
            attempt=0,
            token_ids=np.array(answer, np.int32),
            logps=np.full(length, -3.0, np.float32),
            versions=np.zeros(length, np.int32),
            mask=arrays.get("mask", np.ones(length, np.uint8)),  # type: ignore[arg-type]
            finish_reason="stop",
        )
        outcome = Outcome(status="scored", value=float(index % 2), parts={}, detail="")
        samples.append(Sample(completion=completion, outcome=outcome))
    return Group(task=task, prompt_ids=np.array(prompt, np.int32), samples=tuple(samples))


def float64_copy(model: PreTrainedModel) -> PreTrainedModel:
    double = copy.deepcopy(model).double().eval()
    double.set_attn_implementation("eager")
    return double


def slow_logps(model: PreTrainedModel, made: TrainSequence, temperature: float = 1.0) -> Tensor:
    """log P(token | everything before it) of each answer token, from one full forward per token."""
    tokens = [*made.prompt_ids.tolist()]
    logps = []
    for token in made.token_ids.tolist():
        logits = model(input_ids=torch.tensor([tokens])).logits[0, -1] / temperature
        logps.append(torch.log_softmax(logits, -1)[token])
        tokens.append(token)
    return torch.stack(logps)


def gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_close(left: dict[str, Tensor], right: dict[str, Tensor], tolerance: float) -> None:
    """Equal within `tolerance` of the largest entry of all gradients."""
    assert left.keys() == right.keys()
    scale = max(float(t.abs().max()) for t in right.values())
    assert scale > 0
    for name, tensor in left.items():
        difference = float((tensor.double() - right[name].double()).abs().max())
        assert difference <= tolerance * scale, f"{name}: {difference} of {scale}"
