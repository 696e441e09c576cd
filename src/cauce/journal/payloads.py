"""Append-only files for the arrays of a run: token ids, log-probabilities, versions and masks.

A record is a header (magic, kind, task, index, number of tokens, CRC32) and the bare little-endian arrays;
nothing in it is ever executed. The database holds (file, offset) of each committed record. Every owner epoch
writes files of its own, `payloads/<epoch>-<serial>.bin`, so that an owner that was cut off cannot write into
the files of its successor. What lies behind the last committed record of a file was never acknowledged and is
cut off at the next open.
"""

import os
import re
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cauce.durable import sync
from cauce.errors import JournalError
from cauce.faults import fault_point
from cauce.types import Completion

FOLDER_NAME = "payloads"
MAX_FILE_BYTES = 256 * 1024 * 1024

_MAGIC = b"CAUC"
_FIELDS = struct.Struct("<4sBxxxqiI")  # magic, kind, task, index, number of tokens
_CRC = struct.Struct("<I")  # of the fields and the body
_HEADER_BYTES = _FIELDS.size + _CRC.size
_PROMPT, _ANSWER = 1, 2
_BYTES_PER_TOKEN = {_PROMPT: 4, _ANSWER: 13}  # int32; int32 + float32 + int32 + uint8
_FILE_NAME = re.compile(r"\d{6,}-\d{4,}\.bin")
_ANSWER_DTYPES = {"token_ids": "<i4", "logps": "<f4", "versions": "<i4", "mask": "u1"}


@dataclass(frozen=True, slots=True)
class PayloadRef:
    """Where a record is."""

    file: str
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerArrays:
    token_ids: np.ndarray  # int32 [T]
    logps: np.ndarray  # float32 [T]
    versions: np.ndarray  # int32 [T]
    mask: np.ndarray  # uint8 [T]


def encode_prompt(task: int, prompt_ids: np.ndarray) -> bytes:
    body = _checked(prompt_ids, "<i4", f"task {task}: prompt_ids").tobytes()
    return _record(_PROMPT, task, 0, len(prompt_ids), body)


def encode_answer(completion: Completion) -> bytes:
    """The record of one answer; its four arrays must have one length and the dtypes of `Completion`."""
    name = f"answer {completion.task}[{completion.index}]"
    arrays = {field: np.asarray(getattr(completion, field)) for field in _ANSWER_DTYPES}
    lengths = {field: len(array) for field, array in arrays.items()}
    if len(set(lengths.values())) != 1:
        raise JournalError(f"{name}: arrays of unequal lengths {lengths}; every token needs one entry in each")
    body = b"".join(_checked(arrays[f], dtype, f"{name}: {f}").tobytes() for f, dtype in _ANSWER_DTYPES.items())
    return _record(_ANSWER, completion.task, completion.index, lengths["token_ids"], body)


