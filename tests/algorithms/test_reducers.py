"""The four aggregations with numbers worked out by hand; parts of a step add up."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cauce.algorithms.advantages import make_batch
from cauce.algorithms.reducers import aggregate
from tests.algorithms.cases import algorithm, plain_parts

AGGREGATIONS = ("token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "token_sum_constant")
LENGTH = 16  # cases.MAX_TOKENS


@pytest.mark.parametrize(
    ("aggregation", "expected"), list(zip(AGGREGATIONS, (1.8, 3.0, 4.5, 9 / (2 * LENGTH)), strict=True))
)
def test_value_and_gradient_do_not_depend_on_the_micro_batch(aggregation: str, expected: float) -> None:
    """A1, A6."""
    losses = [[1.0, 1.0, 1.0, 1.0], [5.0]]
    whole, whole_gradient = plain_parts(losses, aggregation, [[0, 1]])
    # One micro-batch each; or one learner rank each: the counts given are those of the step either way.
    cut, cut_gradient = plain_parts(losses, aggregation, [[1], [0]])
    assert whole == pytest.approx(expected, abs=1e-12)
    assert cut == pytest.approx(expected, abs=1e-12)
    assert cut_gradient == whole_gradient


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("size", [4, 2, 1])
def test_accumulation_does_not_change_an_sgd_step(aggregation: str, size: int) -> None:
    """A2, A7."""
    rules = algorithm(aggregation=aggregation)
    parameter = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    for _ in range(0, 4, size):
        loss_N = (parameter**2).expand(3 * size)
        rows_N = torch.arange(size).repeat_interleave(3)
        aggregate(loss_N, torch.ones(3 * size), rows_N, algorithm=rules, num_tokens=12, num_sequences=4).backward()
    per_token = {"sequence_mean_token_sum": 3.0, "token_sum_constant": 3.0 / LENGTH}.get(aggregation, 1.0)
    assert float(parameter.grad) == pytest.approx(4.0 * per_token, rel=1e-12)


def test_each_optimizer_step_divides_by_its_own_tokens() -> None:
    """A3."""
    short, long = [[1.0]] * 4, [[1.0] * 9] * 4
    steps = [plain_parts(rows, "token_mean", [[0, 1], [2, 3]])[0] for rows in (short, long)]
    assert sum(steps) / 2 == pytest.approx(1.0)


def test_masked_answers_leave_numerator_and_denominator() -> None:
    """A4."""
    for aggregation in ("token_mean", "sequence_mean_token_mean"):
        value, gradient = plain_parts([[1.0] * 4] * 2, aggregation, [[0, 1]], masks=[[1] * 4, [0] * 4])
        assert value == pytest.approx(1.0)
        assert gradient[1] == [0.0] * 4


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_nothing_to_train_on_is_exactly_zero(aggregation: str) -> None:
    """A4."""
    value, gradient = plain_parts([[1.0, 2.0]], aggregation, [[0]], masks=[[0, 0]])
    assert value == 0.0
    assert gradient == [[0.0, 0.0]]
    assert make_batch([]).num_tokens == 0
    empty = torch.zeros(0)
    zero = aggregate(
        empty,
        empty,
        empty.long(),
        algorithm=algorithm(aggregation=aggregation),
        num_tokens=5,
        num_sequences=1,
    )
    assert float(zero) == 0.0


def test_counts_of_a_part_instead_of_the_step_are_noticed() -> None:
    """A3."""
    with pytest.raises(ValueError, match="3 trained tokens"):
        aggregate(
            torch.ones(3),
            torch.ones(3),
            torch.zeros(3).long(),
            algorithm=algorithm(),
            num_tokens=2,
            num_sequences=1,
        )


def test_arrays_of_unequal_length_raise() -> None:
    with pytest.raises(ValueError, match="equal length"):
        aggregate(
            torch.ones(3),
            torch.ones(2),
            torch.zeros(3).long(),
            algorithm=algorithm(),
            num_tokens=3,
            num_sequences=1,
        )
    square = torch.ones(2, 2)
    with pytest.raises(ValueError, match="one-dimensional"):
        aggregate(square, square, square.long(), algorithm=algorithm(), num_tokens=4, num_sequences=2)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_partition_adds_up(data: st.DataObject) -> None:
    """A1, A7."""
    lengths = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=7))
    losses = [data.draw(st.lists(st.floats(-5, 5), min_size=n, max_size=n)) for n in lengths]
    masks = [data.draw(st.lists(st.integers(0, 1), min_size=n, max_size=n)) for n in lengths]
    order = data.draw(st.permutations(range(len(lengths))))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(lengths)), max_size=4)) | {0, len(lengths)})
    parts = [order[a:b] for a, b in pairwise(cuts)]
    for aggregation in AGGREGATIONS:
        whole, whole_gradient = plain_parts(losses, aggregation, [range(len(lengths))], masks)
        value, gradient = plain_parts(losses, aggregation, parts, masks)
        assert value == pytest.approx(whole, abs=1e-12)
        assert gradient == whole_gradient


def test_tokens_of_a_sequence_need_not_lie_together() -> None:
    rules = algorithm(aggregation="sequence_mean_token_mean")
    loss_N = torch.tensor([1.0, 5.0, 1.0, 1.0, 1.0])
    sequence_N = torch.tensor([40, -7, 40, 40, 40])
    value = aggregate(loss_N, torch.ones(5), sequence_N, algorithm=rules, num_tokens=5, num_sequences=2)
    assert float(value) == pytest.approx(3.0)
