"""The load-time probe: does this model, with packed rows, say what it says with plain rows?

Short float32 forwards over random tokens: prompts and answers of unequal lengths, packed in one row, against each
answer alone in a plain right-padded row through the model's own attention. A model that carries state along the row
(recurrent layers), adds biases by place (ALiBi) or cannot take another attention function fails, and trains on plain
rows: slower, and right.
"""

import copy
import logging
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from transformers import PreTrainedModel

from cauce.errors import ModelError
from cauce.models import packed_attention
from cauce.models.forward import shares_prompts, token_logps, vocabulary_size
from cauce.packing import pack
from cauce.types import TrainSequence

logger = logging.getLogger(__name__)

TOLERANCE = 1e-4  # on log-probabilities; float32 rounding stays under a tenth of it
PROMPT_LENGTHS = (5, 9)
ANSWER_LENGTHS = (1, 4, 7)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingChoice:
    """How the learner feeds this model."""

    path: Literal["apart", "unshared"]
    difference: float  # largest difference of a log-probability; infinite where the model refused
    text: str


def choose_packing(model: PreTrainedModel) -> PackingChoice:
    """Probe the model and leave it set to the path that passed; its weights and mode stay as they are."""
    original = model.config._attn_implementation
    if original == packed_attention.NAME:
        original = "sdpa"
    probed = model if next(model.parameters()).dtype == torch.float32 else copy.deepcopy(model).float()
    try:
        difference = _difference(probed, original)
    except Exception as error:  # foreign model code may fail in any way; unshared rows need none of what failed
        text = f"packed rows are not possible here ({_first_line(error)}); plain rows are used"
        logger.warning(text)
        _set_attention(model, original)
        return PackingChoice(path="unshared", difference=float("inf"), text=text)
    if difference <= TOLERANCE:
        model.set_attn_implementation(packed_attention.NAME)
        text = f"packed rows equal plain rows within {difference:.1e}"
        return PackingChoice(path="apart", difference=difference, text=text)
    text = f"packed rows differ from plain rows by {difference:.1e}, over {TOLERANCE:.0e}; plain rows are used"
    logger.warning(text)
    _set_attention(model, original)
    return PackingChoice(path="unshared", difference=difference, text=text)


def _difference(model: PreTrainedModel, original: str) -> float:
    sequences = probe_sequences(vocabulary_size(model))
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            model.set_attn_implementation(packed_attention.NAME)
            if not shares_prompts(model):  # transformers only warns
                raise ModelError("the model cannot take another attention function")
            (packed,) = pack(sequences, 1_000)
            packed_M, _ = token_logps(model, packed, 1.0)
            model.set_attn_implementation(original)
            (rows,) = pack(sequences, 1_000, share_prompts=False)
            plain_M, _ = token_logps(model, rows, 1.0)
    finally:
        model.train(was_training)
    difference = (packed_M - plain_M).abs().max()
    return float("inf") if difference.isnan() else float(difference)


def probe_sequences(vocabulary: int) -> list[TrainSequence]:
    """Two prompts with answers of unequal lengths, all tokens at random."""
    random = np.random.default_rng(0)
    sequences = []
    for group, prompt_length in enumerate(PROMPT_LENGTHS):
        prompt_ids = random.integers(0, vocabulary, prompt_length, dtype=np.int32)
        for length in ANSWER_LENGTHS:
            zeros = np.zeros(length, np.float32)
            sequences.append(
                TrainSequence(
                    group=group,
                    prompt_ids=prompt_ids,
                    token_ids=random.integers(0, vocabulary, length, dtype=np.int32),
                    mask=np.ones(length, np.uint8),
                    advantages=zeros,
                    behaviour_logps=zeros,
                    proximal_logps=None,
                    reference_logps=None,
                )
            )
    return sequences


def _set_attention(model: PreTrainedModel, name: str) -> None:
    with suppress(ValueError):  # a model that takes no attention function at all is in its own already
        model.set_attn_implementation(name)


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
