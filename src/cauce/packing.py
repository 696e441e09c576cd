"""Packing: the answers of a step, cut into micro-batches in which each group's prompt stands once.

    [prompt of group 0 | answer | answer | ... | prompt of group 1 | answer | ...]     one flat row of N tokens

Position ids restart at every prompt, and each answer goes on where its prompt ends. The layout also says which
position predicts which trained token, so that logits are made for those alone; the first token of every answer is
predicted by the last token of its prompt. Tokens behind the last trained one of an answer predict nothing and are
left out, so an answer of T trained tokens costs T - 1. Sequences without a trained token are left out here; the global
counts that the loss is divided by are made elsewhere, from all of them.

A group over budget can be split by answers, which reads its prompt again with every part, or stay whole and be
remade: the model then keeps each layer's input alone and makes the rest again in the backward pass. A token is a pass
forward and two back, remade one more, so splitting costs three passes for each repeated prompt token and remaking one
for every token of the group: whichever is less work is done. A prompt of 2,000 with 8 answers of 1,000 and a budget of
4,096 is 48,000 passes of a token split in four, 40,000 whole. What is remade keeps about a tenth for each token, so up
to REMADE_BUDGETS budgets of it are about one budget in memory. Nothing is ever truncated: an answer that is over
budget by itself stands alone, remade.

Between advantages and the packed forward. NumPy only: models/packed_attention.py turns a layout into tensors.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from cauce.errors import DataError
from cauce.types import TrainSequence

REMADE_BUDGETS = 8  # of tokens that may stay together where activations are made again
FORWARD_AND_BACK = 3  # passes of a token; a backward pass is two products for each of a forward one
REMADE = FORWARD_AND_BACK + 1


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
    is_remade: bool  # whether the backward pass makes activations again: there are too many to keep

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


def pack(
    sequences: Sequence[TrainSequence], token_budget: int, *, share_prompts: bool = True, can_remake: bool = True
) -> list[PackedBatch]:
    """Cut sequences into micro-batches of at most `token_budget` packed tokens, groups in order of
    appearance; one that is remade holds part of one group, and at most REMADE_BUDGETS times as much.

    Without `share_prompts` every answer brings a prompt of its own, which is the layout for models that cannot
    share one; they are fed padded rows, and padding counts. Without `can_remake` a group over budget is split."""
    if token_budget < 1:
        raise ValueError(f"token_budget is {token_budget}: set at least 1")
    batches: list[PackedBatch] = []
    blocks: list[list[int]] = []
    used = longest = 0

    def finish(*, is_remade: bool = False) -> None:
        nonlocal used, longest
        if blocks:
            batches.append(_lay_out(sequences, blocks, is_remade=is_remade and can_remake))
        blocks.clear()
        used = longest = 0

    for rows in _groups(sequences):
        for block in _blocks(sequences, rows, token_budget, share_prompts=share_prompts, can_remake=can_remake):
            cost = _cost(sequences, block)
            filled = used + cost if share_prompts else (len(blocks) + 1) * max(longest, cost)
            if filled > token_budget:
                finish()
            blocks.append(block)
            used, longest = used + cost, max(longest, cost)
            if cost > token_budget:
                finish(is_remade=True)
    finish()
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
    sequences: Sequence[TrainSequence], rows: list[int], token_budget: int, *, share_prompts: bool, can_remake: bool
) -> list[list[int]]:
    """One group in the blocks that are least work; those over budget are remade."""
    if not share_prompts:
        return [[row] for row in rows]
    split = _split(sequences, rows, token_budget)
    if len(split) == 1 or not can_remake:
        return split
    together = _split(sequences, rows, REMADE_BUDGETS * token_budget)

    def work(blocks: list[list[int]]) -> int:
        costs = [_cost(sequences, block) for block in blocks]
        return sum(cost * (REMADE if cost > token_budget else FORWARD_AND_BACK) for cost in costs)

    return min(split, together, key=work)


def _split(sequences: Sequence[TrainSequence], rows: list[int], limit: int) -> list[list[int]]:
    """By answers, each block with the prompt under the limit; a lone answer may exceed it."""
    blocks: list[list[int]] = []
    for row in rows:
        if blocks and _cost(sequences, [*blocks[-1], row]) <= limit:
            blocks[-1].append(row)
        else:
            blocks.append([row])
    return blocks


def _cost(sequences: Sequence[TrainSequence], rows: list[int]) -> int:
    return len(sequences[rows[0]].prompt_ids) + sum(_input_length(sequences[row]) for row in rows)


def _input_length(sequence: TrainSequence) -> int:
    """Answer tokens that the model must read: those before the last trained one."""
    return int(np.flatnonzero(sequence.mask)[-1])


def _lay_out(sequences: Sequence[TrainSequence], blocks: list[list[int]], *, is_remade: bool) -> PackedBatch:
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
        is_remade=is_remade,
    )


def _join(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts).astype(np.int64)
