"""One run of the stage `rl`, from wherever its record stands to its end: the trainer with its hooks, and the files that
it leaves in the run folder.

    RUN/recipe.toml journal.db payloads/ checkpoints/ model/ metrics.jsonl summary.json eval/ tensorboard/ logs/
"""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cauce.errors import TrainingStopped, WorkerError
from cauce.journal import Buffer, Journal, JournalReader
from cauce.metrics.observer import Observer, Observers, RunInfo
from cauce.metrics.summary import build_summary, environment, eval_stats, read_eval
from cauce.metrics.tensorboard import TensorBoardWriter
from cauce.metrics.writer import MetricsWriter, read_metrics
from cauce.runtime.evaluation import Evaluation, write_records
from cauce.runtime.flow import FlowSettings, RolloutFlow
from cauce.runtime.recovery import rebuild
from cauce.runtime.session import Session, SessionPlan
from cauce.runtime.trainer import MAX_LEARNER_DEATHS, Hooks, Rebuilt, Trainer, oldest_version
from cauce.stages.prepare import Prepared
from cauce.stages.stopping import StopSwitch
from cauce.types import Group, Plan


def run(
    prepared: Prepared, journal: Journal, run_dir: Path, observer: Observer, parts: "Parts | None" = None
) -> dict[str, Any]:
    """A run from wherever its record stands to its end."""
    parts = parts or Parts(session=Session)
    began = time.time()
    writer = MetricsWriter(run_dir)
    writer.restore({r.plan.number: r.metrics for r in journal.plans() if r.state != "planned"})
    boards = [TensorBoardWriter(run_dir)] if prepared.recipe.logging.tensorboard else []
    watcher = Observers([writer, *boards, observer])
    status, details, peak = "failed", {}, 0.0
    try:
        plan = session_plan(prepared, journal, run_dir, epoch=journal.owner.epoch)
        with (
            parts.session(
                plan,
                reward=prepared.reward,
                on_event=lambda kind, detail: _tell_event(journal, watcher, kind, detail),
                on_note=watcher.on_note,
            ) as session,
            StopSwitch(watcher.on_note) as switch,  # after Ray, which installs a handler of its own
        ):
            watcher.on_start(_info(prepared, session, run_dir))
            watcher.on_note(session.cluster.describe())
            training = parts.training(prepared, journal, run_dir, watcher, session, switch)
            try:
                status = training.train()
                details = training.details()
            finally:
                peak = session.sample_memory(every_s=0.0)
    except (Exception, KeyboardInterrupt) as error:
        details = {**details, "failure": f"{type(error).__name__}: {error}"}
        status = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
        raise
    finally:
        summary = _summary(prepared, run_dir, status=status, began=began, peak=peak, details=details)
        watcher.on_end(summary)
    return summary