class PayloadWriter:
    """Appends records to the files of one owner epoch. A record is durable once `sync` has returned."""

    def __init__(self, folder: Path, *, epoch: int, max_file_bytes: int = MAX_FILE_BYTES) -> None:
        self._folder = folder
        self._epoch = epoch
        self._max_file_bytes = max_file_bytes
        self._serial = 0
        self._name = ""
        self._descriptor = -1
        self._size = 0
        self._dirty = False

    def append(self, record: bytes) -> PayloadRef:
        if self._descriptor < 0 or (self._size and self._size + len(record) > self._max_file_bytes):
            self._roll_over()
        ref = PayloadRef(self._name, self._size)
        self._dirty = True
        fault_point("payload_torn", last_act=lambda: os.write(self._descriptor, record[: len(record) // 2]))
        view = memoryview(record)
        while view:  # a write may be short, on a disk that fills up
            written = os.write(self._descriptor, view)
            self._size += written
            view = view[written:]
        fault_point("payload_written")
        return ref

    def sync(self) -> None:
        if self._dirty:
            os.fsync(self._descriptor)
            self._dirty = False

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _roll_over(self) -> None:
        self.sync()
        self.close()
        self._serial += 1
        self._name = f"{self._epoch:06d}-{self._serial:04d}.bin"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
        self._descriptor = os.open(self._folder / self._name, flags, 0o644)
        self._size = 0
        fault_point("payload_file_made")
        sync(self._folder)  # a file whose name is lost with the power holds nothing


def read_prompt(folder: Path, ref: PayloadRef, *, task: int) -> np.ndarray:
    """The prompt's token ids, int32 [P]."""
    num_tokens, body = _read(folder, ref, (_PROMPT, task, 0))
    return np.frombuffer(body, "<i4", num_tokens).astype(np.int32)


def read_answer(folder: Path, ref: PayloadRef, *, task: int, index: int) -> AnswerArrays:
    num_tokens, body = _read(folder, ref, (_ANSWER, task, index))
    arrays: dict[str, np.ndarray] = {}
    start = 0
    for field, dtype in _ANSWER_DTYPES.items():
        # A copy in native order: torch warns about arrays that cannot be written.
        arrays[field] = np.frombuffer(body, dtype, num_tokens, start).astype(np.dtype(dtype).newbyteorder("="))
        start += num_tokens * np.dtype(dtype).itemsize
    return AnswerArrays(**arrays)


def cut_tails(folder: Path, committed: Mapping[str, int]) -> dict[str, int]:
    """Cut every file behind its last committed record, and remove files that hold none.

    Args:
        committed: per file, the offset of the last record that the database knows.

    Returns the number of bytes cut per file. A damaged or missing committed record raises.
    """
    for name in committed:
        if not (folder / name).is_file():
            raise JournalError(f"{folder / name} is missing, and the journal has records in it; restore the file")
    cut: dict[str, int] = {}
    for path in sorted(folder.iterdir()):
        if not _FILE_NAME.fullmatch(path.name):
            continue
        size = path.stat().st_size
        if path.name not in committed:
            path.unlink()
            cut[path.name] = size
            continue
        ref = PayloadRef(path.name, committed[path.name])
        end = ref.offset + _HEADER_BYTES + len(_read(folder, ref, None)[1])
        if size > end:
            os.truncate(path, end)
            cut[path.name] = size - end
    return cut


def _record(kind: int, task: int, index: int, num_tokens: int, body: bytes) -> bytes:
    fields = _FIELDS.pack(_MAGIC, kind, task, index, num_tokens)
    return fields + _CRC.pack(zlib.crc32(body, zlib.crc32(fields))) + body


def _read(folder: Path, ref: PayloadRef, expected: tuple[int, int, int] | None) -> tuple[int, bytes]:
    """Number of tokens and body of the record; `expected` is (kind, task, index), None to accept any."""
    path = folder / ref.file

    def damaged(why: str) -> JournalError:
        return JournalError(
            f"{path} at offset {ref.offset}: {why}; the file is damaged, restore it from a copy, "
            "or start a new run from the last checkpoint"
        )

    try:
        with open(path, "rb") as file:
            file.seek(ref.offset)
            header = file.read(_HEADER_BYTES)
            if len(header) < _HEADER_BYTES:
                raise damaged("the file ends inside a header")
            magic, kind, task, index, num_tokens = _FIELDS.unpack_from(header)
            if magic != _MAGIC or kind not in _BYTES_PER_TOKEN:
                raise damaged("no record starts here")
            body = file.read(num_tokens * _BYTES_PER_TOKEN[kind])
    except FileNotFoundError as error:
        raise damaged("there is no such file") from error
    if len(body) < num_tokens * _BYTES_PER_TOKEN[kind]:
        raise damaged("the file ends inside a record")
    found_crc = zlib.crc32(body, zlib.crc32(header[: _FIELDS.size]))
    (stated_crc,) = _CRC.unpack_from(header, _FIELDS.size)
    if found_crc != stated_crc:
        raise damaged(f"CRC32 {found_crc:08x} instead of {stated_crc:08x}")
    if expected is not None and (kind, task, index) != expected:
        raise damaged(f"record of kind, task, index {(kind, task, index)} instead of {expected}")
    return num_tokens, body


def _checked(array: np.ndarray, dtype: str, name: str) -> np.ndarray:
    """The array in the byte order of the file. Another dtype is refused: a silent cast would change the
    record."""
    array = np.asarray(array)
    wanted = np.dtype(dtype)
    if array.ndim != 1 or array.dtype != wanted.newbyteorder("="):
        raise JournalError(
            f"{name} has dtype {array.dtype} and {array.ndim} dimensions; "
            f"convert it to one dimension of {wanted.newbyteorder('=')} where it is made"
        )
    return array.astype(wanted, copy=False)
