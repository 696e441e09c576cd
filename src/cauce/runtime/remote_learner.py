"""The learner's verbs from the driver's side. While a verb runs, rollouts go on: the wait is a turn of the exchange.

A verb that takes longer than `HANG_S` is treated as a death, as is a lost process: both raise WorkerDied, and the
trainer rebuilds the learner from the newest checkpoint and the record.
"""

from collections.abc import Callable, Sequence
from typing import Any

from cauce.runtime.exchange import Exchange
from cauce.runtime.roles import LearnerWorker
from cauce.runtime.world import Clock, Worker, WorkerDied, Workers
from cauce.types import Batch, Group, ScoredBatch

HANG_S = 3600.0


class RemoteLearner:
    """Blocks the driver's caller, never the rollouts."""

    def __init__(self, workers: Workers, worker: Worker, exchange: Exchange, clock: Clock, *, epoch: int) -> None:
        self._workers = workers
        self.worker = worker
        self._exchange = exchange
        self._clock = clock
        self._epoch = epoch

    def score(self, groups: Sequence[Group], *, proximal: bool) -> ScoredBatch:
        result: ScoredBatch = self._wait(LearnerWorker.score, groups=tuple(groups), proximal=proximal)
        return result

    def forward_backward(self, batch: Batch) -> dict[str, float]:
        return dict(self._wait(LearnerWorker.forward_backward, batch=batch))

    def optim_step(self) -> dict[str, float]:
        return dict(self._wait(LearnerWorker.optim_step))

    def checksum(self) -> str:
        return str(self._wait(LearnerWorker.checksum))

    def publish(self, *, version: int, lineage: str) -> str:
        return str(self._wait(LearnerWorker.publish, epoch=self._epoch, version=version, lineage=lineage))

    def save_checkpoint(self, *, run_dir: str, plan: int) -> str:
        return str(self._wait(LearnerWorker.save_checkpoint, epoch=self._epoch, run_dir=run_dir, plan=plan))

    def load_checkpoint(self, *, path: str) -> None:
        self._wait(LearnerWorker.load_checkpoint, path=path)

    def save_model(self, *, folder: str) -> None:
        self._wait(LearnerWorker.save_model, folder=folder)

    def status(self) -> dict[str, Any]:
        return dict(self._wait(LearnerWorker.status))

    def _wait(self, method: Callable[..., Any], **kwargs: Any) -> Any:
        call = self._workers.call(self.worker, method, **kwargs)
        while not self._exchange.turn(extra=[call]):
            if self._clock.monotonic() - call.started > HANG_S:
                self._workers.kill(self.worker)
                raise WorkerDied(f"the learner's {method.__name__} took over {HANG_S:.0f} s; its stack is in its log")
        return self._workers.result(call)
