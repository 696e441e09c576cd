"""RUN/trace-N.json: the timeline of one start of a run, to open in https://ui.perfetto.dev or chrome://tracing.

The Trace Event Format, as a JSON array: one process per actor, one thread ("lane") per kind of work, so that no two
spans of a lane overlap. N is the owner epoch: each start of a run has its file, and none is ever changed later.
Whole lines are written, a comma before each but the first: after a crash the file lacks only its "]", without
which both viewers open it. At most 64 KiB or one second of events are held in memory.

Clocks: times are the monotonic clock of the driver's machine, which its other processes share. A worker on another
machine is shifted by an offset between two bounds: no call begins before it was sent, and none ends after its reply
was there. Each call narrows them; the middle is used, and half of what is left between them is the accuracy.
"""

import json
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cauce import spans
from cauce.metrics.observer import NullObserver, RunInfo
from cauce.spans import Event, Reply

FLUSH_BYTES = 1 << 16
FLUSH_S = 1.0
DRIVER = "driver"
ORDER = ("driver", "learner", "rollout", "reward")  # of processes, from above


class TraceWriter(NullObserver):
    """Listens to this process's spans from its making to `on_end`, and marks what an observer is told."""

    def __init__(self, run_dir: Path, *, number: int) -> None:
        self.path = Path(run_dir) / f"trace-{number}.json"
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self._lock = threading.Lock()  # workers are started in threads of their own
        self._origin, self._flushed = spans.now(), spans.now()
        self._buffer: list[str] = []
        self._size = self._num_events = 0
        self._spent_s = 0.0
        self._actors: dict[str, int] = {}
        self._lanes: dict[tuple[str, str], int] = {}
        self._bounds: dict[str, tuple[float, float]] = {}  # of the offset of a worker on another machine
        self._put("began", "M", DRIVER, args={"unix_s": time.time()})
        self._flush()  # the file is one to open from now on
        spans.listen(self)

    def event(self, event: Event) -> None:
        self._take(DRIVER, [event], 0.0)

    def reply(self, actor: str, reply: Reply, *, sent: float, is_here: bool) -> None:
        """Events of a worker, with the reply to a call that was sent at `sent`, driver's clock."""
        offset = 0.0 if is_here else self._offset(actor, reply, sent=sent, received=spans.now())
        self._take(actor, list(reply.events), offset)

    def lost(self, actor: str, *, sent: float) -> None:
        self._take(actor, [Event("span", "lost", sent, spans.now(), {})], 0.0)

    def on_start(self, info: RunInfo) -> None:
        spans.mark("start", run=info.recipe_name, cluster=info.cluster)

    def on_note(self, text: str) -> None:
        spans.mark("note", text=text[:500])

    def on_plan(self, plan: int, metrics: Mapping[str, float]) -> None:
        spans.mark(f"plan {plan}", staleness=metrics.get("staleness/max"), reward=metrics.get("reward/mean"))

    def on_eval(self, plan: int, name: str, accuracy: float) -> None:
        spans.mark(f"evaluated version {plan}", set=name, accuracy=accuracy)

    def on_end(self, summary: Mapping[str, Any]) -> None:
        """Completes the file. Its last event says what the timeline itself has cost."""
        if self._file < 0:
            return
        spans.listen(None)
        with self._lock:
            args = {"seconds": round(self._spent_s, 4), "events": self._num_events, "status": summary.get("status")}
            accuracy = {a: round((high - low) / 2, 6) for a, (low, high) in self._bounds.items()}
            self._put("trace", "M", DRIVER, args={**args, "clock_accuracy_s": accuracy})
            self._flush()
            os.write(self._file, b"\n]\n")
            os.close(self._file)
            self._file = -1

    def _take(self, actor: str, events: list[Event], offset: float) -> None:
        began = spans.now()
        with self._lock:
            if self._file < 0:
                return
            for event in events:
                self._add(actor, event, offset)
            if self._size >= FLUSH_BYTES or began - self._flushed > FLUSH_S:
                self._flush()
            self._spent_s += spans.now() - began

    def _add(self, actor: str, event: Event, offset: float) -> None:
        at: dict[str, Any] = {"ts": self._micros(event.start + offset)}
        if event.kind == "span":
            at["dur"] = round(self._micros(event.end + offset) - at["ts"], 1)
            self._put(event.name, "X", actor, lane=event.name, args=event.args, **at)
        elif event.kind == "count":
            self._put(event.name, "C", actor, args=event.args, **at)
        else:
            self._put(event.name, "i", actor, lane="events", args=event.args, s="p", **at)

    def _put(self, name: str, phase: str, actor: str, *, args: Mapping[str, Any], lane: str = "", **more: Any) -> None:
        pid = self._pid(actor)
        more |= {"tid": self._tid(actor, lane)} if lane else {}
        self._line({"name": name, "ph": phase, "pid": pid, **more, **({"args": args} if args else {})})

    def _pid(self, actor: str) -> int:
        if actor not in self._actors:
            pid = self._actors[actor] = len(self._actors) + 1
            role = actor.split("-")[0]
            place = ORDER.index(role) if role in ORDER else len(ORDER)
            self._line({"name": "process_name", "ph": "M", "pid": pid, "args": {"name": actor}})
            self._line({"name": "process_sort_index", "ph": "M", "pid": pid, "args": {"sort_index": 100 * place + pid}})
        return self._actors[actor]

    def _tid(self, actor: str, lane: str) -> int:
        if (actor, lane) not in self._lanes:
            tid = self._lanes[actor, lane] = len(self._lanes) + 1
            named = {"ph": "M", "pid": self._actors[actor], "tid": tid}
            self._line({"name": "thread_name", **named, "args": {"name": lane}})
            self._line({"name": "thread_sort_index", **named, "args": {"sort_index": tid}})
        return self._lanes[actor, lane]

    def _line(self, event: Mapping[str, Any]) -> None:
        text = ("[\n" if not self._num_events else ",\n") + json.dumps(event, separators=(",", ":"), default=str)
        self._num_events += 1
        self._size += len(text)
        self._buffer.append(text)

    def _flush(self) -> None:
        os.write(self._file, "".join(self._buffer).encode())
        self._buffer, self._size, self._flushed = [], 0, spans.now()

    def _micros(self, moment: float) -> float:
        return round((moment - self._origin) * 1e6, 1)

    def _offset(self, actor: str, reply: Reply, *, sent: float, received: float) -> float:
        """Driver's clock minus the worker's."""
        low, high = self._bounds.get(actor, (float("-inf"), float("inf")))
        low, high = max(low, sent - reply.began), min(high, received - reply.ended)
        self._bounds[actor] = low, high
        return (low + high) / 2
