"""The native engine: continuous batching over a slot cache, on transformers' own decoder models.

A request's prompt is prefilled once; its samples share its keys and values, and decode one token per step
together with whatever else is live. Llama-like models run in the lean forward of lean.py, others in their own.
Samples join and leave between steps. A sample's random numbers belong to (run seed, task, index), every token
carries the version of the weights that drew it, and no prompt is used under other weights than it was prefilled
with. With `deterministic` every shape that a sample's arithmetic sees depends on that sample alone, so that it
comes out bitwise the same whatever shares its batch.

Left out on purpose: top-p and top-k (their log-probs are not the policy's), beams, and prompts shared between
requests.
"""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from cauce.engine.attention import ENGINE_ATTENTION, PLAN, AttentionPlan, DecodePlan, PrefillPlan
from cauce.engine.cache import RowCache
from cauce.engine.kernel_plan import KernelPlan
from cauce.engine.kernels import SUFFIXES, load_kernels
from cauce.engine.layout import decode_layout
from cauce.engine.lean import LeanDecoder
from cauce.engine.prepack import pack_linears
from cauce.engine.requests import check_request
from cauce.engine.sampling import Sampler
from cauce.engine.slots import OpenRequest, PromptState, SlotTable, aborted
from cauce.engine.state import check_state
from cauce.errors import ModelError
from cauce.models.forward import vocabulary_size
from cauce.models.load import LoadedModel, parameter_names
from cauce.types import Completion, GenerationRequest

PREFILL_TOKENS = 1024  # prompts prefilled in one forward; a longer prompt goes alone
ROW_STEP = 8  # decode batches are rounded up, so that few shapes occur


