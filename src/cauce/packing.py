"""Packing: the answers of a step, cut into micro-batches in which each group's prompt stands once.

    [prompt of group 0 | answer | answer | ... | prompt of group 1 | answer | ...]     one flat row of N tokens

Position ids restart at every prompt, and each answer goes on where its prompt ends. The layout also says which
position predicts which trained token, so that logits are made for those alone; the first token of every answer is
predicted by the last token of its prompt. Tokens behind the last trained one of an answer predict nothing and are
left out, so an answer of T trained tokens costs T - 1. Nothing is ever truncated: an answer that is over budget by
itself gets a micro-batch of its own. Sequences without a trained token are left out here; the global counts that the
loss is divided by are made elsewhere, from all of them.

Between advantages and the packed forward. NumPy only: models/packed_attention.py turns a layout into tensors.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from cauce.errors import DataError
from cauce.types import TrainSequence


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch:
    """One micro-batch. M counts its trained tokens, A its answers, G its prompts.

    `rows` are the places of the answers in the list that was packed; `collect` and `scatter` use that same
    list."""

    token_ids_N: np.ndarray  # int64
    position_ids_N: np.ndarray  # int64
    prompts_G: np.ndarray  # int64 [G, 2]: start, length
    answers_A: np.ndarray  # int64 [A, 3]: start, length (may be 0), prompt
    rows_A: np.ndarray  # int64: index of the sequence in the packed list
    predictor_M: np.ndarray  # int64: position whose logits predict the trained token
    target_M: np.ndarray  # int64: the trained token
    answer_M: np.ndarray  # int64: answer within this micro-batch
    offset_M: np.ndarray  # int64: place of the trained token within its answer

    @property
    def num_tokens(self) -> int:
        """Tokens that the model is fed."""
        return len(self.token_ids_N)

    @property
    def num_trained(self) -> int:
        """Tokens that the loss sees."""
        return len(self.target_M)

    def collect(self, values: Sequence[np.ndarray]) -> np.ndarray:
        """Pick the trained tokens' entries out of per-token arrays, one per packed sequence: float32 [M]."""
        parts = [values[row][self.offset_M[span]] for row, span in self._spans()]
        return np.concatenate(parts).astype(np.float32, copy=False)

    def scatter(self, value_M: np.ndarray, into: Sequence[np.ndarray]) -> None:
        """Write values of trained tokens to their places in per-token arrays; the rest stays as it is."""
        if len(value_M) != self.num_trained:
            raise ValueError(f"{len(value_M)} values for {self.num_trained} trained tokens")
        for row, span in self._spans():
            into[row][self.offset_M[span]] = value_M[span]

    def _spans(self) -> Iterator[tuple[int, slice]]:
        """Each packed sequence with its stretch of the M trained tokens, which stand in answer order."""
        bounds = np.searchsorted(self.answer_M, np.arange(len(self.rows_A) + 1))
        for row, start, end in zip(self.rows_A, bounds[:-1], bounds[1:], strict=True):
            yield int(row), slice(int(start), int(end))


def pack(sequences: Sequence[TrainSequence], token_budget: int, *, share_prompts: bool = True) -> list[PackedBatch]:
    """Cut sequences into micro-batches of at most `token_budget` packed tokens, groups in order of
    appearance.

    A group over budget is split by answers and its prompt repeated. Without `share_prompts` every answer
    brings a prompt of its own, which is the layout for models that cannot share one."""
    if token_budget < 1:
        raise ValueError(f"token_budget is {token_budget}: set at least 1")
    batches: list[PackedBatch] = []
    blocks: list[list[int]] = []
    used = 0
    for rows in _groups(sequences):
        for block in _blocks(sequences, rows, token_budget, share_prompts=share_prompts):
            cost = _cost(sequences, block)
            if blocks and used + cost > token_budget:
                batches.append(_lay_out(sequences, blocks))
                blocks, used = [], 0
            blocks.append(block)
            used += cost
    if blocks:
        batches.append(_lay_out(sequences, blocks))
    return batches


def _groups(sequences: Sequence[TrainSequence]) -> list[list[int]]:
    """Rows with something to train, by group; checks what must hold for a group to share its prompt."""
    groups: dict[int, list[int]] = {}
    for row, sequence in enumerate(sequences):
        if not sequence.mask.any():
            continue
        if len(sequence.prompt_ids) == 0:
            raise DataError(
                f"group {sequence.group}: empty prompt, so nothing predicts the first answer token; "
                "give the task at least one prompt token (a BOS token will do)"
            )
        rows = groups.setdefault(sequence.group, [])
        if rows and not np.array_equal(sequences[rows[0]].prompt_ids, sequence.prompt_ids):
            raise ValueError(f"group {sequence.group}: sequences with different prompts cannot share one")
        rows.append(row)
    return list(groups.values())


def _blocks(
    sequences: Sequence[TrainSequence], rows: list[int], token_budget: int, *, share_prompts: bool
) -> list[list[int]]:
    """Split one group into blocks that fit the budget with their prompt; a lone answer may exceed it."""
    blocks: list[list[int]] = []
    for row in rows:
        if share_prompts and blocks and _cost(sequences, [*blocks[-1], row]) <= token_budget:
            blocks[-1].append(row)
        else:
            blocks.append([row])
    return blocks


def _cost(sequences: Sequence[TrainSequence], rows: list[int]) -> int:
    return len(sequences[rows[0]].prompt_ids) + sum(_input_length(sequences[row]) for row in rows)


def _input_length(sequence: TrainSequence) -> int:
    """Answer tokens that the model must read: those before the last trained one."""
    return int(np.flatnonzero(sequence.mask)[-1])


def _lay_out(sequences: Sequence[TrainSequence], blocks: list[list[int]]) -> PackedBatch:
    tokens: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    prompts: list[tuple[int, int]] = []
    answers: list[tuple[int, int, int]] = []
    predictors: list[np.ndarray] = []
    targets: list[np.ndarray] = []
    offsets: list[np.ndarray] = []
    at = 0
    for prompt, block in enumerate(blocks):
        prompt_ids = sequences[block[0]].prompt_ids
        prompt_end = at + len(prompt_ids)
        prompts.append((at, len(prompt_ids)))
        tokens.append(prompt_ids)
        positions.append(np.arange(len(prompt_ids)))
        at = prompt_end
        for row in block:
            sequence, length = sequences[row], _input_length(sequences[row])
            trained = np.flatnonzero(sequence.mask)
            answers.append((at, length, prompt))
            tokens.append(sequence.token_ids[:length])
            positions.append(len(prompt_ids) + np.arange(length))
            # Token 0 is predicted by the end of the prompt, token t by the answer's own token t - 1.
            predictors.append(np.where(trained == 0, prompt_end - 1, at + trained - 1))
            targets.append(sequence.token_ids[trained])
            offsets.append(trained)
            at += length
    counts = [len(part) for part in targets]
    return PackedBatch(
        token_ids_N=_join(tokens),
        position_ids_N=_join(positions),
        prompts_G=np.array(prompts, np.int64).reshape(-1, 2),
        answers_A=np.array(answers, np.int64).reshape(-1, 3),
        rows_A=np.array([row for block in blocks for row in block], np.int64),
        predictor_M=_join(predictors),
        target_M=_join(targets),
        answer_M=np.repeat(np.arange(len(counts)), counts),
        offset_M=_join(offsets),
    )


def _join(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts).astype(np.int64)
