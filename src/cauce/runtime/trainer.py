"""The trainer: one loop for synchronous and overlapped runs.

    admit and lease tasks -> collect ready groups -> plan (durable) -> score, advantages, forward_backward, optim_step
    -> applied (durable, with the checksum of the new weights) -> publish -> checkpoint -> evaluate

`max_staleness = 0` is synchronous: a plan takes the lowest admission numbers and waits until no lower one is
undecided, so plans do not depend on the number of actors or on the order in which answers arrive. Above 0, generation
goes on while the learner works (`RemoteLearner` waits by turning the exchange). The trainer knows its parts; none of
them knows the trainer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from cauce.algorithms.table import Algorithm
from cauce.errors import TrainingStopped, WeightsError
from cauce.faults import fault_point
from cauce.journal import Buffer, Journal, capacity
from cauce.recipe.models import Recipe
from cauce.runtime.exchange import Exchange
from cauce.runtime.flow import Tally
from cauce.runtime.learn import Learned, LearnerVerbs, learn, make_plan
from cauce.runtime.plan_metrics import PhaseTimer, plan_metrics
from cauce.runtime.recovery import prune_checkpoints
from cauce.runtime.world import WorkerDied
from cauce.types import Group, Plan

Result = TypeVar("Result")

MAX_LEARNER_DEATHS = 3  # at the same piece of work
MAX_NON_FINITE = 3  # plans in a row
MAX_NO_SIGNAL = 10  # plans in a row
PUBLISHED_KEPT = 256  # checksums of versions that an engine may still say it serves; the weight store keeps far fewer


class TrainedLearner(LearnerVerbs, Protocol):
    """The verbs of the learner that the trainer needs beside those of `learn`."""

    def publish(self, *, version: int, lineage: str) -> str: ...

    def save_checkpoint(self, *, run_dir: str, plan: int) -> str: ...

    def save_model(self, *, folder: str) -> None: ...


class TaskFlow(Protocol):
    """What the trainer needs of the desk that groups come from."""

    version: int
    num_answers: int
    tally: Tally

    def admit(self, num: int) -> None: ...

    def restore(self) -> None: ...

    def undecided(self) -> set[int]: ...

    def reset_tally(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebuilt:
    """A learner at the record's newest version, and where that stands."""

    learner: TrainedLearner
    version: int
    lineage: str
    saved: int  # the plan of the newest checkpoint; 0 without one
    redo_s: float  # what redoing the plans after it would take
    took_s: float  # what taking up the record has taken this time


@dataclass(slots=True, kw_only=True)
class Hooks:
    """What the stage around the trainer supplies."""

    rebuild: Callable[[], Rebuilt]
    evaluate: Callable[[int], None]
    on_plan: Callable[[Plan, dict[str, float]], None]
    on_phase: Callable[[str, int, int], None]
    on_note: Callable[[str], None]
    should_stop: Callable[[], bool]
    extra_metrics: Callable[[], dict[str, float]]


