"""Writes weights as a safetensors file with the checksum of its content in its header, in one pass over memory.

Two threads take pieces in turn: each is summed, and then written while it is still in the cache. `pwrite` takes pages
of shared memory that nobody has cleared; a map of the file would clear them one by one, which takes half as long
again. Readers use the safetensors library.
"""

import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from cauce.errors import WeightsError
from cauce.models.weights_hash import bytes_sum, digest_of, raw_bytes

PIECE_BYTES = 1 << 20  # half of a core's second cache
NUM_THREADS = 2
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    name: str
    raw: np.ndarray  # uint8
    first_byte: int  # of its tensor
    offset: int  # in the file


def write_weights(path: Path, tensors: Mapping[str, Tensor], *, metadata: Mapping[str, str]) -> str:
    """Writes a new file; `metadata` and "checksum" go into its header. Returns that checksum.

    Raises:
        OSError: where there is no room.
        WeightsError: for a dtype that the format is not written in here.
    """
    odd = [name for name, tensor in tensors.items() if tensor.dtype not in DTYPES]
    if odd:
        raise WeightsError(
            f"{odd[0]} is {tensors[odd[0]].dtype}; weights are published as one of {list(DTYPES.values())}"
        )
    raws = {name: raw_bytes(tensor) for name, tensor in sorted(tensors.items())}
    header = _header(tensors, raws, {**metadata, "checksum": "?" * len(digest_of({}, {}))})
    pieces, at = [], len(header)
    for name, raw in raws.items():
        for first in range(0, len(raw), PIECE_BYTES):
            part = raw[first : first + PIECE_BYTES]
            pieces.append(_Piece(name=name, raw=part, first_byte=first, offset=at + first))
        at += len(raw)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)

    def write(piece: _Piece) -> int:
        found = bytes_sum(piece.raw, first_byte=piece.first_byte)
        _write_all(descriptor, piece.raw.data, piece.offset)
        return found

    try:
        with ThreadPoolExecutor(max_workers=NUM_THREADS) as executor:
            sums = dict.fromkeys(raws, 0)
            for piece, found in zip(pieces, executor.map(write, pieces), strict=True):
                sums[piece.name] += found
        digest = digest_of(tensors, sums)
        _write_all(descriptor, memoryview(_header(tensors, raws, {**metadata, "checksum": digest})), 0)
    finally:
        os.close(descriptor)
    return digest


def _header(tensors: Mapping[str, Tensor], raws: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> bytes:
    """Length and JSON, as the format wants them; as long for every checksum."""
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    at = 0
    for name, raw in raws.items():
        tensor = tensors[name]
        entries[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + len(raw)],
        }
        at += len(raw)
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_all(descriptor: int, content: memoryview, offset: int) -> None:
    while content:
        written = os.pwrite(descriptor, content, offset)
        content, offset = content[written:], offset + written
