"""A reader of `weights_vs_copy`: waits for its turn, then takes the weights, or copies as many bytes.

    python -m benchmarks.weights_reader STORE SOURCE FIRST_VERSION NUM_ROUNDS

Of three rounds, the first pulls a version from the store: read, checked and every byte touched. The second copies the
source, a file in shared memory that is mapped and warm, into memory that this process has already; the third copies it
into memory that the system has to give first, and gives it back.
"""

import mmap
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.turns import Turns
from cauce.weights.store import WeightStore

KINDS = 3  # of rounds


def main() -> None:
    turns = Turns.from_pipes()
    store, source = WeightStore(Path(sys.argv[1]), keep=1), Path(sys.argv[2])
    first, num_rounds = int(sys.argv[3]), int(sys.argv[4])
    with source.open("rb") as file:
        mapped = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype=np.uint8)
    target = np.zeros_like(mapped)
    np.copyto(target, mapped)  # both are in memory from here on
    held: list[Any] = []

    def one_round(number: int) -> dict[str, Any]:
        began = time.perf_counter()
        kind = number % KINDS
        if kind == 1:
            np.copyto(target, mapped)
            return {"seconds": time.perf_counter() - began}
        if kind == 2:
            fresh = mmap.mmap(-1, mapped.size)
            np.copyto(np.frombuffer(fresh, dtype=np.uint8), mapped)
            fresh.close()
            return {"seconds": time.perf_counter() - began}
        held[:] = [store.pull(first + number // KINDS)]
        return {"seconds": time.perf_counter() - began, "checksum": held[0].checksum}

    turns.play({}, num_rounds=KINDS * num_rounds, one_round=one_round)


if __name__ == "__main__":
    main()
