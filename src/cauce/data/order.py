"""Which row is admitted next: a pure function of the admission number, so that a resume needs no iterator
state.

Each epoch visits every row once, in an order drawn from (seed, epoch). Leaves out sampling with weights and
curricula. The stages ask it while they admit tasks; the number itself is kept by the journal.
"""

from functools import lru_cache

import numpy as np

_UINT64 = (1 << 64) - 1


def row_index(n: int, size: int, seed: int, shuffle: bool) -> int:
    """The row that admission number `n` takes from a source of `size` rows."""
    if size < 1 or n < 0:
        raise ValueError(f"row_index(n={n}, size={size}): n must be at least 0 and size at least 1")
    epoch, offset = divmod(n, size)
    return int(_permutation(size, seed, epoch)[offset]) if shuffle else offset


@lru_cache(maxsize=4)
def _permutation(size: int, seed: int, epoch: int) -> np.ndarray:
    # Sorting raw Philox words, since numpy promises that bit stream across releases and its own shuffle not.
    key = np.array([seed & _UINT64, epoch], dtype=np.uint64)
    words = np.random.Philox(key=key).random_raw(size)
    return np.argsort(words, kind="stable")
