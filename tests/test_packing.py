"""Packing: by hand, then what must hold for any sequences and any budget."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cauce.errors import DataError
from cauce.packing import REMADE_BUDGETS, pack
from cauce.types import TrainSequence


def sequence(group, prompt, answer, mask=None):
    zeros = np.zeros(len(answer), np.float32)
    return TrainSequence(
        group=group,
        prompt_ids=np.array(prompt, np.int32),
        token_ids=np.array(answer, np.int32),
        mask=np.array([1] * len(answer) if mask is None else mask, np.uint8),
        advantages=zeros,
        behaviour_logps=zeros,
        proximal_logps=None,
        reference_logps=None,
    )


@st.composite
def sequence_lists(draw):
    made = []
    for group in range(draw(st.integers(1, 4))):
        prompt = draw(st.lists(st.integers(0, 9), min_size=1, max_size=6))
        for _ in range(draw(st.integers(1, 4))):
            answer = draw(st.lists(st.integers(0, 9), max_size=6))
            mask = [int(draw(st.booleans())) for _ in answer]
            made.append(sequence(group, prompt, answer, mask))
    return draw(st.permutations(made))


def test_layout_by_hand():
    sequences = [
        sequence(7, [1, 2, 3], [4, 5, 6]),
        sequence(8, [9], [10, 11, 12, 13], mask=[0, 1, 1, 0]),
        sequence(7, [1, 2, 3], [14]),
    ]
    (packed,) = pack(sequences, 100)
    # The prompt of group 7 once, its two answers, then group 8; last trained tokens and what follows are not
    # read.
    assert packed.token_ids_N.tolist() == [1, 2, 3, 4, 5, 9, 10, 11]
    assert packed.position_ids_N.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert packed.prompts_G.tolist() == [[0, 3], [5, 1]]
    assert packed.answers_A.tolist() == [[3, 2, 0], [5, 0, 0], [6, 2, 1]]
    assert packed.rows_A.tolist() == [0, 2, 1]
    assert packed.predictor_M.tolist() == [2, 3, 4, 2, 6, 7]
    assert packed.target_M.tolist() == [4, 5, 6, 14, 11, 12]
    assert packed.answer_M.tolist() == [0, 0, 0, 1, 2, 2]
    assert packed.offset_M.tolist() == [0, 1, 2, 0, 1, 2]


def test_a_group_over_budget_is_split_where_that_is_less_work():
    sequences = [sequence(0, [1, 2, 3], [5] * 10) for _ in range(5)]
    packed = pack(sequences, 21)  # a prompt of 3 and two answers of 9; 3 x (48 + 2 x 3) passes, remade 4 x 48
    assert [b.rows_A.tolist() for b in packed] == [[0, 1], [2, 3], [4]]
    assert all(b.token_ids_N[:3].tolist() == [1, 2, 3] for b in packed)
    assert not any(b.is_remade for b in packed)


def test_a_group_over_budget_with_a_long_prompt_stays_whole_and_is_remade():
    sequences = [sequence(0, [1, 2, 3, 4], [5, 6, 7]) for _ in range(5)]
    (packed,) = pack(sequences, 8)  # 14 tokens: 4 x 14 passes; split in three 3 x (14 + 2 x 4)
    assert (packed.num_tokens, packed.is_remade) == (14, True)
    split = pack(sequences, 8, can_remake=False)
    assert [b.rows_A.tolist() for b in split] == [[0, 1], [2, 3], [4]]
    assert not any(b.is_remade for b in split)


def test_the_group_of_the_design_is_remade_whole_at_the_default_budget():
    (packed,) = pack([sequence(0, [1] * 2000, [2] * 1000) for _ in range(8)], 4096)
    assert (packed.num_tokens, packed.is_remade) == (2000 + 8 * 999, True)


def test_what_is_remade_is_bounded_too():
    sequences = [sequence(0, [1] * 6, [2, 3]) for _ in range(200)]
    packed = pack(sequences, 8)  # 206 tokens: blocks of 58 answers and the prompt
    assert [b.num_tokens for b in packed] == [64, 64, 64, 32]
    assert all(b.is_remade and b.num_tokens <= REMADE_BUDGETS * 8 for b in packed)


def test_an_answer_over_budget_stands_alone_whole_and_remade():
    sequences = [sequence(0, [1], [2] * 3), sequence(1, [1], [2] * 50), sequence(2, [1], [2] * 3)]
    for share in (True, False):
        packed = pack(sequences, 10, share_prompts=share)
        assert [b.num_tokens for b in packed] == [3, 50, 3]
        assert [b.num_trained for b in packed] == [3, 50, 3]
        assert [b.is_remade for b in packed] == [False, True, False]


def test_padding_counts_where_rows_are_padded():
    sequences = [sequence(group, [1], [2] * length) for group, length in enumerate((2, 2, 2, 10, 2))]
    assert [len(b.rows_A) for b in pack(sequences, 20)] == [5]
    # Rows of 2 stand together; one of 10 would pad them to 40 tokens.
    packed = pack(sequences, 20, share_prompts=False)
    assert [b.rows_A.tolist() for b in packed] == [[0, 1, 2], [3, 4]]


@settings(max_examples=100, deadline=None)
@given(sequences=sequence_lists(), budget=st.integers(1, 40), share=st.booleans(), remake=st.booleans())
def test_every_trained_token_is_packed_once_with_its_own_context(sequences, budget, share, remake):
    seen = [np.zeros(len(s.token_ids), int) for s in sequences]
    for packed in pack(sequences, budget, share_prompts=share, can_remake=remake):
        if len(packed.rows_A) > 1:
            assert packed.num_tokens <= budget * (REMADE_BUDGETS if packed.is_remade else 1)
        assert packed.is_remade == (remake and packed.num_tokens > budget)
        if not share:
            assert len(packed.prompts_G) == len(packed.answers_A)
        for m in range(packed.num_trained):
            row = packed.rows_A[packed.answer_M[m]]
            made, offset = sequences[row], packed.offset_M[m]
            seen[row][offset] += 1
            assert packed.target_M[m] == made.token_ids[offset]
            # Walk back from the predicting position: prompt, then the answer so far.
            start, length, prompt = packed.answers_A[packed.answer_M[m]]
            prompt_start, prompt_length = packed.prompts_G[prompt]
            places = [*range(prompt_start, prompt_start + prompt_length), *range(start, start + length)]
            context = places[: len(made.prompt_ids) + offset]
            assert context[-1] == packed.predictor_M[m]
            expected = [*made.prompt_ids, *made.token_ids[:offset]]
            assert packed.token_ids_N[context].tolist() == expected
            assert packed.position_ids_N[context].tolist() == list(range(len(expected)))
    for made, count in zip(sequences, seen, strict=True):
        assert count.tolist() == made.mask.tolist()


@settings(max_examples=50, deadline=None)
@given(sequences=sequence_lists(), budget=st.integers(1, 40))
def test_scatter_undoes_collect(sequences, budget):
    values = [np.arange(len(s.token_ids), dtype=np.float32) + 100 * i for i, s in enumerate(sequences)]
    back = [np.full(len(s.token_ids), -1.0, np.float32) for s in sequences]
    for packed in pack(sequences, budget):
        packed.scatter(packed.collect(values), back)
    for made, value, found in zip(sequences, values, back, strict=True):
        np.testing.assert_array_equal(found, np.where(made.mask == 1, value, -1.0))


def test_a_value_per_trained_token_or_an_error():
    (packed,) = pack([sequence(0, [1], [2, 3])], 10)
    with pytest.raises(ValueError, match="3 values for 2 trained tokens"):
        packed.scatter(np.zeros(3, np.float32), [np.zeros(2, np.float32)])


def test_nothing_trained_is_nothing_packed():
    assert pack([sequence(0, [1], [2, 3], mask=[0, 0]), sequence(0, [1], [])], 10) == []


def test_errors_say_what_is_wrong():
    with pytest.raises(DataError, match="group 4: empty prompt"):
        pack([sequence(4, [], [1])], 10)
    with pytest.raises(ValueError, match="group 4: sequences with different prompts"):
        pack([sequence(4, [1], [1]), sequence(4, [2], [1])], 10)
    with pytest.raises(ValueError, match="token_budget is 0"):
        pack([sequence(4, [1], [1])], 0)
    with pytest.raises(ValueError, match="unequal lengths"):
        replace(sequence(4, [1], [1, 2]), mask=np.ones(3, np.uint8))
