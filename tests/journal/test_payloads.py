"""Payload files: round trips, roll-over, torn tails and damage."""

from pathlib import Path

import numpy as np
import pytest

from cauce.errors import JournalError
from cauce.journal.payloads import (
    PayloadRef,
    PayloadWriter,
    cut_tails,
    encode_answer,
    encode_prompt,
    read_answer,
    read_prompt,
)
from cauce.types import Completion
from tests.journal.records import make_answer


def test_arrays_come_back_bit_for_bit(tmp_path: Path) -> None:
    answer = make_answer(7, 3)
    logps = np.array([-0.0, np.float32(-1e-42), -np.inf], np.float32)  # a sign, a subnormal and an infinity
    odd = Completion(
        task=2**40,
        index=1,
        attempt=1,
        token_ids=np.array([0, 2**31 - 1, -1], np.int32),
        logps=logps,
        versions=np.array([4, 5, 5], np.int32),
        mask=np.array([1, 0, 1], np.uint8),
        finish_reason="length",
    )
    writer = PayloadWriter(tmp_path, epoch=1)
    refs = [writer.append(encode_answer(a)) for a in (answer, odd)]
    prompt = writer.append(encode_prompt(7, np.array([5, 6], np.int32)))
    writer.sync()
    found = read_answer(tmp_path, refs[1], task=2**40, index=1)
    assert found.logps.tobytes() == logps.tobytes()
    assert found.token_ids.tolist() == [0, 2**31 - 1, -1]
    assert found.versions.tolist() == [4, 5, 5]
    assert found.mask.tolist() == [1, 0, 1]
    assert found.token_ids.flags.writeable
    np.testing.assert_array_equal(read_answer(tmp_path, refs[0], task=7, index=3).logps, answer.logps)
    assert read_prompt(tmp_path, prompt, task=7).tolist() == [5, 6]
    writer.close()


def test_files_roll_over_and_keep_their_records(tmp_path: Path) -> None:
    writer = PayloadWriter(tmp_path, epoch=3, max_file_bytes=200)
    answers = [make_answer(task, 0) for task in range(12)]
    refs = [writer.append(encode_answer(answer)) for answer in answers]
    writer.close()
    files = sorted(path.name for path in tmp_path.iterdir())
    assert len(files) > 2
    assert files[0] == "000003-0001.bin"
    assert all(path.stat().st_size <= 200 for path in tmp_path.iterdir())
    for answer, ref in zip(answers, refs, strict=True):
        found = read_answer(tmp_path, ref, task=answer.task, index=0)
        np.testing.assert_array_equal(found.token_ids, answer.token_ids)


def _two_records(folder: Path) -> tuple[Path, list[PayloadRef]]:
    writer = PayloadWriter(folder, epoch=1)
    refs = [writer.append(encode_answer(make_answer(task, 0))) for task in range(2)]
    writer.close()
    return folder / refs[0].file, refs


def test_a_torn_tail_is_cut_behind_the_last_committed_record(tmp_path: Path) -> None:
    path, refs = _two_records(tmp_path)
    whole = path.stat().st_size
    torn = encode_answer(make_answer(9, 0))
    for size in (
        1,
        10,
        28,
        len(torn) - 1,
        len(torn),
    ):  # inside the header, inside the body, whole but unknown
        with open(path, "ab") as file:
            file.write(torn[:size])
        assert cut_tails(tmp_path, {path.name: refs[1].offset}) == {path.name: size}
        assert path.stat().st_size == whole
    assert cut_tails(tmp_path, {path.name: refs[1].offset}) == {}
    read_answer(tmp_path, refs[1], task=1, index=0)


def test_a_file_without_committed_records_is_removed_and_foreign_files_stay(tmp_path: Path) -> None:
    path, _ = _two_records(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    assert list(cut_tails(tmp_path, {})) == [path.name]
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("byte", [0, 6, 12, 25, 30])
def test_damage_anywhere_in_a_record_names_file_and_offset(tmp_path: Path, byte: int) -> None:
    path, refs = _two_records(tmp_path)
    content = bytearray(path.read_bytes())
    content[refs[1].offset + byte] ^= 0x40
    path.write_bytes(content)
    read_answer(tmp_path, refs[0], task=0, index=0)  # its neighbour is not touched
    with pytest.raises(JournalError, match=rf"{path.name} at offset {refs[1].offset}: "):
        read_answer(tmp_path, refs[1], task=1, index=0)
    with pytest.raises(JournalError, match=rf"at offset {refs[1].offset}: "):
        cut_tails(tmp_path, {path.name: refs[1].offset})


def test_a_record_of_another_answer_is_refused(tmp_path: Path) -> None:
    _, refs = _two_records(tmp_path)
    with pytest.raises(JournalError, match=r"instead of \(2, 1, 0\)"):
        read_answer(tmp_path, refs[0], task=1, index=0)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    path, refs = _two_records(tmp_path)
    path.unlink()
    with pytest.raises(JournalError, match=rf"{path.name} is missing"):
        cut_tails(tmp_path, {path.name: 0})
    with pytest.raises(JournalError, match="no such file"):
        read_answer(tmp_path, refs[0], task=0, index=0)


def test_unequal_lengths_are_refused_at_insert() -> None:
    """B14."""
    answer = make_answer(1, 0)
    # What a resumed partial answer with a forgotten mask looks like; the record's own check is circumvented.
    object.__setattr__(answer, "mask", answer.mask[:-1])
    with pytest.raises(JournalError, match=r"answer 1\[0\]: arrays of unequal lengths .*'mask'"):
        encode_answer(answer)


@pytest.mark.parametrize(
    ("field", "dtype"),
    [("token_ids", np.int64), ("logps", np.float64), ("versions", np.int16), ("mask", np.bool_)],
)
def test_other_dtypes_are_refused_by_name(field: str, dtype: type) -> None:
    answer = make_answer(1, 0)
    object.__setattr__(answer, field, getattr(answer, field).astype(dtype))
    with pytest.raises(JournalError, match=rf"answer 1\[0\]: {field} has dtype"):
        encode_answer(answer)
