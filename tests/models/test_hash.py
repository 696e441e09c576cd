"""The checksum of weights: independent of cuts and order, sensitive to everything else."""

import itertools

import numpy as np
import pytest
import torch

from cauce.models.weights_hash import _compiled, bytes_sum, checksum, numpy_sum, tensor_sum


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "a": torch.randn(70_001, generator=generator),  # more than one chunk, odd length
        "b": torch.randn(33, 5, generator=generator).bfloat16(),
        "c": torch.tensor(3.0),
    }


def flip_bit(tensor: torch.Tensor, position: int, bit: int) -> None:
    width = {4: torch.int32, 2: torch.int16}[tensor.element_size()]
    tensor.view(-1).view(width)[position] ^= 1 << bit


def test_shards_add_up_to_the_whole() -> None:
    tensor = torch.randn(40_000, 4)
    whole = tensor_sum(tensor)
    for cuts in ([1], [7, 8], [1000, 32_768, 39_999]):
        edges = [0, *cuts, len(tensor)]
        parts = [tensor_sum(tensor[a:b], first_byte=a * 16) for a, b in itertools.pairwise(edges)]
        assert sum(parts) % 2**64 == whole


def test_order_of_names_and_memory_layout_do_not_matter() -> None:
    tensors = weights()
    strided = {**tensors, "b": tensors["b"].t().contiguous().t()}
    assert checksum(dict(reversed(tensors.items()))) == checksum(tensors) == checksum(strided)


@pytest.mark.parametrize(("name", "position"), [("a", 0), ("a", 69_999), ("a", 70_000), ("b", 164), ("c", 0)])
@pytest.mark.parametrize("bit", [0, 9, 15])
def test_one_flipped_bit_shows(name: str, position: int, bit: int) -> None:
    tensors = weights()
    before = checksum(tensors)
    flip_bit(tensors[name], position, bit)
    assert checksum(tensors) != before


@pytest.mark.parametrize(("first", "second"), [(0, 1), (0, 2), (1, 65_537), (3, 65_539), (2, 69_998)])
def test_two_swapped_elements_show(first: int, second: int) -> None:
    tensors = weights()
    before = checksum(tensors)
    values = tensors["a"].clone()
    tensors["a"][first], tensors["a"][second] = values[second], values[first]
    assert checksum(tensors) != before


def test_swapped_elements_of_few_bits_show() -> None:
    # bf16 numbers held in fp32 have 16 zero bits; distances of powers of two would cancel in a weaker hash.
    values = torch.randn(1 << 18).bfloat16().float()
    before = tensor_sum(values)
    for distance in (1 << 15, 1 << 16, 1 << 17):
        moved = values.clone()
        moved[1], moved[1 + distance] = values[1 + distance], values[1]
        assert tensor_sum(moved) != before


def test_name_shape_dtype_and_sign_of_zero_show() -> None:
    tensors = weights()
    digests = {
        checksum(tensors),
        checksum({"z": tensors["a"], "b": tensors["b"], "c": tensors["c"]}),
        checksum({**tensors, "b": tensors["b"].reshape(5, 33)}),
        checksum({**tensors, "b": tensors["b"].view(torch.float16)}),
        checksum({**tensors, "a": tensors["b"], "b": tensors["a"]}),
        checksum({"a": torch.zeros(2)}),
        checksum({"a": -torch.zeros(2)}),
        checksum({"a": torch.zeros(3)}),
    }
    assert len(digests) == 8


def test_cuts_off_the_word_are_refused() -> None:
    with pytest.raises(ValueError, match="multiples of 8 bytes"):
        tensor_sum(torch.zeros(4), first_byte=4)


@pytest.mark.skipif(_compiled() is None, reason="there is no compiler")
@pytest.mark.parametrize("size", [0, 1, 7, 8, 255, 256, 257, 263, 4_099, (1 << 20) + 13])
@pytest.mark.parametrize("first_byte", [0, 8, 1 << 21])
def test_compiled_and_numpy_give_the_same_sum(size: int, first_byte: int) -> None:
    raw = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    expected = numpy_sum(raw, first_byte=first_byte)
    assert [bytes_sum(raw, first_byte=first_byte, threads=threads) for threads in (1, 2, 3)] == [expected] * 3
