"""The host side of the slots: which sample sits in which row, what it has made so far, and when it ends.

Everything per slot is a column of a NumPy array, so that a step costs a few vector operations whatever the
number of slots. A row's key/value cache lies beside it in cache.py under the same number.
"""

from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from cauce.engine.sampling import uniforms
from cauce.types import Completion, FinishReason, GenerationRequest

HOST_COLUMNS = ("index", "prompt_row", "prompt_length", "length", "made", "limit", "last_token")
NO_TOKEN = -1  # fills unused places among the stop tokens; no vocabulary has it


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptState:
    """A prefilled prompt: where its keys and values lie, and the logits of its last position."""

    made_with: tuple[str, int]  # (lineage, version) of the weights; worthless under any other
    row: int  # of the prompts' cache
    logits_V: Tensor


@dataclass(slots=True, kw_only=True, eq=False)
class OpenRequest:
    """A request with what of it is still to be done."""

    request: GenerationRequest
    limit: int  # tokens per sample, within the model's context
    stop_ids: np.ndarray  # int64
    waiting: list[int]  # indices without a slot yet, in order
    num_running: int = 0
    num_finished_tokens: int = 0
    prompt: PromptState | None = None

    @property
    def is_done(self) -> bool:
        """Nothing waits and nothing runs."""
        return not self.waiting and self.num_running == 0


def aborted(request: GenerationRequest, index: int) -> Completion:
    """The answer to a prompt that leaves no room for one."""
    return Completion(
        task=request.task,
        index=index,
        attempt=request.attempt,
        token_ids=np.zeros(0, dtype=np.int32),
        logps=np.zeros(0, dtype=np.float32),
        versions=np.zeros(0, dtype=np.int32),
        mask=np.zeros(0, dtype=np.uint8),
        finish_reason="aborted",
    )


@dataclass(slots=True)
class SlotTable:
    """Columns over S slots; the two-dimensional ones grow with the longest answer asked for."""

    slots: int
    owner: list[OpenRequest | None] = field(init=False)
    index: np.ndarray = field(init=False)  # of the sample within its task
    prompt_row: np.ndarray = field(init=False)  # of the prompts' cache
    prompt_length: np.ndarray = field(init=False)
    length: np.ndarray = field(init=False)  # tokens of the answer in the key/value cache
    made: np.ndarray = field(init=False)  # tokens sampled
    limit: np.ndarray = field(init=False)
    last_token: np.ndarray = field(init=False)
    temperature: np.ndarray = field(init=False)
    is_live: np.ndarray = field(init=False)
    stop_ids: np.ndarray = field(init=False)  # [S, K]
    tokens: np.ndarray = field(init=False)  # [S, T], as are the next three
    logps: np.ndarray = field(init=False)
    versions: np.ndarray = field(init=False)
    uniform: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        slots = self.slots
        self.owner = [None] * slots
        for name in HOST_COLUMNS:
            setattr(self, name, np.zeros(slots, dtype=np.int64))
        self.temperature = np.ones(slots)
        self.is_live = np.zeros(slots, dtype=bool)
        self.stop_ids = np.full((slots, 1), NO_TOKEN, dtype=np.int64)
        self.tokens = np.zeros((slots, 0), dtype=np.int32)
        self.logps = np.zeros((slots, 0), dtype=np.float32)
        self.versions = np.zeros((slots, 0), dtype=np.int32)
        self.uniform = np.zeros((slots, 0), dtype=np.float64)

    def place(self, row: int, owner: OpenRequest, index: int, *, prompt_row: int) -> None:
        """Seat one sample of a request, whose prompt is in the cache, in a free row."""
        request, sampling = owner.request, owner.request.sampling
        self._grow(owner.limit, len(owner.stop_ids))
        self.owner[row], self.index[row], self.is_live[row] = owner, index, True
        self.prompt_row[row], self.prompt_length[row] = prompt_row, len(request.prompt_ids)
        self.length[row], self.made[row], self.limit[row] = 0, 0, owner.limit
        self.temperature[row] = sampling.temperature
        self.stop_ids[row] = NO_TOKEN
        self.stop_ids[row, : len(owner.stop_ids)] = owner.stop_ids
        self.uniform[row, : owner.limit] = uniforms(sampling.seed, request.task, index, owner.limit)
        owner.num_running += 1

    def next_uniform(self, rows: np.ndarray) -> np.ndarray:
        """The uniform number that each row's next token is drawn with."""
        return self.uniform[rows, self.made[rows]]

    def record(self, rows: np.ndarray, tokens: np.ndarray, logps: np.ndarray, version: int) -> list[Completion]:
        """Append one token to each row; rows that end with it are freed and come back as completions."""
        made = self.made[rows]
        self.tokens[rows, made], self.logps[rows, made], self.versions[rows, made] = tokens, logps, version
        self.made[rows] = made + 1
        self.last_token[rows] = tokens
        has_stopped = (self.stop_ids[rows] == tokens[:, None]).any(1)
        is_full = made + 1 >= self.limit[rows]
        ended = np.flatnonzero(has_stopped | is_full)
        return [self._finish(int(rows[i]), "stop" if has_stopped[i] else "length") for i in ended]

    def free(self, row: int) -> None:
        """Empty a row; its lengths of 0 keep a dead row of the batch cheap and finite."""
        owner = self.owner[row]
        assert owner is not None
        owner.num_running -= 1
        self.owner[row] = None
        self.is_live[row] = False
        self._clear(row)

    def move(self, source: int, target: int) -> None:
        """Seat the sample of one row in another, free one."""
        self.owner[target], self.owner[source] = self.owner[source], None
        for column in (*(getattr(self, name) for name in HOST_COLUMNS), self.temperature):
            column[target] = column[source]
        self.is_live[target], self.is_live[source] = True, False
        for table in (self.stop_ids, self.tokens, self.logps, self.versions, self.uniform):
            table[target] = table[source]
        self._clear(source)

    def _clear(self, row: int) -> None:
        for name in HOST_COLUMNS:
            getattr(self, name)[row] = 0
        self.temperature[row] = 1.0

    def _finish(self, row: int, reason: FinishReason) -> Completion:
        owner, made = self.owner[row], int(self.made[row])
        assert owner is not None
        completion = Completion(
            task=owner.request.task,
            index=int(self.index[row]),
            attempt=owner.request.attempt,
            token_ids=self.tokens[row, :made].copy(),
            logps=self.logps[row, :made].copy(),
            versions=self.versions[row, :made].copy(),
            mask=np.ones(made, dtype=np.uint8),
            finish_reason=reason,
        )
        owner.num_finished_tokens += made
        self.free(row)
        return completion

    def _grow(self, num_tokens: int, num_stops: int) -> None:
        def widen(table: np.ndarray, width: int, fill: int) -> np.ndarray:
            extra = max(0, width - table.shape[1])
            return np.pad(table, ((0, 0), (0, extra)), constant_values=fill) if extra else table

        self.stop_ids = widen(self.stop_ids, num_stops, NO_TOKEN)
        self.tokens, self.logps = widen(self.tokens, num_tokens, 0), widen(self.logps, num_tokens, 0)
        self.versions, self.uniform = widen(self.versions, num_tokens, 0), widen(self.uniform, num_tokens, 0)
