"""Workers as Ray actors.

Restarts are owned by the pool: `max_restarts` stays 0, because Ray restarts without a pause and without the current
weights. Every worker writes RUN/logs/<name>.log, from which a death is explained: role, node, exit, last lines, memory.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayError, RayTaskError

from cauce import spans
from cauce.errors import CauceError, WorkerError
from cauce.runtime.process import enter_worker, process_state, resident_megabytes
from cauce.runtime.world import Call, Resources, Worker, WorkerDied

START_TIMEOUT_S = 300.0
LAST_LINES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Interpreter:
    """Another Python than this one, for the workers of a role."""

    python: Path
    source: Path  # a folder that holds the package cauce and nothing else, for its PYTHONPATH


class RayWorkers:
    """Starts plain classes as Ray actors and calls their methods."""

    def __init__(
        self, *, log_folder: Path, env: dict[str, str], interpreters: Mapping[str, Interpreter] | None = None
    ) -> None:
        """`interpreters`: by role; a role that is not named runs in the Python of this process."""
        self._log_folder = log_folder
        self._env = env
        self._interpreters = interpreters or {}

    def start(self, cls: type, *, name: str, role: str, resources: Resources, kwargs: dict[str, Any]) -> Worker:
        """Creates the actor and waits for its constructor.

        Raises:
            CauceError: of the kind that the constructor raised on purpose, with the worker's name and log.
            WorkerError: where it failed in any other way.
        """
        threads = str(resources.threads)
        env = self._env | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        runtime_env: dict[str, Any] = {"env_vars": env}
        if (other := self._interpreters.get(role)) is not None:
            runtime_env = {"py_executable": str(other.python), "env_vars": env | {"PYTHONPATH": str(other.source)}}
        options: dict[str, Any] = {"num_cpus": resources.cpus, "num_gpus": resources.gpus, "max_restarts": 0}
        if resources.memory_bytes:
            options["memory"] = resources.memory_bytes
        actor_class: Any = ray.remote(_shell(cls)).options(**options, runtime_env=runtime_env, max_concurrency=1)
        handle = actor_class.remote(
            shell_log=str(self._log_folder / f"{name}.log"),
            shell_threads=resources.threads,
            shell_traced=spans.listener() is not None,
            **kwargs,
        )
        worker = Worker(name=name, role=role, handle=handle)
        try:
            facts = ray.get(handle.shell_facts.remote(), timeout=START_TIMEOUT_S)
        except GetTimeoutError:
            self.kill(worker)
            raise WorkerError(
                f"{role} {name} did not start within {START_TIMEOUT_S:.0f} s; see {self._log_folder}/{name}.log"
            ) from None
        except RayTaskError as error:  # its constructor's own word
            refusal = error.cause
            text = self.describe_death(worker, f"{type(refusal).__name__}: {refusal}")
            self.kill(worker)
            raise (type(refusal) if isinstance(refusal, CauceError) else WorkerError)(text) from None
        except RayError as error:  # its constructor, its process, its node, or no node that has room
            text = self.describe_death(worker, _cause(error))
            self.kill(worker)
            raise WorkerError(text) from None
        worker.pid, worker.node, worker.facts = facts["pid"], facts["node"], facts
        return worker

    def call(self, worker: Worker, method: Callable[..., Any], **kwargs: Any) -> Call:
        started = time.monotonic()
        if spans.listener() is None:
            ref = getattr(worker.handle, method.__name__).remote(**kwargs)
        else:
            ref = worker.handle.shell_call.remote(shell_method=method.__name__, **kwargs)
        return Call(worker=worker, ref=ref, started=started)

    def wait(self, calls: Sequence[Call], *, timeout_s: float) -> list[Call]:
        if not calls:
            return []
        by_ref = {call.ref: call for call in calls}
        ready, _ = ray.wait(list(by_ref), num_returns=1, timeout=timeout_s)
        if ready and len(by_ref) > 1:  # take whatever else is there too
            ready, _ = ray.wait(list(by_ref), num_returns=len(by_ref), timeout=0)
        return [by_ref[ref] for ref in ready]

    def result(self, call: Call) -> Any:
        try:
            value = ray.get(call.ref)
        except RayTaskError as error:
            if isinstance(error.cause, CauceError):
                raise error.cause from None  # its own words, without the worker's traceback
            raise error.as_instanceof_cause() from None
        except RayError as error:
            # Out of memory, a lost node, result or connection: the process may live on, and would keep its successor's
            # room.
            if not isinstance(error, ActorDiedError):
                ray.kill(call.worker.handle, no_restart=True)
            if (listener := spans.listener()) is not None:
                listener.lost(call.worker.name, sent=call.started)
            raise WorkerDied(self.describe_death(call.worker, _cause(error))) from None
        if not isinstance(value, spans.Reply):
            return value
        if (listener := spans.listener()) is not None:
            is_here = call.worker.node == os.uname().nodename
            listener.reply(call.worker.name, value, sent=call.started, is_here=is_here)
        return value.value

    def kill(self, worker: Worker) -> None:
        is_here = worker.node == os.uname().nodename and worker.pid
        if is_here:
            _dump_stack(worker.pid)
        ray.kill(worker.handle, no_restart=True)
        if is_here and process_state(worker.pid) == "T":  # Ray asks a process to end, which this one would never hear
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGKILL)

    def describe_death(self, worker: Worker, cause: str) -> str:
        """Role, node, cause, memory when last seen, and the last lines of its own log."""
        log = self._log_folder / f"{worker.name}.log"
        lines = log.read_text(errors="replace").splitlines()[-LAST_LINES:] if log.exists() else []
        tail = "".join(f"\n    | {line}" for line in lines) or " (its log is empty)"
        memory = worker.facts.get("last_memory_mb")
        seen = f", memory when last seen {memory:.0f} MB" if memory else ""
        return f"{worker.role} {worker.name} on {worker.node or 'its node'} died: {cause}{seen}; last lines:{tail}"

    def note_memory(self, worker: Worker) -> None:
        """Remembers how much memory a worker of this machine holds, for the day it dies."""
        if worker.pid and worker.node == os.uname().nodename:
            worker.facts["last_memory_mb"] = resident_megabytes(worker.pid)


def _cause(error: Exception) -> str:
    text = str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if isinstance(error, ActorDiedError) and getattr(error, "actor_init_failed", False):
        return lines[-1] if lines else "its constructor failed"
    known = [line for line in lines if "exit" in line.lower() or "killed" in line.lower() or "OOM" in line]
    return (known or lines or ["no cause given"])[0][:400]


def _dump_stack(pid: int) -> None:
    """Asks the process to write its stacks into its log (see enter_worker); it may be gone already."""
    try:
        os.kill(pid, signal.SIGUSR1)
        time.sleep(0.05)
    except ProcessLookupError:
        return


def _shell(cls: type) -> type:
    """The plain class with what each process needs at birth: threads, a log, and a pid to be found by."""

    class Shell(cls):
        def __init__(self, *, shell_log: str, shell_threads: int, shell_traced: bool, **kwargs: Any) -> None:
            enter_worker(log=Path(shell_log), threads=shell_threads)
            self.shell_spans = spans.Keeper()
            spans.listen(self.shell_spans if shell_traced else None)
            self.shell_refusal: CauceError | None = None
            try:
                super().__init__(**kwargs)
            except CauceError as error:  # kept until asked for: of a constructor that raises, Ray tells only the text
                self.shell_refusal = error

        def shell_facts(self) -> dict[str, Any]:
            if self.shell_refusal is not None:
                raise self.shell_refusal
            return {"pid": os.getpid(), "node": os.uname().nodename}

        def shell_call(self, *, shell_method: str, **kwargs: Any) -> spans.Reply:
            """The method as a span, with what was recorded meanwhile. Where it raises, the next reply has that."""
            began = spans.now()
            with spans.span(shell_method):
                value = getattr(self, shell_method)(**kwargs)
            return spans.Reply(value, began, spans.now(), self.shell_spans.take())

    Shell.__name__ = Shell.__qualname__ = cls.__name__
    return Shell
