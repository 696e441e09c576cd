"""A session without Ray: the real workers as plain objects of this process, so that whole runs are quick tests.

Everything else is the real thing: `rl.train`, `rl.resume` and `rl.replay`, journal, pools, exchange, trainer, engine
and learner. A test may put a worker class of its own in place of one, to make it fail at a chosen moment, and raises
`Killed` to end a run as a kill of the driver would: nothing after that line happens.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from cauce.journal import Journal
from cauce.metrics.observer import NullObserver
from cauce.recipe.load import load_recipe
from cauce.recipe.models import Recipe
from cauce.runtime.cluster import Cluster
from cauce.runtime.remote_learner import RemoteLearner
from cauce.runtime.roles import LearnerWorker, RewardWorker, RolloutWorker
from cauce.runtime.session import SessionPlan, build_exchange
from cauce.runtime.world import LocalWorkers, SystemClock, Worker
from cauce.stages import fork as fork_module
from cauce.stages import rl
from cauce.stages import run as run_module
from tests.fakes import ROOM

SETTINGS: dict[str, Any] = {
    "run.plans": 3,
    "rollout.max_tokens": 4,
    "rollout.group_size": 4,
    "learner.tasks_per_plan": 2,
    "learner.lr": 1e-2,
    "engine.dtype": "fp32",
    "learner.dtype": "fp32",
    "engine.deterministic": True,
    "engine.slots": 16,
    "eval.every": 0,
    "eval.at_start": False,
    "logging.tensorboard": False,
    "logging.live": False,
}
ROWS = [{"prompt": f"say {i}", "answer": str(i)} for i in range(40)]


class Killed(BaseException):
    """The driver ends here."""


class LocalSession:
    """What a run needs of a session."""

    rollout: type = RolloutWorker
    learner: type = LearnerWorker
    reward_worker: type = RewardWorker
    started: ClassVar[list[str]] = []  # names, in order

    def __init__(
        self,
        plan: SessionPlan,
        *,
        reward: Any,
        on_event: Callable[[str, dict[str, str]], None],
        on_note: Callable[[str], None],
        only_learner: bool = False,
    ) -> None:
        self.plan, self.reward = plan, reward
        self.cluster = Cluster(how="this process", dashboard=None, ours=False, folder=None, reaper=None)
        self.clock, self.workers, self.peak_memory_mb = SystemClock(), LocalWorkers(), 0.0
        self.exchange = build_exchange(
            plan,
            self.workers,
            start_rollout=self._start_rollout,
            start_reward=self._start_reward,
            clock=self.clock,
            only_learner=only_learner,
            on_event=on_event,
            on_note=on_note,
        )
        self.pool, self.rewards = self.exchange.pool, self.exchange.rewards
        self.weights_folder = plan.run_dir / "weights"

    def __enter__(self) -> "LocalSession":
        return self

    def __exit__(self, *error: object) -> None:
        self.pool.shutdown()
        self.rewards.shutdown()

    def fresh_learner(self) -> RemoteLearner:
        worker = self._start(self.learner, "learner", "learner", self.plan.learner_arguments(self.weights_folder))
        return RemoteLearner(self.workers, worker, self.exchange, self.clock, epoch=self.plan.owner_epoch)

    def sample_memory(self, *, every_s: float = 5.0) -> float:
        return 0.0

    def _start_rollout(self, name: str) -> Worker:
        return self._start(self.rollout, name, "rollout", self.plan.rollout_arguments(self.weights_folder))

    def _start_reward(self, name: str) -> Worker:
        return self._start(self.reward_worker, name, "reward", {"reward": self.reward})

    def _start(self, cls: type, name: str, role: str, kwargs: dict[str, Any]) -> Worker:
        self.started.append(name)
        return self.workers.start(cls, name=name, role=role, resources=ROOM, kwargs=kwargs)


def use_local_session(monkeypatch: pytest.MonkeyPatch) -> type[LocalSession]:
    """Puts it in the place of Ray's; on the class returned a test chooses workers of its own."""

    class Local(LocalSession):
        started: ClassVar[list[str]] = []

    for module in (rl, run_module, fork_module):
        monkeypatch.setattr(module, "Session", Local)
    return Local