class Trainer:
    """Runs plans until the recipe's number is reached or a stop is asked for."""

    def __init__(
        self,
        *,
        recipe: Recipe,
        algorithm: Algorithm,
        journal: Journal,
        buffer: Buffer,
        flow: TaskFlow,
        exchange: Exchange,
        tolerance: float,
        hooks: Hooks,
    ) -> None:
        self.recipe, self.algorithm, self.journal, self.buffer = recipe, algorithm, journal, buffer
        self.flow, self.exchange, self.hooks = flow, exchange, hooks
        self.learner: TrainedLearner
        self.version = journal.last_decided
        self._has_learner = False
        self._saved, self._redo_s = 0, 0.0  # the newest checkpoint's plan, and what redoing those after it would take
        self._tolerance = tolerance
        self._published: dict[int, str] = {}
        self._non_finite = self._no_signal = 0
        self._evaluated = -1
        self.timer = PhaseTimer(exchange=exchange, journal=journal, clock=exchange.clock.monotonic)

    def train(self) -> None:
        """The run, plan by plan. The first learner is made like one in place of another: from the record."""
        self.prune_checkpoints()  # a kill may have come between a record and its pruning
        self.publish()
        self.checkpoint_if_due()  # ... or between the last plan and the checkpoint that it was due
        if self.version == 0 and self.recipe.eval.at_start:
            self.evaluate()
        self.finish_planned()
        self.flow.restore()
        while self.version < self.recipe.run.plans and not self.hooks.should_stop():
            self.timer.start()
            groups = self.collect()
            plan = make_plan(
                self.version + 1,
                [group.task for group in groups],
                epochs=self.recipe.learner.epochs,
                num_mini_batches=self.recipe.learner.mini_batches,
            )
            self.journal.write_plan(plan)
            fault_point("after_planned")
            self.step(plan, groups)
        self.checkpoint_if_due()  # a stop that was asked for while the last plan was evaluated
        if self.version >= self.recipe.run.plans and self._evaluated != self.version:
            self.evaluate_if_due()  # the run had stopped between its last plan and its last evaluation

    def step(self, plan: Plan, groups: list[Group]) -> None:
        """From a recorded plan to published weights. Saved before they are evaluated: an evaluation may fail."""
        learned, checksum = self.train_on(plan, groups)
        fault_point("before_applied")
        self.apply(plan, groups, learned, checksum)
        fault_point("after_applied")
        if plan.number % self.recipe.weights.every == 0:
            self.publish()
        self.check(plan, learned)
        self.checkpoint_if_due()
        self.evaluate_if_due()

    def finish_planned(self) -> None:
        """A plan that was recorded before a stop, and not applied, is trained on exactly as it was recorded."""
        for record in self.journal.plans(from_number=self.version + 1):
            if self.hooks.should_stop():
                return
            self.timer.start()
            groups = [self.journal.group(task) for task in record.plan.tasks]
            self.timer.stop("collect")
            self.step(record.plan, groups)

    def collect(self) -> list[Group]:
        """Admits up to capacity and turns the exchange until a plan's groups are accepted."""
        need, max_staleness = self.recipe.learner.tasks_per_plan, self.recipe.buffer.max_staleness
        total = need * self.recipe.rollout.group_size
        while True:
            self.flow.admit(self._capacity())
            self._drop_stale()
            ready = self.buffer.available(version=self.version, max_staleness=max_staleness)
            if len(ready) >= need and self._is_decided(ready[:need]):
                break
            self._refuse_only_drops(need)
            self.exchange.turn()
            self.timer.note_waiting()
            self.hooks.on_phase("generate", self.flow.num_answers, total)
        self.timer.stop("collect")
        self._check_served()
        tasks = self.buffer.sample(need, version=self.version, max_staleness=max_staleness)
        return [self.journal.group(task) for task in tasks]

    def train_on(self, plan: Plan, groups: list[Group]) -> tuple[Learned, str]:
        """Trains on one plan, and returns what it did with the checksum of the new weights."""
        self.hooks.on_phase("learn", 0, 1)

        def work() -> tuple[Learned, str]:
            learned = learn(self.learner, algorithm=self.algorithm, plan=plan, groups=groups)
            self.timer.stop("learn")
            checksum = self.learner.checksum()
            self.timer.stop("checksum")
            return learned, checksum

        return self._survive(work)

    def apply(self, plan: Plan, groups: list[Group], learned: Learned, checksum: str) -> None:
        """Records what the plan did, before anybody sees the new weights."""
        staleness = self.staleness(groups)
        self.version = plan.number
        self.flow.version = plan.number
        metrics = plan_metrics(groups, learned, staleness=staleness, tally=self.flow.tally)
        metrics |= self.timer.finish() | self.hooks.extra_metrics()
        self._redo_s += metrics["time/learn"]
        if learned.num_skipped and not learned.num_steps:
            self._non_finite += 1
            self.journal.mark_skipped(plan.number, reason="non-finite loss or gradient")
            for task in plan.tasks:
                if task in self.buffer:  # with uses left; the record has ended it
                    self.buffer.remove(task)
        else:
            self._non_finite = 0
            self.journal.mark_applied(plan.number, checksum=checksum, metrics=metrics)
        self._no_signal = 0 if learned.had_signal else self._no_signal + 1
        self.flow.reset_tally()
        self.hooks.on_plan(plan, metrics)

    def publish(self) -> None:
        """Makes the current weights what every engine serves from its next slice on."""

        def publish() -> str:  # timed without the making of a learner that may come before it
            started = self.exchange.clock.monotonic()
            checksum = self.learner.publish(version=self.version, lineage=self.lineage)
            self.timer.carry("sync", self.exchange.clock.monotonic() - started)
            return checksum

        self._published[self.version] = self._survive(publish)
        while len(self._published) > PUBLISHED_KEPT:
            del self._published[min(self._published)]
        self.exchange.pool.serve(self.version, lineage=self.lineage)
        fault_point("after_publish")

    def check(self, plan: Plan, learned: Learned) -> None:
        """Stops a run that only looks as if it trained."""
        if self._non_finite >= MAX_NON_FINITE:
            raise TrainingStopped(
                f"{self._non_finite} plans in a row met a non-finite loss or gradient; the last trained on tasks "
                f"{list(plan.tasks)}. The weights are those before them. Lower learner.lr or learner.max_grad_norm"
            )
        if self._no_signal >= MAX_NO_SIGNAL:
            raise TrainingStopped(
                f"{self._no_signal} plans in a row carried no signal: every group had equal rewards. Make the tasks "
                "easier or harder, raise rollout.group_size, or look at the reward with `cauce check`"
            )
        if self.is_on_policy and learned.first_log_ratio > self._tolerance:
            raise TrainingStopped(
                f"plan {plan.number}: sampler and learner disagree: mean |log ratio| {learned.first_log_ratio:.2e} is "
                f"above {self._tolerance:.0e} for engine.dtype={self.recipe.engine.dtype!r} and "
                f"learner.dtype={self.recipe.learner.dtype!r}. Try fp32 for both"
            )

    @property
    def is_on_policy(self) -> bool:
        """Whether every group was sampled from the weights that it trains."""
        return self.recipe.buffer.max_staleness == 0 and self.recipe.buffer.max_reuse == 1

    def staleness(self, groups: Sequence[Group]) -> int:
        """Of a plan that is about to be trained on: versions between the learner and its oldest token."""
        return max(self.version - oldest_version(group) for group in groups)

    def evaluate_if_due(self) -> None:
        every = self.recipe.eval.every
        is_last = self.version >= self.recipe.run.plans
        if is_last or (every and self.version % every == 0):
            if self.version not in self._published:  # weights.every had skipped it; what is evaluated is this version
                self.publish()
            self.evaluate()

    def evaluate(self) -> None:
        """Of the weights that engines serve."""
        started = self.exchange.clock.monotonic()
        self.hooks.evaluate(self.version)
        self._evaluated = self.version
        self.timer.carry("eval", self.exchange.clock.monotonic() - started)

    def checkpoint_if_due(self) -> None:
        """Due by count, or when redoing what came since the last one would take too long; always at the end."""
        settings = self.recipe.checkpoint
        due = self.version % settings.every == 0 if settings.every else self._redo_s >= settings.max_redo_s
        due = due or self.version >= self.recipe.run.plans or self.hooks.should_stop()
        if due and self._saved != self.version:
            self.journal.check_owner()
            started = self.exchange.clock.monotonic()
            self.hooks.on_phase("checkpoint", 0, 1)
            run_dir = self.journal.run_dir.absolute()  # workers may live in another folder than the driver
            path = self._survive(lambda: self.learner.save_checkpoint(run_dir=str(run_dir), plan=self.version))
            fault_point("checkpoint_saved")
            self.journal.record_checkpoint(self.version, path)
            fault_point("checkpoint_recorded")
            self._saved, self._redo_s = self.version, 0.0
            self.prune_checkpoints()
            self.timer.carry("checkpoint", self.exchange.clock.monotonic() - started)

    def prune_checkpoints(self) -> None:
        """Leaves the newest that are to be kept."""
        prune_checkpoints(self.journal.run_dir.absolute(), self.journal, keep=self.recipe.checkpoint.keep)

    def save_model(self, folder: str) -> None:
        """The weights alone, for whoever goes on with them."""
        self._survive(lambda: self.learner.save_model(folder=folder))

    def _survive(self, act: Callable[[], Result]) -> Result:
        """Does something with the learner. Where there is none, or it dies of this or while it is rebuilt, one is
        made from checkpoint and record first."""
        for deaths in range(1, MAX_LEARNER_DEATHS + 1):
            try:
                if not self._has_learner:
                    self._take(self.hooks.rebuild())
                return act()
            except WorkerDied as death:
                self._has_learner = False
                self.journal.event("learner_died", {"version": self.version, "cause": str(death)})
                if deaths == MAX_LEARNER_DEATHS:
                    raise
                self.hooks.on_note(f"{death}\nThe learner is rebuilt from the newest checkpoint and the record.")
        raise AssertionError("unreachable: the last death is raised")

    def _take(self, rebuilt: Rebuilt) -> None:
        self._has_learner = True
        self.learner, self.lineage = rebuilt.learner, rebuilt.lineage  # its history may be a new one
        self.version = self.flow.version = rebuilt.version
        self._saved, self._redo_s = rebuilt.saved, rebuilt.redo_s
        self.timer.stop("rebuild")  # counted apart: a plan's learning time is that of the learner that has learned it
        self.journal.event("learner_ready", {"version": self.version, "saved": self._saved, "redo_s": rebuilt.took_s})

    def _capacity(self) -> int:
        """What staleness allows, and no more than the buffer can take: with reuse a plan uses up fewer tasks than
        a version makes room for."""
        occupancy = self.journal.occupancy()
        allowed = capacity(
            max_staleness=self.recipe.buffer.max_staleness,
            version=max(self._published, default=self.version),  # what engines sample from; weights.every may lag
            groups_per_plan=self.recipe.learner.tasks_per_plan,
            **occupancy,
        )
        return min(allowed, self.buffer.capacity - self.buffer.size - occupancy["running"])

    def _is_decided(self, tasks: tuple[int, ...]) -> bool:
        """Synchronous plans wait for every lower-numbered task, so that they never depend on arrival."""
        if self.recipe.buffer.max_staleness > 0:
            return True
        last = max(tasks)
        return not any(task < last for task in self.flow.undecided())

    def _drop_stale(self) -> None:
        for task in self.buffer.stale(version=self.version, max_staleness=self.recipe.buffer.max_staleness):
            self.buffer.remove(task)
            self.journal.drop(task, "stale", detail=f"at version {self.version}")

    def _refuse_only_drops(self, need: int) -> None:
        """Generating for ever without a group to train on is a hang with a busy machine."""
        drops = {reason: count for reason, count in self.flow.tally.drops.items() if reason != "too_long"}
        if self.flow.tally.aborted:
            drops["too_long"] = self.flow.tally.aborted
        if sum(drops.values()) < MAX_NO_SIGNAL * need:
            return
        counted = ", ".join(f"{count} {reason}" for reason, count in sorted(drops.items()))
        failure = f" The first failure: {self.flow.tally.first_failure}." if self.flow.tally.first_failure else ""
        raise TrainingStopped(
            f"since plan {self.version} too many groups were dropped ({counted}), so nothing is left to train on."
            f"{failure} no_signal: make the tasks easier or harder, raise rollout.group_size or rollout.temperature. "
            "unscorable: look at the reward with `cauce check`"
        )

    def _check_served(self) -> None:
        """What the engines say they serve must be, by content, what the learner published."""
        for worker, (version, found) in self.exchange.served.items():
            stated = self._published.get(version)
            if stated is not None and stated != found:
                raise WeightsError(f"{worker} serves version {version} with content {found}, published was {stated}")


def oldest_version(group: Group) -> int:
    """The oldest policy version that any token of the group was sampled from."""
    return min(int(s.completion.versions.min()) for s in group.samples if len(s.completion.versions))
