"""Worker processes in virtual time: each takes one call after the other, as an actor does, and any may meet a fault.

    death        the process ends before the work is done          hang    it never goes on
    late_death   ... after it, so that only the answer is lost     pause   it goes on after a while
    idle         it ends some time after an answer                 lost    it works on, and no answer arrives
    start        it cannot be started

A worker that is killed is gone; what it had begun to write may still be written for a while when the driver died
first, since its workers outlive it by up to 15 seconds.
"""

from collections.abc import Callable, Sequence
from typing import Any

from cauce.errors import WorkerError
from cauce.runtime.roles import WorkResult
from cauce.runtime.world import Call, Resources, Worker, WorkerDied
from cauce.simulate.files import Disk
from cauce.simulate.invariants import Witness
from cauce.simulate.roles import ScriptedEngine, ScriptedLearner, ScriptedReward
from cauce.simulate.script import Script
from cauce.types import GenerationRequest

ORPHANS_LIVE_S = 15.0
START_S = {"rollout": (1.0, 30.0), "reward": (0.3, 5.0), "learner": (1.0, 30.0)}
WORK_S = {"rollout": (0.02, 0.6), "reward": (0.005, 1.0), "learner": (0.02, 4.0)}
NETWORK_S = (0.0005, 0.05)
PAUSE_S = (2.0, 115.0)


class _Answer:
    """What a call came to, once it is done."""

    def __init__(self, kwargs: dict[str, Any]) -> None:
        self._requests: Sequence[GenerationRequest] = kwargs.get("requests", ())
        self.is_done = False
        self.value: Any = None
        self.error: Exception | None = None

    def tasks(self) -> set[int]:
        """What it was asked for, and what it has to say, on its way."""
        answered = self.value.completions if isinstance(self.value, WorkResult) else ()
        return {request.task for request in self._requests} | {answer.task for answer in answered}


class _Process:
    def __init__(self, name: str, role: str, script: Any) -> None:
        self.name, self.role, self.script = name, role, script
        self.is_alive, self.hangs = True, False
        self.free_at = 0.0
        self.calls: list[_Answer] = []


