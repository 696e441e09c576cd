"""Admission numbers to rows: a pure function, every row once an epoch."""

import subprocess
import sys

import pytest

from cauce.data.order import row_index


def test_every_epoch_is_a_permutation_of_its_own() -> None:
    """G1, G2."""
    epochs = [[row_index(17 * e + i, 17, 5, True) for i in range(17)] for e in range(3)]
    assert all(sorted(epoch) == list(range(17)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert epochs[0] != [row_index(i, 17, 6, True) for i in range(17)]


def test_without_shuffle_it_is_the_order_of_the_data() -> None:
    assert [row_index(n, 3, 5, False) for n in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_it_is_the_same_in_another_process_and_in_any_order_of_asking() -> None:
    asked = [2**40, 5, 12345, 0]
    code = f"from cauce.data.order import row_index; print([row_index(n, 100, -1, True) for n in {asked[::-1]}])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == str([row_index(n, 100, -1, True) for n in asked][::-1]), done.stderr


def test_the_stream_is_pinned() -> None:
    """A resume after an upgrade must admit the same rows, so these numbers may never change."""
    assert [row_index(n, 10, 0, True) for n in range(10)] == PINNED


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="size=0"):
        row_index(0, 0, 0, True)


PINNED = [0, 2, 9, 1, 8, 5, 4, 3, 6, 7]