class NativeEngine:
    """Generates for many requests at once with one model; not thread-safe, one owner steps it."""

    def __init__(self, model: LoadedModel, *, slots: int, deterministic: bool = False, compiled: bool = True) -> None:
        """`compiled`: in the kernels of kernels.py where there are any, else in torch's own operations alone."""
        if slots < 1:
            raise ModelError(f"engine.slots {slots}: at least 1 sample must fit")
        self.version = 0
        self.lineage = ""
        self._loaded = model
        self._model = model.model.eval()
        self._model.set_attn_implementation(ENGINE_ATTENTION)
        kernels, self._why_no_kernels = load_kernels() if compiled else (None, "switched off")
        if self._model.device.type != "cpu" or self._model.dtype not in SUFFIXES:
            kernels, self._why_no_kernels = None, f"none for {self._model.dtype} on {self._model.device}"
        self._lean = LeanDecoder.of(self._model, rows=slots, kernels=kernels)
        self._packed = [] if self._lean else pack_linears(self._model, rows=slots)
        self._shapes = {name: p.shape for name, p in self._model.named_parameters() if p.requires_grad}
        self._is_released = False
        self._deterministic = deterministic
        self._table = SlotTable(slots)
        self._prompts, self._answers = RowCache(), RowCache()
        self._kernels = kernels
        self._sampler = Sampler(kernels)
        self._queue: deque[OpenRequest] = deque()  # requests with indices that wait for a slot
        self._open: list[OpenRequest] = []  # requests not completed yet
        self._aborted: list[Completion] = []  # answers that could not start, given out by the next step
        self._seconds = {"prefill": 0.0, "decode": 0.0, "sample": 0.0, "other": 0.0}
        self._num_sampled = self._num_prefilled = self._num_steps = 0

    @property
    def is_idle(self) -> bool:
        """Nothing waits, nothing runs and nothing is left to be given out."""
        return not self._open and not self._aborted

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request. A prompt that fills the context yields aborted answers without tokens."""
        self._check(request)
        room = self._loaded.context_length - len(request.prompt_ids)
        if room < 1:
            self._aborted += [aborted(request, index) for index in request.indices]
            return
        stop_ids = {*request.sampling.stop_token_ids, *self._loaded.eos_token_ids}
        entry = OpenRequest(
            request=request,
            limit=min(request.sampling.max_tokens, room),
            stop_ids=np.array(sorted(stop_ids), dtype=np.int64),
            waiting=list(request.indices),
        )
        self._open.append(entry)
        self._queue.append(entry)

    def step(self) -> list[Completion]:
        """Admit what fits, draw one token for every live sample, and return the answers that ended."""
        started, before = time.perf_counter(), sum(self._seconds.values())
        done, self._aborted = self._aborted, []
        with torch.inference_mode():
            done += self._admit()
            if self._table.is_live.any():
                if not self._deterministic:
                    self._compact()
                done += self._decode()
        self._open = [entry for entry in self._open if not entry.is_done]
        self._num_steps += 1
        self._seconds["other"] += time.perf_counter() - started - (sum(self._seconds.values()) - before)
        return done

    def generate(self, requests: Iterable[GenerationRequest]) -> list[Completion]:
        """Run until idle and return all answers, in the order of requests and indices."""
        asked = list(requests)
        for request in asked:
            self.submit(request)
        done = {}
        while not self.is_idle:
            done.update({(c.task, c.index): c for c in self.step()})
        wanted = [(request.task, index) for request in asked for index in request.indices]
        return [done[key] for key in wanted]

    def cancel(self, task: int, indices: Sequence[int] | None = None) -> None:
        """Forget a task, or some of its samples; they produce no completion."""

        def is_meant(index: int) -> bool:
            return indices is None or index in indices

        for entry in self._open:
            if entry.request.task == task:
                entry.waiting = [index for index in entry.waiting if not is_meant(index)]
        for row in np.flatnonzero(self._table.is_live):
            owner = self._table.owner[row]
            if owner is not None and owner.request.task == task and is_meant(int(self._table.index[row])):
                self._table.free(int(row))
        self._aborted = [c for c in self._aborted if c.task != task or not is_meant(c.index)]
        self._open = [entry for entry in self._open if not entry.is_done]
        self._queue = deque(entry for entry in self._queue if entry.waiting)

    def progress(self) -> dict[int, int]:
        """Tokens made so far for each task in flight, its finished answers included."""
        tokens: dict[int, int] = {}
        for entry in self._open:
            tokens[entry.request.task] = tokens.get(entry.request.task, 0) + entry.num_finished_tokens
        for row in np.flatnonzero(self._table.is_live):
            owner = self._table.owner[row]
            assert owner is not None
            tokens[owner.request.task] += int(self._table.made[row])
        return tokens

    def load_state(self, tensors: Mapping[str, Tensor], *, version: int, lineage: str) -> None:
        """Take new weights between steps; samples in flight go on with them. On an error nothing changes."""
        parameters = {name: p for name, p in self._model.named_parameters() if p.requires_grad}
        assert tuple(parameters) == parameter_names(self._model)
        check_state(self._shapes, tensors, f"version {version} of lineage {lineage!r}")
        with torch.no_grad():
            for name, parameter in parameters.items():
                if parameter.numel():  # else only its packed form is kept
                    parameter.copy_(tensors[name])
        if self._lean is not None:
            self._lean.repack({parameter: tensors[name] for name, parameter in parameters.items()})
        for layer in self._packed:
            layer.repack()
        self.version, self.lineage = version, lineage

    @property
    def vocabulary(self) -> int:
        return vocabulary_size(self._model)

    @property
    def dtype(self) -> torch.dtype:
        return self._model.dtype

    def release_unpacked(self) -> None:
        """Gives back the memory of weights that generation reads in packed form only; ends `plain_model`."""
        if self._lean is not None:
            self._lean.release_unpacked()
            self._is_released = True

    @contextmanager
    def plain_model(self, attention: str) -> Iterator[PreTrainedModel]:
        """The model as it was without this engine, while nothing is stepped: its attention and linear layers."""
        if self._is_released:
            raise ModelError("the engine has given back the unpacked weights; use a model loaded for itself")
        for layer in self._packed:
            layer.forward = partial(nn.Linear.forward, layer)  # type: ignore[method-assign]
        self._model.set_attn_implementation(attention)
        try:
            yield self._model
        finally:
            self._model.set_attn_implementation(ENGINE_ATTENTION)
            for layer in self._packed:
                del layer.forward  # uncovers the class's own

    def status(self) -> dict[str, Any]:
        """Facts for a person or a metric: load, memory, work done and where the seconds went."""
        return {
            "version": self.version,
            "lineage": self.lineage,
            "deterministic": self._deterministic,
            "slots": self._table.slots,
            "live": int(self._table.is_live.sum()),
            "waiting": sum(len(entry.waiting) for entry in self._open),
            "steps": self._num_steps,
            "sampled_tokens": self._num_sampled,
            "prefilled_tokens": self._num_prefilled,
            "cache_mb": (self._prompts.num_bytes + self._answers.num_bytes) / 2**20,
            "forward": "lean" if self._lean else "model",
            "kernels": self._why_no_kernels or "compiled",
            "packed_layers": len(self._packed),
            "seconds": dict(self._seconds),
        }

    def _check(self, request: GenerationRequest) -> None:
        running = {
            (owner.request.task, int(self._table.index[row])) for row, owner in enumerate(self._table.owner) if owner
        }
        running |= {(entry.request.task, index) for entry in self._open for index in entry.waiting}
        check_request(request, running=running, vocabulary=self._model.get_input_embeddings().num_embeddings)

    def _admit(self) -> list[Completion]:
        """Seat waiting samples in free slots, prefill their prompts and draw their first tokens."""
        free = np.flatnonzero(~self._table.is_live).tolist()
        seats: list[tuple[OpenRequest, list[int]]] = []
        while free and self._queue:
            entry = self._queue[0]
            rows, free = free[: len(entry.waiting)], free[len(entry.waiting) :]
            seats.append((entry, rows))
            if len(rows) == len(entry.waiting):
                self._queue.popleft()
        if not seats:
            return []
        self._prefill([entry for entry, _ in seats])
        started = time.perf_counter()
        for entry, rows in seats:
            assert entry.prompt is not None
            staged, length = entry.prompt.row, len(entry.request.prompt_ids)
            for row in rows:
                if self._deterministic:
                    self._prompts.move([staged], [row], length)
                self._table.place(row, entry, entry.waiting.pop(0), prompt_row=row if self._deterministic else staged)
        self._seconds["prefill"] += time.perf_counter() - started
        return self._draw_first(seats)

    def _draw_first(self, seats: list[tuple[OpenRequest, list[int]]]) -> list[Completion]:
        """Draw the first token of newly seated samples; the samples of a prompt share its row of logits."""
        done: list[Completion] = []
        groups = [[seat] for seat in seats] if self._deterministic else [seats]
        for group in groups:
            prompts = [entry.prompt for entry, _ in group]
            logits_RV = torch.stack([prompt.logits_V for prompt in prompts if prompt is not None])
            temperature_R = np.array([entry.request.sampling.temperature for entry, _ in group])
            rows = np.concatenate([np.array(rows) for _, rows in group])
            row_N = np.repeat(np.arange(len(group)), [len(rows) for _, rows in group])
            done += self._draw(logits_RV, temperature_R, row_N, rows)
        for entry, _ in seats:
            if not entry.waiting:
                entry.prompt = None
        return done

    def _prefill(self, entries: list[OpenRequest]) -> None:
        """Run the prompts that have no valid state through the model, several packed in one row."""
        made_with = (self.lineage, self.version)
        todo = [entry for entry in entries if entry.prompt is None or entry.prompt.made_with != made_with]
        started = time.perf_counter()
        while todo:
            batch = [todo.pop(0)]
            num_tokens = len(batch[0].request.prompt_ids)
            while todo and not self._deterministic and num_tokens + len(todo[0].request.prompt_ids) <= PREFILL_TOKENS:
                num_tokens += len(todo[0].request.prompt_ids)
                batch.append(todo.pop(0))
            lengths = [len(entry.request.prompt_ids) for entry in batch]
            ends = np.cumsum(lengths)
            plan = PrefillPlan(lengths=lengths)
            logits_RV = self._forward(
                np.concatenate([entry.request.prompt_ids for entry in batch])[None],
                np.concatenate([np.arange(length) for length in lengths])[None],
                plan,
                keep=torch.from_numpy(ends - 1),
            )[0]
            if not plan.keys:
                raise ModelError(
                    f"{type(self._model).__name__} does not attend through transformers' interface, "
                    "so the native engine cannot run it"
                )
            free = self._free_prompt_rows()
            slots = self._table.slots
            self._answers.reserve(slots, max(entry.limit for entry in batch), plan.keys, plan.values)
            self._prompts.reserve(
                max(free[len(batch) - 1] + 1, slots if self._deterministic else 0), max(lengths), plan.keys, plan.values
            )
            for number, (entry, end, length) in enumerate(zip(batch, ends, lengths, strict=True)):
                part = slice(end - length, end)
                keys, values = (
                    {layer: made[:, part] for layer, made in table.items()} for table in (plan.keys, plan.values)
                )
                self._prompts.write(free[number], keys, values)
                entry.prompt = PromptState(made_with=made_with, row=free[number], logits_V=logits_RV[number])
            self._num_prefilled += num_tokens
        self._seconds["prefill"] += time.perf_counter() - started

    def _decode(self) -> list[Completion]:
        """One token for every live sample."""
        table = self._table
        live = np.flatnonzero(table.is_live)
        num_rows = table.slots if self._deterministic else min(table.slots, -(-len(live) // ROW_STEP) * ROW_STEP)
        started = time.perf_counter()
        plan: AttentionPlan | KernelPlan
        if self._kernels is not None and self._lean is not None and self._lean.attends_in_kernel:
            plan = KernelPlan.of(self._kernels, table, num_rows, prompts=self._prompts, answers=self._answers)
        else:
            device = self._model.device
            layout = decode_layout(table, num_rows, live, deterministic=self._deterministic, device=device)
            plan = DecodePlan(prompts=self._prompts, answers=self._answers, layout=layout)
        position_S = table.prompt_length[:num_rows] + table.length[:num_rows]
        logits_SV = self._forward(table.last_token[:num_rows, None], position_S[:, None], plan, keep=0)[:, 0]
        self._seconds["decode"] += time.perf_counter() - started
        table.length[live] += 1
        if not self._deterministic:
            logits_SV = logits_SV[: len(live)]
        return self._draw(logits_SV, table.temperature[: len(logits_SV)], live, live)

    def _free_prompt_rows(self) -> list[int]:
        """Rows of the prompts' cache that nobody reads, the lowest first; as many as prompts can wait."""
        used = set(self._table.prompt_row[self._table.is_live].tolist())
        used |= {entry.prompt.row for entry in self._open if entry.prompt is not None and entry.waiting}
        first = self._table.slots if self._deterministic else 0  # below it each slot has its own
        return [row for row in range(first, first + len(used) + self._table.slots) if row not in used]

    def _draw(
        self, logits_RV: Tensor, temperature_R: np.ndarray, row_N: np.ndarray, slots_N: np.ndarray
    ) -> list[Completion]:
        """Draw one token for each of these slots and record it."""
        started = time.perf_counter()
        tokens, logps = self._sampler.draw(logits_RV, temperature_R, row_N, self._table.next_uniform(slots_N))
        done = self._table.record(slots_N, tokens, logps, self.version)
        self._num_sampled += len(tokens)
        self._seconds["sample"] += time.perf_counter() - started
        return done

    def _forward(
        self, ids: np.ndarray, positions: np.ndarray, plan: AttentionPlan | KernelPlan, *, keep: Tensor | int
    ) -> Tensor:
        """The model's own forward and head, attending by `plan`; logits of the positions `keep` (0: all)."""
        if self._lean is not None:
            return self._lean(self._tensor(ids), self._tensor(positions), plan, keep=keep)
        return self._model(
            input_ids=self._tensor(ids),
            position_ids=self._tensor(positions),
            use_cache=False,
            logits_to_keep=keep if isinstance(keep, int) else keep.to(self._model.device),
            **{PLAN: plan},
        ).logits

    def _compact(self) -> None:
        """Move live samples from the highest rows into free lower ones: the batch is the first rows."""
        is_live = self._table.is_live
        num_live = int(is_live.sum())
        sources = (np.flatnonzero(is_live[num_live:]) + num_live).tolist()
        targets = np.flatnonzero(~is_live[:num_live]).tolist()
        if not sources:
            return
        self._answers.move(sources, targets, int(self._table.length[sources].max()))
        for source, target in zip(sources, targets, strict=True):
            self._table.move(source, target)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64)).to(self._model.device)
