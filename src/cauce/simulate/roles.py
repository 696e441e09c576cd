"""The only fakes of a simulation: an engine, a learner and a reward, deterministic and cheap.

The learner's weights are a chain of hashes over what it was trained on, in order, so that one sample lost, repeated or
reordered gives other weights. An answer's tokens are a hash of weights, task and index, so that other weights give
other answers. Weight store and checkpoints are the real ones.
"""

import hashlib
import json
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cauce import checkpoint
from cauce.environments.single_turn import RenderedPrompt
from cauce.rewards.reward import RewardResult
from cauce.runtime.roles import Epoch, WorkResult
from cauce.runtime.world import WorkerDied
from cauce.simulate.script import Script
from cauce.types import Batch, Completion, GenerationRequest, Group, Outcome, Row, ScoredBatch
from cauce.weights.store import WeightStore

TRAITS = {"plain": 1, "long": 2, "aborts": 3, "poison": 4, "non_finite": 5}
STOP = 0


class Words:
    """The environment: the first token of a prompt says its row's trait, an answer's text is its numbers."""

    def render(self, row: Row) -> RenderedPrompt:
        trait = str(row.columns["trait"])
        length = 9 if trait == "long" else 2 + _draw(row.id) % 4
        ids = [TRAITS[trait], *(_draw(row.id, i) % 1000 for i in range(length))]
        return RenderedPrompt(text=row.id, token_ids=np.asarray(ids, dtype=np.int32))

    def answer_text(self, token_ids: np.ndarray, eos_ids: Iterable[int]) -> str:
        return " ".join(str(int(token)) for token in token_ids if int(token) not in set(eos_ids))


@dataclass(slots=True, eq=False)
class _Answer:
    request: GenerationRequest
    index: int
    length: int
    ends: bool  # with the stop token; by length otherwise
    tokens: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


class ScriptedEngine:
    """A rollout worker. What it says is a function of its weights; how much it says in a slice is drawn."""

    def __init__(self, script: Script, *, weights_folder: str, lineage: str, **_: Any) -> None:
        self._script = script
        self._store = WeightStore(Path(weights_folder), keep=1)
        self._epoch = Epoch()
        self._lineage, self._version, self._checksum = lineage, -1, ""
        self._open: deque[_Answer] = deque()

    def work(
        self,
        *,
        epoch: int,
        version: int,
        requests: Sequence[GenerationRequest],
        cancel: Sequence[int],
        seconds: float,
        lineage: str,
    ) -> WorkResult:
        self._epoch.check(epoch)
        self._open = deque(answer for answer in self._open if answer.request.task not in cancel)
        if (lineage, version) != (self._lineage, self._version):
            published = self._store.pull(version)
            self._version, self._lineage, self._checksum = version, published.lineage, published.checksum
        self._open.extend(self._begin(request, index) for request in requests for index in request.indices)
        if any(answer.request.prompt_ids[0] == TRAITS["poison"] for answer in self._open):
            raise WorkerDied("a prompt that kills engines")
        num_tokens, done = 0, []
        for _ in range(self._script.rng.randint(1, 24)):
            if not self._open:
                break
            answer = self._open.popleft()
            if answer.request.prompt_ids[0] != TRAITS["aborts"]:
                self._step(answer)
                num_tokens += 1
            if len(answer.tokens) < answer.length:
                self._open.append(answer)
            else:
                done.append(_completion(answer))
        return WorkResult(
            completions=tuple(done),
            progress={answer.request.task: len(answer.tokens) for answer in self._open},
            num_tokens=num_tokens,
            busy_s=0.1,
            sync_s=0.0,
            version=self._version,
            checksum=self._checksum,
            is_idle=not self._open,
        )

    def held(self) -> list[int]:
        """Tasks that it is at."""
        return sorted({answer.request.task for answer in self._open})

    def _begin(self, request: GenerationRequest, index: int) -> _Answer:
        aborts = request.prompt_ids[0] == TRAITS["aborts"]
        longest = request.sampling.max_tokens
        wanted = 1 + _draw(request.sampling.seed, request.task, index) % (longest + 1)
        return _Answer(request, index, 0 if aborts else min(wanted, longest), wanted <= longest)

    def _step(self, answer: _Answer) -> None:
        position = len(answer.tokens)
        is_last = position + 1 == answer.length and answer.ends
        drawn = _draw(self._checksum, answer.request.sampling.seed, answer.request.task, answer.index, position)
        answer.tokens.append(STOP if is_last else 1 + drawn % 1000)
        answer.versions.append(self._version)