class SimulatedWorkers:
    """`Workers` whose processes are events."""

    roles: dict[str, type[Any]] = {  # noqa: RUF012  (a table that a subclass replaces)
        "rollout": ScriptedEngine,
        "reward": ScriptedReward,
        "learner": ScriptedLearner,
    }

    def __init__(self, script: Script, witness: Witness, disk: Disk, *, machine: str) -> None:
        self._script, self._witness, self._disk = script, witness, disk
        self.clock = script.clock
        self._machine = machine
        self._processes: list[_Process] = []

    def start(self, cls: type, *, name: str, role: str, resources: Resources, kwargs: dict[str, Any]) -> Worker:
        self.clock.sleep(self._script.delay(*START_S[role]))
        if self._script.fires(f"{role}_start"):
            self._script.losses[role] += 1
            raise WorkerError(f"{role} {name} did not start within 300 s")
        process = _Process(name, role, self.roles[role](self._script, **kwargs, machine=self._machine))
        self._processes.append(process)
        self._script.log(f"{name} starts")
        return Worker(name=name, role=role, handle=process, node="simulated")

    def call(self, worker: Worker, method: Callable[..., Any], **kwargs: Any) -> Call:
        process: _Process = worker.handle
        self._witness.sees_call(method.__name__, kwargs)
        self._script.log(f"{process.name} <- {method.__name__}{_brief(kwargs)}")
        answer = _Answer(kwargs)
        process.calls.append(answer)
        if process.is_alive:
            start = max(self._network(), process.free_at - self.clock.time)
            self.clock.after(start, lambda: self._begin(process, method.__name__, kwargs, answer))
        else:  # a death that nobody saw counts for the task that is given to the dead, for want of a better knowledge
            self._witness.sees_death(answer.tasks())
            self._fail(process, answer, "it had died before")
        return Call(worker=worker, ref=answer, started=self.clock.monotonic())

    def wait(self, calls: Sequence[Call], *, timeout_s: float) -> list[Call]:
        self.clock.advance(timeout_s, until=lambda: any(call.ref.is_done for call in calls))
        self._witness.sees_turn()
        self.clock.on_wake()
        return [call for call in calls if call.ref.is_done]

    def result(self, call: Call) -> Any:
        answer: _Answer = call.ref
        if answer.error is not None:
            self._script.losses[call.worker.role] += isinstance(answer.error, WorkerDied)
            raise answer.error
        self._witness.sees_result(answer.value)
        if isinstance(answer.value, WorkResult) and answer.value.completions:
            self._script.losses["rollout"] = 0
        return answer.value

    def kill(self, worker: Worker) -> None:
        process: _Process = worker.handle
        if process.is_alive:
            self._script.log(f"{process.name} is killed")
            self._script.losses[process.role] += 1
            self._bury(process)

    def describe_death(self, worker: Worker, cause: str) -> str:
        return f"{worker.role} {worker.name} died: {cause}"

    def end_all(self) -> None:
        for process in self._processes:
            process.is_alive = False

    def outlive_driver(self) -> None:
        """Its workers notice one after the other that the driver is gone."""
        for process in self._processes:
            self.clock.after(self._script.rng.uniform(0, ORPHANS_LIVE_S), lambda p=process: self._end(p))  # type: ignore[misc]

    def _begin(self, process: _Process, name: str, kwargs: dict[str, Any], answer: _Answer) -> None:
        if not process.is_alive or process.hangs:
            return  # the death has failed the call already; a hang never answers
        fires = self._script.fires
        if fires(f"{process.role}_death"):
            if name == "save_checkpoint":
                process.script.tear(**kwargs)
            self._die(process, "the script says so")
        elif fires(f"{process.role}_hang"):
            process.hangs = True
        elif fires(f"{process.role}_pause"):
            pause = self._script.delay(*PAUSE_S)
            process.free_at = self.clock.time + pause
            self.clock.after(pause, lambda: self._work(process, name, kwargs, answer))
        else:
            self._work(process, name, kwargs, answer)

    def _work(self, process: _Process, name: str, kwargs: dict[str, Any], answer: _Answer) -> None:
        if not process.is_alive:
            return
        try:
            if name in ("save_checkpoint", "save_model", "publish"):
                self._disk.require_room()
            answer.value = getattr(process.script, name)(**kwargs)
        except WorkerDied as death:
            self._die(process, str(death))
            return
        except Exception as error:
            self._script.log(f"{process.name} raises {type(error).__name__}")
            answer.error = error
        work = self._script.delay(*WORK_S[process.role])
        process.free_at = max(process.free_at, self.clock.time + work)
        self.clock.after(work, lambda: self._finish(process, answer))

    def _finish(self, process: _Process, answer: _Answer) -> None:
        if not process.is_alive:
            return
        fires = self._script.fires
        if fires(f"{process.role}_late_death"):
            self._die(process, "the script says so, after its work")
        elif not fires(f"{process.role}_lost"):
            self.clock.after(self._network(), lambda: self._arrive(process, answer))
        if fires(f"{process.role}_idle"):
            self.clock.after(self._script.delay(0.1, 60), lambda: self._end(process))

    def _arrive(self, process: _Process, answer: _Answer) -> None:
        if not answer.is_done:
            process.calls.remove(answer)
            answer.is_done = True
            self._script.log(f"{process.name} -> {_outcome(answer)}")

    def _end(self, process: _Process) -> None:
        if process.is_alive:
            self._die(process, "the script says so, between two calls")

    def _die(self, process: _Process, cause: str) -> None:
        self._script.log(f"{process.name} dies: {cause}")
        self._bury(process)
        for answer in process.calls:
            self._fail(process, answer, cause)

    def _bury(self, process: _Process) -> None:
        process.is_alive = False
        if process.role == "rollout":
            self._witness.sees_death({*process.script.held()}.union(*(answer.tasks() for answer in process.calls)))

    def _fail(self, process: _Process, answer: _Answer, cause: str) -> None:
        answer.value = None
        answer.error = WorkerDied(f"{process.role} {process.name} died: {cause}")
        self.clock.after(self._script.delay(0.05, 2.0), lambda: self._arrive(process, answer))

    def _network(self) -> float:
        return self._script.delay(*NETWORK_S)


def _brief(kwargs: dict[str, Any]) -> str:
    shown = {key: kwargs[key] for key in ("version", "plan", "lineage", "cancel") if kwargs.get(key)}
    if kwargs.get("requests"):
        shown["requests"] = [(r.task, r.attempt, *r.indices) for r in kwargs["requests"]]
    return f" {shown}" if shown else ""


def _outcome(answer: _Answer) -> str:
    if answer.error is not None:
        return type(answer.error).__name__
    completions = getattr(answer.value, "completions", None)
    return "done" if completions is None else f"answers {[(c.task, c.index) for c in completions]}"
