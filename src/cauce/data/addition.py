"""Two-digit addition, the data set of the quickstart: made here, the same on every machine.

Train and test are disjoint as unordered pairs: 23 + 45 held out means that 45 + 23 is not trained on either.
Named in recipes as `builtin:addition/train` and `builtin:addition/test`; read through data/source.py.
"""

import numpy as np

from cauce.types import Row

NUM_HELD_OUT = 400  # of 4,095 unordered pairs; evaluation takes the first 200 unless told otherwise
_SPLIT_KEY = 20_260_101  # fixes the split for ever; no setting of a run changes it


def addition_rows(split: str) -> list[Row]:
    """All rows of one split, in a fixed scattered order."""
    pairs = [(a, b) for a in range(10, 100) for b in range(a, 100)]
    order = np.argsort(np.random.Philox(key=_SPLIT_KEY).random_raw(len(pairs)), kind="stable")
    # Which summand comes first must not always be the smaller one; the parity of the sum decides.
    scattered = [pairs[i] if sum(pairs[i]) % 2 else pairs[i][::-1] for i in order]
    if split == "test":
        chosen = scattered[:NUM_HELD_OUT]
    else:
        chosen = scattered[NUM_HELD_OUT:]
        chosen = chosen + [(b, a) for a, b in chosen if a != b]
    return [
        Row(id=f"{split}:{i}", prompt=f"{a} + {b} =", columns={"answer": str(a + b)}) for i, (a, b) in enumerate(chosen)
    ]