class Training:
    """The trainer with its hooks: evaluation, reporting, rebuilding a learner."""

    buffer_class, flow_class, trainer_class = Buffer, RolloutFlow, Trainer

    def __init__(
        self,
        prepared: Prepared,
        journal: Journal,
        run_dir: Path,
        watcher: Observer,
        session: Session,
        switch: StopSwitch,
    ) -> None:
        assert prepared.source is not None
        self.prepared, self.journal, self.run_dir = prepared, journal, run_dir
        self.watcher, self.session, self.switch = watcher, session, switch
        recipe = prepared.recipe
        self.buffer = self.buffer_class(
            capacity=(recipe.buffer.max_staleness + 1) * recipe.learner.tasks_per_plan,
            max_reuse=recipe.buffer.max_reuse,
            sampling=recipe.buffer.sampling,
            seed=recipe.run.seed,
            num_draws=journal.last_plan,
        )
        self.buffer.restore(journal.accepted())
        self.flow = self.flow_class(
            journal=journal,
            pool=session.pool,
            rewards=session.rewards,
            source=prepared.source,
            settings=FlowSettings(
                group_size=recipe.rollout.group_size,
                sampling=prepared.sampling,
                dynamic_sampling=recipe.algorithm.dynamic_sampling,
                algorithm=prepared.algorithm,
                max_failure_rate=recipe.reward.max_failure_rate,
                max_steps=recipe.run.plans,
            ),
            clock=session.clock,
            on_ready=self._on_ready,
        )
        session.exchange.training = self.flow

    def train(self) -> str:
        """Trains to the end or to a stop, and returns how it ended."""
        start = self._rebuild()
        self.flow.version = start.version
        trainer = self.trainer_class(
            recipe=self.prepared.recipe,
            algorithm=self.prepared.algorithm,
            journal=self.journal,
            buffer=self.buffer,
            flow=self.flow,
            exchange=self.session.exchange,
            start=start,
            tolerance=self.prepared.tolerance,
            run_dir=str(self.run_dir.absolute()),
            hooks=Hooks(
                rebuild=self._rebuild,
                evaluate=self._evaluate,
                on_plan=self._on_plan,
                on_phase=self._on_phase,
                on_note=self.watcher.on_note,
                should_stop=lambda: self.switch.is_set,
                extra_metrics=lambda: {"memory_mb": self.session.sample_memory()},
            ),
        )
        trainer.train()
        if trainer.version == 0 and self.switch.is_set:
            return "stopped"
        if not any(record.metrics.get("optim/grad_norm") for record in self.journal.plans()):
            raise TrainingStopped(
                f"the run ended after {trainer.version} plans, and none of them changed the weights: no group carried "
                "signal. Look at the reward with `cauce check`, or make the tasks easier or harder"
            )
        trainer.save_model(str(self.run_dir.absolute() / "model"))
        if trainer.version < self.prepared.recipe.run.plans:
            return "stopped"
        self.journal.finish()
        return "finished"

    def details(self) -> dict[str, Any]:
        counts = self.journal.counts()
        return {"tasks": counts, "drops": self.journal.drops(), "journal_commits": self.journal.num_commits}

    def _on_ready(self, group: Group) -> None:
        self.buffer.put(group.task, version=oldest_version(group))

    def _rebuild(self) -> Rebuilt:
        """A learner may die while it takes up the record, or not start in place of a dead one: then another does."""
        for deaths in range(1, MAX_LEARNER_DEATHS + 1):
            try:
                return self._rebuild_once()
            except WorkerError as error:
                self.journal.event("learner_died", {"version": self.journal.last_decided, "cause": str(error)})
                if deaths == MAX_LEARNER_DEATHS:
                    raise
                self.watcher.on_note(f"{error}\nAnother learner takes up the record.")
        raise AssertionError("unreachable: the last death is raised")

    def _rebuild_once(self) -> Rebuilt:
        learner = self.session.fresh_learner()
        fingerprint = learner.status()["fingerprint"]
        if "learner_threads" not in self.journal.meta:
            self.journal.set_meta("learner_threads", fingerprint["threads"])
        result = rebuild(
            learner,
            run_dir=self.run_dir,
            journal=self.journal,
            algorithm=self.prepared.algorithm,
            fingerprint=json.dumps(fingerprint, sort_keys=True),
            on_note=self.watcher.on_note,
            on_plan=lambda number: self._on_phase("redo", number, self.journal.last_plan),
        )
        return Rebuilt(
            learner=learner,
            version=result.version,
            lineage=self.journal.meta["lineage"],
            saved=result.saved,
            redo_s=result.redo_s,
        )

    def _evaluate(self, version: int) -> None:
        if not self.prepared.test_rows:
            return
        recipe = self.prepared.recipe
        name = "before" if version == 0 else "after" if version >= recipe.run.plans else f"plan_{version:06d}"
        assert self.prepared.source is not None
        result = Evaluation(
            self.session.exchange,
            self.prepared.source,
            rows=self.prepared.test_rows,
            sampling=self.prepared.eval_sampling,
            step=version,
            max_steps=recipe.run.plans,
            on_phase=self._on_phase,
        ).run()
        write_records(result, self.run_dir / "eval" / f"{name}.jsonl")
        self.watcher.on_eval(version, "test", result.accuracy)

    def _on_plan(self, plan: Plan, metrics: dict[str, float]) -> None:
        self.watcher.on_plan(plan.number, metrics)

    def _on_phase(self, name: str, done: int, total: int) -> None:
        self.session.sample_memory()
        self.watcher.on_phase(name, done, total)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a run is put together from; a simulation puts its own in place of a part."""

    session: type[Session]
    training: type[Training] = Training


def session_plan(prepared: Prepared, journal: JournalReader, run_dir: Path, *, epoch: int) -> SessionPlan:
    return SessionPlan(
        recipe=prepared.recipe,
        algorithm=prepared.algorithm,
        model_path=prepared.model_path,
        model_bytes=prepared.model_bytes,
        run_id=journal.meta["run_id"],
        run_dir=run_dir.absolute(),  # workers may live in another folder than the driver
        owner_epoch=epoch,
        lineage=journal.meta["lineage"],
        total_steps=prepared.total_steps,
        slots=prepared.recipe.engine.slots,
    )


def _info(prepared: Prepared, session: Session, run_dir: Path) -> RunInfo:
    recipe = prepared.recipe
    return RunInfo(
        run_dir=run_dir,
        recipe_name=run_dir.name,
        model=recipe.model.path,
        num_plans=recipe.run.plans,
        algorithm=recipe.algorithm.name,
        cluster=session.cluster.how,
        dashboard=session.cluster.dashboard,
        eval_tasks=len(prepared.test_rows),
    )


def _tell_event(journal: Journal, watcher: Observer, kind: str, detail: dict[str, str]) -> None:
    journal.event(kind, detail)
    watcher.on_note(detail.get("cause", kind))


def _summary(
    prepared: Prepared, run_dir: Path, *, status: str, began: float, peak: float, details: Mapping[str, Any]
) -> dict[str, Any]:
    recipe = prepared.recipe
    facts = {
        "model": recipe.model.path,
        "algorithm": recipe.algorithm.name,
        "seed": recipe.run.seed,
        **prepared.digests,
        **environment(),
        **details,
    }
    summary = build_summary(
        read_metrics(run_dir),
        run=str(run_dir),
        status=status,
        num_plans=recipe.run.plans,
        wall_s=time.time() - began,
        before=eval_stats(read_eval(run_dir / "eval" / "before.jsonl")),
        after=eval_stats(read_eval(run_dir / "eval" / "after.jsonl")),
        peak_memory_mb=peak,
        details=facts,
    )
    (run_dir / "summary.json").write_text(json.dumps(summary, indent=1, default=str), encoding="utf-8")
    return summary