def local_recipe(model: str | Path, run_dir: Path, **settings: Any) -> Recipe:
    """A tiny run; settings as section__key."""
    named = {key.replace("__", "."): value for key, value in settings.items()}
    pairs = {**SETTINGS, "model.path": model, "run.dir": run_dir.parent, "run.name": run_dir.name, **named}
    given = ("data.train", "data.test", "reward.fn")
    return load_recipe("grpo", [f"{key}={value}" for key, value in pairs.items()], given=given)


def letters(completions: list[Any], **_: Any) -> list[float]:
    """A reward that differs between almost all answers: the sum of their letters, modulo 7."""
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [sum(map(ord, text)) % 7 / 7 for text in texts]


def train_locally(model: str | Path, run_dir: Path, *, reward: Any = letters, **settings: Any) -> dict[str, Any]:
    """A run from its beginning; returns its summary. `rows`, `test_rows` and `observer` go to `rl.train`."""
    own = {key: settings.pop(key) for key in ("test_rows", "observer") if key in settings}
    rows = settings.pop("rows", ROWS)
    return rl.train(local_recipe(model, run_dir, **settings), rows=rows, reward=reward, **own)


def resume_locally(run_dir: Path, *, reward: Any = letters, **given: Any) -> dict[str, Any]:
    return rl.resume(run_dir, reward=reward, **{"rows": ROWS, **given})


def dying(cls: type, method: str, *, call: int, after: bool = False, error: BaseException | None = None) -> type:
    """The class with one method that, at its nth call of all instances together, ends with `error` (`Killed` without
    one), before its work is done or after it."""

    class Dying(cls):
        calls = 0

    def wrapped(self: Any, **kwargs: Any) -> Any:
        Dying.calls += 1
        now = Dying.calls == call
        if now and not after:
            raise error or Killed
        result = getattr(super(Dying, self), method)(**kwargs)
        if now:
            raise error or Killed
        return result

    setattr(Dying, method, wrapped)
    return Dying


class Watcher(NullObserver):
    """Keeps what it is told; `kill_after` ends the run when that plan is recorded and nothing later has happened."""

    def __init__(self, *, kill_after: int = 0) -> None:
        self.kill_after = kill_after
        self.notes: list[str] = []
        self.plans: dict[int, dict[str, float]] = {}
        self.evals: list[tuple[int, float]] = []
        self.ends: list[dict[str, Any]] = []

    def on_note(self, text: str) -> None:
        self.notes.append(text)

    def on_plan(self, plan: int, metrics: dict[str, float]) -> None:
        self.plans[plan] = dict(metrics)
        if plan == self.kill_after:
            raise Killed

    def on_eval(self, plan: int, name: str, accuracy: float) -> None:
        self.evals.append((plan, accuracy))

    def on_end(self, summary: dict[str, Any]) -> None:
        self.ends.append(summary)


def checksums(run_dir: Path) -> list[str | None]:
    """Of the weights after each plan; None for a skipped one."""
    with Journal.read_only(run_dir) as journal:
        return [record.checksum for record in journal.plans()]


def answers(run_dir: Path) -> dict[tuple[int, int], tuple[bytes, bytes]]:
    """Tokens and log-probs of every recorded answer, bit for bit."""
    with Journal.read_only(run_dir) as journal:
        recorded = [c for task in journal.tasks() for c in journal.answers(task)]
    return {(c.task, c.index): (c.token_ids.tobytes(), c.logps.tobytes()) for c in recorded}


def trained_rows(run_dir: Path) -> list[list[str]]:
    """The rows of each plan, by their ids, in the order of the plan."""
    with Journal.read_only(run_dir) as journal:
        return [[journal.task(task).row.id for task in record.plan.tasks] for record in journal.plans()]


def assert_equal_runs(run: Path, straight: Path) -> None:
    """Finished, with the same rows in the same plans, the same answers, and the same bits after every plan."""
    assert checksums(run) == checksums(straight)
    assert trained_rows(run) == trained_rows(straight)
    assert answers(run) == answers(straight)
    with Journal.read_only(run) as journal:
        counts = journal.counts()
        assert counts["trained"] == sum(counts.values()) == sum(len(rows) for rows in trained_rows(straight))
    assert (run / "model" / "model.safetensors").read_bytes() == (straight / "model" / "model.safetensors").read_bytes()
