"""The plain classes that run in worker processes: rollout, learner, reward. No Ray in here.

    RolloutWorker  engine; pulls weights by itself when the version it is asked for is not the one it has
    LearnerWorker  learner and the publishing side of the weight store
    RewardWorker   the user's reward, in a process of its own: never in the engine's, never in the driver's

A call whose effect others see - answers, published weights, a checkpoint - carries the owner epoch, and is refused if
that is older than the newest one the worker has seen: a driver that was cut off and replaced cannot go on commanding
workers. A learner also looks who owns the run folder before it puts a checkpoint there.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from cauce import spans
from cauce.errors import FencedError
from cauce.faults import fault_point
from cauce.journal.owner import refuse_older
from cauce.runtime.process import give_back_memory
from cauce.runtime.slices import Slice
from cauce.types import Batch, Completion, GenerationRequest, Group, Row, ScoredBatch

# Of freed memory a learner keeps from one step to the next, for each token of a micro-batch; their number is what a
# user says of the memory that a step may take.
KEPT_MB_PER_TOKEN = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkResult:
    """What a rollout worker has to say after one slice of work."""

    completions: tuple[Completion, ...]
    progress: dict[int, int]  # tokens made so far for each task it still works on
    num_tokens: int  # made in this slice
    num_steps: int = 0  # of the engine in this slice
    busy_s: float  # spent generating
    sync_s: float  # spent pulling weights
    version: int
    checksum: str  # of the weights it serves; empty for those it was born with
    is_idle: bool


class Epoch:
    """The newest owner epoch a worker has seen."""

    def __init__(self) -> None:
        self._newest = 0

    def check(self, epoch: int) -> None:
        if epoch < self._newest:
            raise FencedError(f"owner epoch {epoch} is over; this worker serves epoch {self._newest}")
        self._newest = epoch


class RolloutWorker:
    """Generates. It works only inside `work`, in slices, so that its driver hears from it every `seconds`."""

    _engine_pulls = False  # whether the engine reads the weight store by itself

    def __init__(
        self,
        *,
        model_path: str,
        dtype: str,
        slots: int,
        deterministic: bool,
        compiled: bool,
        weights_folder: str,
        lineage: str,
        backend: str = "native",
        gpus: float = 0.0,
    ) -> None:
        from cauce.weights.store import WeightStore

        self._engine: Any
        if backend == "vllm":
            from cauce.engine.vllm_engine import VllmEngine

            self._engine = VllmEngine(model_path, dtype=dtype, slots=slots, compiled=compiled, gpu_share=gpus or 1.0)
            self._engine_pulls = True
        else:
            from cauce.engine.probe import probed_engine
            from cauce.models.load import load_model, resolve_dtype

            model = load_model(model_path, dtype=resolve_dtype(dtype), attention="sdpa")
            self._engine = probed_engine(model, slots=slots, deterministic=deterministic, compiled=compiled)
            self._engine.release_unpacked()
        self._store = WeightStore(Path(weights_folder), keep=1)
        self._epoch = Epoch()
        self._checksum = ""
        self._version = -1  # what it was born with counts as no version: the first work pulls
        self._lineage = lineage

    def work(
        self,
        *,
        epoch: int,
        version: int,
        requests: Sequence[GenerationRequest],
        cancel: Sequence[int],
        seconds: float,
        lineage: str = "0",
    ) -> WorkResult:
        """Takes requests on, generates for up to `seconds` or until idle, and returns the answers that ended."""
        self._epoch.check(epoch)
        for task in cancel:
            self._engine.cancel(task)
        sync_s = self._pull(version) if (lineage, version) != (self._lineage, self._version) else 0.0
        for request in requests:
            self._engine.submit(request)
        started = time.perf_counter()
        work = Slice(self._engine)
        done: list[Completion] = []
        while not self._engine.is_idle and time.perf_counter() - started < seconds:
            done += work.step()
            fault_point("mid_decode")
        busy_s = time.perf_counter() - started
        work.finish(answers=len(done))
        if self._engine.is_idle:
            give_back_memory()  # what prefill and decode have let go of; the learner is next
        return WorkResult(
            completions=tuple(done),
            progress=self._engine.progress(),
            num_tokens=work.num_tokens,
            num_steps=work.num_steps,
            busy_s=busy_s,
            sync_s=sync_s,
            version=self._version,
            checksum=self._checksum,
            is_idle=self._engine.is_idle,
        )

    def status(self) -> dict[str, Any]:
        return dict(self._engine.status()) | {"version": self._version, "checksum": self._checksum}

    def _pull(self, version: int) -> float:
        started = time.perf_counter()
        if self._engine_pulls:
            with spans.span("load_state", version=version):
                received = self._engine.pull(self._store.folder, version)
            lineage, checksum = received.lineage, received.checksum
        else:
            with spans.span("pull", version=version):
                published = self._store.pull(version)
            lineage, checksum = published.lineage, published.checksum
            with spans.span("load_state", version=version):
                self._engine.load_state(published.tensors, version=version, lineage=lineage)
            del published
        self._version, self._lineage, self._checksum = version, lineage, checksum
        give_back_memory()
        return time.perf_counter() - started


class LearnerWorker:
    """The learner behind the verbs a group of ranks would have, plus publishing."""

    def __init__(
        self,
        *,
        model_path: str,
        algorithm: Any,
        settings: Any,
        temperature: float,
        total_steps: int,
        seed: int,
        weights_folder: str,
        weights_keep: int,
        publish_dtype: str,
    ) -> None:
        import torch

        from cauce.learner.learner import Learner
        from cauce.models.load import load_model, resolve_dtype
        from cauce.weights.store import WeightStore

        torch.manual_seed(seed)
        model = load_model(model_path, dtype=torch.float32, attention="sdpa")
        self._tokenizer = model.tokenizer
        self._learner = Learner(
            model, algorithm=algorithm, settings=settings, temperature=temperature, total_steps=total_steps
        )
        self._store = WeightStore(Path(weights_folder), keep=weights_keep)
        self._publish_dtype = resolve_dtype(publish_dtype)
        self._kept_mb = KEPT_MB_PER_TOKEN * settings.token_budget
        self._epoch = Epoch()

    def score(self, *, groups: Sequence[Group], proximal: bool) -> ScoredBatch:
        return self._learner.score(groups, proximal=proximal)

    def forward_backward(self, *, batch: Batch) -> dict[str, float]:
        metrics = self._learner.forward_backward(batch)
        give_back_memory(beyond_mb=self._kept_mb)
        return metrics

    def optim_step(self) -> dict[str, float]:
        return self._learner.optim_step()

    def checksum(self) -> str:
        return self._learner.checksum()

    def publish(self, *, epoch: int, version: int, lineage: str) -> str:
        self._epoch.check(epoch)
        digest = self._store.publish(self._learner.weights(self._publish_dtype), version=version, lineage=lineage)
        give_back_memory(beyond_mb=self._kept_mb)
        return digest

    def save_checkpoint(self, *, epoch: int, run_dir: str, plan: int) -> str:
        """Older ones are left alone: they go when the driver has recorded this one."""
        from cauce import checkpoint

        self._epoch.check(epoch)
        folder = Path(run_dir)
        refuse = partial(refuse_older, folder, epoch=epoch)
        give_back_memory()  # files are put together in memory before they are written
        path = str(checkpoint.save(folder, plan=plan, learner=self._learner, before_rename=refuse))
        give_back_memory()
        return path

    def load_checkpoint(self, *, path: str) -> None:
        self._learner.load(Path(path))

    def save_model(self, *, folder: str) -> None:
        from cauce import checkpoint

        checkpoint.write_beside(Path(folder), self._learner.save_model)

    def status(self) -> dict[str, Any]:
        return dict(self._learner.status()) | {"fingerprint": numeric_fingerprint(self._learner)}


def numeric_fingerprint(learner: Any) -> dict[str, str]:
    """What the bits of an update depend on beside weights, samples and recipe."""
    import torch
    import transformers

    import cauce

    status = learner.status()
    return {
        "cauce": cauce.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": str(torch.get_num_threads()),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "bf16_instructions": _bf16_instructions(),
        "dtype": status["dtype"],
        "packing": status["packing"],
        "kernels": status["kernels"],
        "ranks": "1",
    }


def _bf16_instructions() -> str:
    """Which of the instructions that multiply bf16 this CPU has; torch tells two of them, by private names."""
    import torch

    probes = {"avx512_bf16": "_is_avx512_bf16_supported", "amx": "_is_amx_tile_supported"}
    return "+".join(name for name, probe in probes.items() if hasattr(torch.cpu, probe) and getattr(torch.cpu, probe)())


class RewardWorker:
    """Scores answers with the user's reward."""

    def __init__(self, *, reward: Any) -> None:
        self._reward = reward

    def score(
        self,
        *,
        rows: Sequence[Row],
        texts: Sequence[str],
        token_ids: Sequence[Sequence[int]],
        step: int,
        max_steps: int,
    ) -> Any:
        return self._reward.score(rows=rows, texts=texts, token_ids=token_ids, step=step, max_steps=max_steps)

    def score_many(self, *, jobs: Sequence[dict[str, Any]]) -> list[Any]:
        """Several groups in one call, each scored by itself: a call costs more than most rewards do."""
        return [self.score(**job) for job in jobs]
