"""Which rows of a decode step share a prompt, and over which lengths they attend; host arithmetic on the slot table."""

import numpy as np
import torch
from torch import Tensor

from cauce.engine.attention import DecodeLayout
from cauce.engine.slots import SlotTable

LENGTH_STEP = 16  # attended lengths are rounded up, so that few shapes occur
BUCKET = 128  # of the attended length, when deterministic


def decode_layout(
    table: SlotTable, num_rows: int, live: np.ndarray, *, deterministic: bool, device: torch.device
) -> DecodeLayout:
    """For the first `num_rows` rows of the table, of which the rows `live` hold samples."""

    def tensor(array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64)).to(device)

    answer_S, prompt_S = table.length[:num_rows], table.prompt_length[:num_rows]
    if deterministic:  # each slot has a prompt row of its own, under its number
        identity = np.arange(num_rows)
        return DecodeLayout(
            answer_S=tensor(answer_S),
            prompt_S=tensor(prompt_S),
            prompt_P=tensor(prompt_S),
            row_PG=tensor(identity[:, None]),
            back_S=tensor(identity),
            answer_spans=[(tensor(rows), length) for rows, length in _buckets(answer_S + 1)],
            prompt_spans=[(tensor(rows), length) for rows, length in _buckets(prompt_S)],
        )
    prompt_row = table.prompt_row[live]
    num_prompts = int(prompt_row.max()) + 1
    order = np.argsort(prompt_row, kind="stable")
    counts = np.bincount(prompt_row, minlength=num_prompts)
    rank = np.empty(len(live), dtype=np.int64)  # of each live row among those with its prompt
    rank[order] = np.arange(len(live)) - np.repeat(np.cumsum(counts) - counts, counts)
    most = int(counts.max())
    row_PG = np.zeros((num_prompts, most), dtype=np.int64)
    row_PG[prompt_row, rank] = live
    back_S = np.zeros(num_rows, dtype=np.int64)
    back_S[live] = prompt_row * most + rank
    prompt_P = np.zeros(num_prompts, dtype=np.int64)
    prompt_P[prompt_row] = table.prompt_length[live]
    return DecodeLayout(
        answer_S=tensor(answer_S),
        prompt_S=tensor(prompt_S),
        prompt_P=tensor(prompt_P),
        row_PG=tensor(row_PG),
        back_S=tensor(back_S),
        answer_spans=[(slice(0, num_rows), _rounded(int(answer_S.max()) + 1, LENGTH_STEP))],
        prompt_spans=[(slice(0, num_prompts), _rounded(int(prompt_P.max()), LENGTH_STEP))],
    )


def _buckets(length_S: np.ndarray) -> list[tuple[np.ndarray, int]]:
    """The rows of each length bucket."""
    bucket_S = np.maximum(1, -(-length_S // BUCKET)) * BUCKET
    return [(np.flatnonzero(bucket_S == bucket), int(bucket)) for bucket in np.unique(bucket_S)]


def _rounded(length: int, step: int) -> int:
    return -(-length // step) * step