class ScriptedLearner:
    """The learner's worker."""

    def __init__(
        self, script: Script, *, weights_folder: str = "", weights_keep: int = 1, machine: str = "0", **_: Any
    ) -> None:
        self._script = script
        self._store = WeightStore(Path(weights_folder), keep=weights_keep)
        self._machine = machine
        self._epoch = Epoch()
        self.weights = hashlib.sha256(b"initial weights").digest()
        self.trained: list[list[int]] = []  # the tasks of each optimizer step
        self._gradient: tuple[list[int], bytes | None] | None = None  # None in the second place: not finite

    def score(self, *, groups: Sequence[Group], proximal: bool) -> ScoredBatch:
        logps = tuple(tuple(s.completion.logps for s in group.samples) for group in groups) if proximal else None
        return ScoredBatch(groups=tuple(groups), proximal_logps=logps, reference_logps=None)

    def forward_backward(self, *, batch: Batch) -> dict[str, float]:
        digest = hashlib.sha256(self.weights + self._machine.encode())
        for s in batch.sequences:
            for array in (s.prompt_ids, s.token_ids, s.mask, s.advantages, s.behaviour_logps):
                digest.update(array.tobytes())
        tasks = list(dict.fromkeys(int(s.group) for s in batch.sequences))
        is_finite = not any(s.prompt_ids[0] == TRAITS["non_finite"] for s in batch.sequences)
        self._gradient = (tasks, digest.digest() if is_finite else None)
        return {"loss/total": 0.0, "sampler/log_ratio_abs_mean": 0.0}

    def optim_step(self) -> dict[str, float]:
        assert self._gradient is not None
        (tasks, gradient), self._gradient = self._gradient, None
        if gradient is None:
            return {"optim/skipped": 1.0, "optim/step": len(self.trained)}
        self.trained.append(tasks)
        self.weights = hashlib.sha256(self.weights + gradient).digest()
        return {"optim/skipped": 0.0, "optim/step": len(self.trained), "optim/grad_norm": 1.0}

    def checksum(self) -> str:
        return self.weights.hex()[:32]

    def publish(self, *, epoch: int, version: int, lineage: str) -> str:
        self._epoch.check(epoch)
        tensor = torch.from_numpy(np.frombuffer(self.weights, dtype=np.uint8).copy())
        return self._store.publish({"weights": tensor}, version=version, lineage=lineage)

    def save_checkpoint(self, *, epoch: int, run_dir: str, plan: int) -> str:
        self._epoch.check(epoch)
        return str(checkpoint.save(Path(run_dir), plan=plan, learner=self))

    def save(self, folder: Path) -> None:
        state = {"weights": self.weights.hex(), "trained": self.trained}
        (folder / "state.json").write_text(json.dumps(state))

    def tear(self, *, run_dir: str, plan: int, **_: Any) -> None:
        """What a death in the middle of a save leaves: files beside, and at worst the one it replaces half removed."""
        folder = Path(run_dir) / "checkpoints" / f"plan_{plan:06d}"
        beside = folder.with_name(f"{folder.name}.tmp-1")
        beside.mkdir(parents=True, exist_ok=True)
        (beside / "state.json").write_text("{")
        if folder.exists() and self._script.rng.random() < 0.5:
            (folder / checkpoint.MARKER).unlink(missing_ok=True)

    def load_checkpoint(self, *, path: str) -> None:
        state = json.loads((Path(path) / "state.json").read_text())
        self.weights, self.trained = bytes.fromhex(state["weights"]), state["trained"]

    def save_model(self, *, folder: str) -> None:
        checkpoint.write_beside(Path(folder), self.save)

    def status(self) -> dict[str, Any]:
        return {"fingerprint": {"threads": "1", "machine": self._machine}}


class ScriptedReward:
    """The reward's worker: a function of the text, which raises now and then."""

    def __init__(self, script: Script, **_: Any) -> None:
        self._script = script

    def score(self, *, rows: Sequence[Row], texts: Sequence[str], **_: Any) -> RewardResult:
        raises = self._script.fires("reward_raises")
        outcomes = [
            _FAILED if raises else expected_outcome(row.id, text) for row, text in zip(rows, texts, strict=True)
        ]
        return RewardResult(outcomes=outcomes, metrics={})

    def score_many(self, *, jobs: Sequence[dict[str, Any]]) -> list[RewardResult]:
        return [self.score(**job) for job in jobs]


_FAILED = Outcome(status="failed", value=None, parts={}, detail="ValueError: raised by the script")


def expected_outcome(row: str, text: str) -> Outcome:
    """What the reward says unless a fault comes in between."""
    drawn = _draw("reward", row, text)
    if drawn % 16 == 0:
        return Outcome(status="abstained", value=None, parts={}, detail="")
    value = (drawn >> 8) % 3 / 2
    return Outcome(status="scored", value=value, parts={"words": value}, detail="")


def _completion(answer: _Answer) -> Completion:
    n = len(answer.tokens)
    return Completion(
        task=answer.request.task,
        index=answer.index,
        attempt=answer.request.attempt,
        token_ids=np.asarray(answer.tokens, dtype=np.int32),
        logps=np.asarray([-(token % 7) for token in answer.tokens], dtype=np.float32),
        versions=np.asarray(answer.versions, dtype=np.int32),
        mask=np.ones(n, dtype=np.uint8),
        finish_reason="aborted" if not n else "stop" if answer.ends else "length",
    )


def _draw(*parts: object) -> int:
    """A number that depends on nothing but its arguments."""
    text = " ".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
