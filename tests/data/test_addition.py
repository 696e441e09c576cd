"""Two-digit addition: right answers, held-out pairs that training never sees in either order."""

import re

from cauce.data.addition import addition_rows
from cauce.types import Row


def pair(row: Row) -> frozenset[int]:
    """The summands of a row, without their order."""
    return frozenset(int(n) for n in re.findall(r"\d+", str(row.prompt)))


def test_answers_are_sums_of_two_digit_numbers() -> None:
    for row in addition_rows("train") + addition_rows("test"):
        a, b = (int(n) for n in re.findall(r"\d+", str(row.prompt)))
        assert row.columns == {"answer": str(a + b)}
        assert 10 <= min(a, b) <= max(a, b) <= 99


def test_train_and_test_are_disjoint_as_unordered_pairs_and_cover_all() -> None:
    train, test = addition_rows("train"), addition_rows("test")
    train_pairs, test_pairs = {pair(row) for row in train}, {pair(row) for row in test}
    assert not train_pairs & test_pairs
    assert len(test_pairs) == len(test) >= 200
    assert len(train_pairs | test_pairs) == 90 * 91 // 2
    assert len({row.prompt for row in train}) == len(train)


def test_the_split_is_the_same_every_time_and_the_head_of_the_test_set_is_scattered() -> None:
    assert addition_rows("test") == addition_rows("test")
    sums = [int(row.columns["answer"]) for row in addition_rows("test")[:200]]
    assert 95 < sum(sums) / 200 < 123
    first_is_smaller = sum(
        re.findall(r"\d+", str(r.prompt)) == sorted(re.findall(r"\d+", str(r.prompt)))
        for r in addition_rows("test")[:200]
    )
    assert 60 < first_is_smaller < 140
