"""A checksum of weights that does not depend on how they are cut into pieces.

A tensor is read as 64-bit words v_j of its raw bytes (the last filled with zeros). Its sum, modulo 2^64, is
    sum_j mix(v_j) * k_j        mix(v) = v xor (v >> 32),   k_j = 2 * j * A + 1
with j the position of the word in the whole tensor: a sum, so that shards cut at multiples of 8 bytes, chunks
and threads may be added in any order. k_j is odd, so any changed word shows; through k_j moved words show as
well. The sums are combined with names, shapes and dtypes by sha256. This guards against torn or wrong
weights, not against an adversary. Compiled, it is a pass over memory; NumPy, where there is no
compiler, takes four times as long.
"""

import ctypes
import functools
import hashlib
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from cauce.engine.kernels import load_kernels

WORD_BYTES = 8
CHUNK_WORDS = 1 << 15  # the two buffers of 256 KB stay in a core's cache
LARGE = 1 << 20  # bytes; below, one thread is done before another is awake
WORD_MASK = (1 << 64) - 1
STRIDE = (2 * 0x9E3779B97F4A7C15) & WORD_MASK


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """One hexadecimal digest of all tensors with their names, shapes and dtypes, whatever their order."""
    return digest_of(tensors, {name: tensor_sum(tensor) for name, tensor in tensors.items()})


def digest_of(tensors: Mapping[str, Tensor], sums: Mapping[str, int]) -> str:
    """The digest of tensors whose sums are known."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        kind = f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
        line = f"{name} {kind} {sums[name] & WORD_MASK:016x}\n"
        digest.update(line.encode())
    return digest.hexdigest()[:32]


def tensor_sum(tensor: Tensor, *, first_byte: int = 0) -> int:
    """The position-weighted sum of a tensor, or of the shard of one that starts at `first_byte` of its bytes.

    Shards of one tensor add up modulo 2^64 to the sum of the whole.
    """
    return bytes_sum(raw_bytes(tensor), first_byte=first_byte, threads=torch.get_num_threads())


def raw_bytes(tensor: Tensor) -> np.ndarray:
    """The bytes of a tensor as they lie in memory, uint8 [numel * itemsize]; a view, where it is contiguous here."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def bytes_sum(raw: np.ndarray, *, first_byte: int = 0, threads: int = 1) -> int:
    """The sum over bytes of a tensor that start at `first_byte` of it, modulo 2^64."""
    if first_byte % WORD_BYTES:
        raise ValueError(f"first_byte {first_byte}: shards must be cut at multiples of {WORD_BYTES} bytes")
    compiled = _compiled()
    if compiled is not None:
        found = ctypes.c_uint64()
        first_word = first_byte // WORD_BYTES
        compiled(raw.ctypes.data, len(raw), first_word, STRIDE, ctypes.byref(found), threads if len(raw) > LARGE else 1)
        return found.value
    return numpy_sum(raw, first_byte=first_byte)


def numpy_sum(raw: np.ndarray, *, first_byte: int) -> int:
    """The same where nothing is compiled."""
    num_whole = len(raw) - len(raw) % WORD_BYTES
    total = _sum_words(raw[:num_whole].view(np.uint64), first_byte // WORD_BYTES)
    if num_whole < len(raw):
        last = np.zeros(WORD_BYTES, dtype=np.uint8)
        last[: len(raw) - num_whole] = raw[num_whole:]
        total += _sum_words(last.view(np.uint64), (first_byte + num_whole) // WORD_BYTES)
    return total & WORD_MASK


@functools.cache
def _compiled() -> Callable[..., None] | None:
    kernels, _ = load_kernels()
    if kernels is None:
        return None
    pointer, size, word, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint64, ctypes.c_int32
    function: Callable[..., None] = kernels.function("weights_sum", [pointer, size, word, word, pointer, number])
    return function


def _sum_words(words: np.ndarray, first: int) -> int:
    size = min(CHUNK_WORDS, len(words))
    # k_j = k_(j - start) + start * STRIDE: one table of weights serves all chunks, the rest is a plain sum.
    weights = np.arange(size, dtype=np.uint64) * np.uint64(STRIDE) + np.uint64(1)
    buffer = np.empty(size, dtype=np.uint64)
    total = 0
    for start in range(0, len(words), CHUNK_WORDS):
        chunk = words[start : start + CHUNK_WORDS]
        mixed = buffer[: len(chunk)]
        np.right_shift(chunk, np.uint64(32), out=mixed)
        np.bitwise_xor(mixed, chunk, out=mixed)
        plain = int(mixed.sum())
        np.multiply(mixed, weights[: len(chunk)], out=mixed)
        total += int(mixed.sum()) + plain * ((first + start) * STRIDE & WORD_MASK)
    return total & WORD_MASK
