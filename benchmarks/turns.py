"""Two processes that take turns, so that only one of them computes at a time. Standard library only.

The conductor holds a `Player` for each process; the process holds `Turns`. Over the process's pipes go lines of JSON:

    process    {"ready": ...}                {"step": ...}   {"step": ...}   {"end": ...}
    conductor                  go            go              go

A process computes only between a "go" and its next line, and waits for "go" once more before it ends.
"""

import json
import os
import select
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from benchmarks.machine import tree_cpu_s

LOG_TAIL = 25


class PlayerFailed(RuntimeError):
    """A process of a measurement ended or fell silent; the text has the end of its log."""


class Turns:
    """The side of the process that is measured."""

    def __init__(self, requests: TextIO, answers: TextIO) -> None:
        self._requests = requests
        self._answers = answers

    @staticmethod
    def from_pipes() -> "Turns":
        """Takes over stdin and stdout; whatever the process prints from now on goes to stderr, its log."""
        answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
        return Turns(sys.stdin, answers)

    def tell(self, kind: str, facts: Mapping[str, Any]) -> None:
        self._answers.write(json.dumps({kind: dict(facts)}) + "\n")
        self._answers.flush()

    def wait(self) -> None:
        """Blocks until it is this process's turn."""
        if not self._requests.readline():
            raise EOFError("the conductor of this measurement has gone")

    def play(self, ready: Mapping[str, Any], *, num_rounds: int, one_round: Callable[[int], Mapping[str, Any]]) -> None:
        """Says that it is ready, plays as many rounds as it is called for, and ends when it is called once more."""
        self.tell("ready", ready)
        for number in range(num_rounds):
            self.wait()
            self.tell("round", one_round(number))
        self.wait()
        self.tell("end", {})


class Player:
    """The conductor's side of one process."""

    def __init__(self, name: str, command: Sequence[str], *, env: Mapping[str, str], cwd: Path, log: Path) -> None:
        self.name = name
        self.started = time.time()
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        with log.open("w", encoding="utf-8") as file:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                env=dict(env),
                cwd=cwd,
            )
        self._pending = b""

    def __enter__(self) -> "Player":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def expect(self, kind: str, *, timeout_s: float) -> dict[str, Any]:
        """The next line, which must be of this kind."""
        line = json.loads(self._line(timeout_s))
        if list(line) != [kind]:
            raise PlayerFailed(f"{self.name} said {line!r} where {kind!r} was expected{self._tail()}")
        facts: dict[str, Any] = line[kind]
        return facts

    def go(self) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(b"go\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise PlayerFailed(f"{self.name} has ended{self._tail()}") from None

    def cpu_s(self) -> float:
        """CPU seconds that the process and its descendants have used so far."""
        return tree_cpu_s(self._process.pid)

    def close(self, *, grace_s: float = 60.0) -> None:
        """Closes the pipes, which makes a waiting process give up, and kills it if it does not."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None and not pipe.closed:
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue  # a "go" that nobody will read
        try:
            self._process.wait(timeout=grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _line(self, timeout_s: float) -> bytes:
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout_s
        descriptor = self._process.stdout.fileno()
        while b"\n" not in self._pending:
            left = deadline - time.monotonic()
            readable, _, _ = select.select([descriptor], [], [], max(0.0, left))
            if not readable:
                raise PlayerFailed(f"{self.name} said nothing for {timeout_s:.0f} s{self._tail()}")
            chunk = os.read(descriptor, 65536)
            if not chunk:
                code = self._process.wait()
                raise PlayerFailed(f"{self.name} ended early with exit code {code}{self._tail()}")
            self._pending += chunk
        line, _, self._pending = self._pending.partition(b"\n")
        return line

    def _tail(self) -> str:
        with self._log.open(encoding="utf-8", errors="replace") as file:
            lines = deque(file, maxlen=LOG_TAIL)
        return f"; the end of {self._log}:\n" + "".join(lines)
