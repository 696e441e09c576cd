"""One run of the stage `rl`, from wherever its record stands to its end: the trainer with its hooks, and the files that
it leaves in the run folder.

    RUN/recipe.toml journal.db payloads/ checkpoints/ model/ metrics.jsonl summary.json eval/ tensorboard/ logs/
"""

import json
import logging
import sqlite3
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cauce import spans
from cauce.errors import CauceError, FencedError, TrainingStopped, WorkerError
from cauce.faults import fault_point
from cauce.journal import Buffer, Journal, JournalReader
from cauce.metrics.advice import Setup, advise, measure
from cauce.metrics.observer import Observer, Observers, RunInfo
from cauce.metrics.summary import build_summary, environment, eval_stats, read_eval
from cauce.metrics.tensorboard import TensorBoardWriter
from cauce.metrics.trace import TraceWriter
from cauce.metrics.writer import MetricsWriter, read_metrics
from cauce.recipe.models import Recipe
from cauce.runtime.evaluation import Evaluation, write_records
from cauce.runtime.flow import FlowSettings, RolloutFlow
from cauce.runtime.forked import ForkTrainer, NoFlow
from cauce.runtime.placement import plan_placement
from cauce.runtime.process import available_cpus
from cauce.runtime.recovery import rebuild
from cauce.runtime.session import Session, SessionPlan
from cauce.runtime.trainer import Hooks, Rebuilt, TaskFlow, Trainer, oldest_version
from cauce.runtime.world import WorkerDied
from cauce.stages.prepare import Prepared
from cauce.stages.record import total_steps
from cauce.stages.stopping import StopSwitch
from cauce.types import Group, Plan

log = logging.getLogger(__name__)


def run(
    prepared: Prepared, journal: Journal, run_dir: Path, observer: Observer, parts: "Parts | None" = None
) -> dict[str, Any]:
    """A run from wherever its record stands to its end."""
    parts = parts or Parts(session=Session)
    began = time.time()
    writer = MetricsWriter(run_dir)
    own_plans = journal.plans(from_number=journal.forked_at + 1)
    writer.restore({r.plan.number: r.metrics for r in own_plans if r.state != "planned"})
    boards = [TensorBoardWriter(run_dir)] if prepared.recipe.logging.tensorboard else []
    owner = journal.owner
    traces = [TraceWriter(run_dir, number=owner.epoch)] if prepared.recipe.logging.trace else []
    watcher = Observers([writer, *boards, *traces, observer])
    status, details, peak = "", {}, 0.0
    journal.event("started", {"host": owner.host, "pid": owner.pid, "plan": journal.last_decided})
    try:
        plan = session_plan(prepared, journal, run_dir, epoch=owner.epoch)
        with (
            parts.session(
                plan,
                reward=prepared.reward,
                on_event=lambda kind, detail: _tell_event(journal, watcher, kind, detail),
                on_note=watcher.on_note,
                only_learner=journal.is_fork,
            ) as session,
            StopSwitch(watcher.on_note) as switch,  # after Ray, which installs a handler of its own
        ):
            watcher.on_start(_info(prepared, journal, session, run_dir))
            for note in (session.cluster.describe(), *(prepared.reward.notes if prepared.reward else ())):
                watcher.on_note(note)
            kind = ForkTraining if journal.is_fork else parts.training
            training = kind(prepared, journal, run_dir, watcher, session, switch)
            try:
                status = training.train()
                details = training.details()
            finally:
                peak = session.sample_memory(every_s=0.0)
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        # Before the switch is on, a SIGTERM comes as the SystemExit that Ray makes of it.
        details = {**details, "failure": f"{type(error).__name__}: {error}"}
        status = "failed" if isinstance(error, Exception) else "stopped"
        status = "fenced" if isinstance(error, FencedError) else status
        raise
    finally:
        if status and status != "fenced":
            _note_end(journal, status, str(details.get("failure", "")))
        summary = _summary(
            prepared, journal, run_dir, status=status or "failed", began=began, peak=peak, details=details
        )
        if status != "fenced":  # the folder is its new owner's
            (run_dir / "summary.json").write_text(json.dumps(summary, indent=1, default=str), encoding="utf-8")
        watcher.on_end(summary)
    return summary


class Training:
    """The trainer with its hooks: evaluation, reporting, rebuilding a learner."""

    buffer_class, flow_class = Buffer, RolloutFlow
    trainer_class: type[Trainer] = Trainer

    def __init__(
        self,
        prepared: Prepared,
        journal: Journal,
        run_dir: Path,
        watcher: Observer,
        session: Session,
        switch: StopSwitch,
    ) -> None:
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
        self.first, self.last = (journal.forked_at, journal.last_plan) if journal.is_fork else (0, recipe.run.plans)
        self._had_learner = False
        self.flow = self._make_flow()
        self.trainer = self._make_trainer()

    def _make_flow(self) -> TaskFlow:
        prepared, recipe, session = self.prepared, self.prepared.recipe, self.session
        assert prepared.source is not None
        flow = self.flow_class(
            journal=self.journal,
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
        session.exchange.training = flow
        self.buffer.restore(self.journal.accepted())
        return flow

    def _make_trainer(self) -> Trainer:
        run = self.prepared.recipe.run.model_copy(update={"plans": self.last})
        return self.trainer_class(
            recipe=self.prepared.recipe.model_copy(update={"run": run}),
            algorithm=self.prepared.algorithm,
            journal=self.journal,
            buffer=self.buffer,
            flow=self.flow,
            exchange=self.session.exchange,
            tolerance=self.prepared.tolerance,
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

    def train(self) -> str:
        """Trains to the end or to a stop, and returns how it ended."""
        trainer = self.trainer
        trainer.train()
        if trainer.version == self.first and self.switch.is_set:
            return "stopped"
        own_plans = self.journal.plans(from_number=self.first + 1)
        if trainer.version >= self.last and not any(record.metrics.get("optim/grad_norm") for record in own_plans):
            raise TrainingStopped(
                f"the run ended after {len(own_plans)} plans, and none of them changed the weights: no group carried "
                "signal. Look at the reward with `cauce check`, or make the tasks easier or harder"
            )
        self.journal.check_owner()
        trainer.save_model(str(self.run_dir.absolute() / "model"))
        if trainer.version < self.last:
            return "stopped"
        fault_point("before_finish")
        self.journal.finish()
        return "finished"

    def details(self) -> dict[str, Any]:
        after = {part: round(seconds, 3) for part, seconds in self.trainer.timer.carried.items()}
        return {
            "tasks": self.journal.counts(),
            "drops": self.journal.drops(),
            "journal_commits": self.journal.num_commits,
            "control_s": round(self.session.exchange.control_s, 3),
            "time_after_last_plan_s": after,  # in no plan's split
        }

    def _on_ready(self, group: Group) -> None:
        self.buffer.put(group.task, version=oldest_version(group))
        spans.count("ready groups", buffer=self.buffer.size)

    def _rebuild(self) -> Rebuilt:
        try:
            learner = self.session.fresh_learner()
        except WorkerError as error:
            if not self._had_learner:  # the first has to start
                raise
            raise WorkerDied(str(error)) from error  # one in place of another: a death like any other
        self._had_learner = True
        fingerprint = learner.status()["fingerprint"]
        if "learner_threads" not in self.journal.meta:
            self.journal.set_meta("learner_threads", fingerprint["threads"])
        began = self.session.clock.monotonic()
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
            took_s=self.session.clock.monotonic() - began,
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
        self.journal.check_owner()
        write_records(result, self.run_dir / "eval" / f"{name}.jsonl")
        self.journal.event("evaluated", {"plan": version, "set": "test", "accuracy": result.accuracy})
        self.watcher.on_eval(version, "test", result.accuracy)

    def _on_plan(self, plan: Plan, metrics: dict[str, float]) -> None:
        spans.count("ready groups", buffer=self.buffer.size)
        self.watcher.on_plan(plan.number, metrics)

    def _on_phase(self, name: str, done: int, total: int) -> None:
        self.session.sample_memory()
        self.watcher.on_phase(name, done, total)


class ForkTraining(Training):
    """Trains on the plans that the record of a fork holds, and ends with the last of them."""

    trainer_class = ForkTrainer

    def _make_flow(self) -> TaskFlow:
        return NoFlow()


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
        total_steps=total_steps(prepared.recipe, journal.meta),
        slots=prepared.recipe.engine.slots,
        reward_names=prepared.reward.names if prepared.reward is not None else (),
    )


def _info(prepared: Prepared, journal: Journal, session: Session, run_dir: Path) -> RunInfo:
    recipe = prepared.recipe
    return RunInfo(
        run_dir=run_dir,
        recipe_name=run_dir.name,
        model=recipe.model.path,
        num_plans=journal.last_plan if journal.is_fork else recipe.run.plans,
        algorithm=recipe.algorithm.name,
        cluster=session.cluster.how,
        dashboard=session.cluster.dashboard,
        eval_tasks=len(prepared.test_rows),
    )


def _note_end(journal: Journal, status: str, failure: str) -> None:
    """The record's last word of this owner. What ended the run may be what keeps it from being written."""
    try:
        journal.event("ended", {"status": status, "plan": journal.last_decided, "failure": failure[:500]})
    except (CauceError, OSError, sqlite3.Error) as error:
        log.warning("the end of the run is not in its journal: %s", error)


def _tell_event(journal: Journal, watcher: Observer, kind: str, detail: dict[str, str]) -> None:
    journal.event(kind, detail)
    watcher.on_note(detail.get("cause") or f"{detail['worker']} takes its place")


def _summary(
    prepared: Prepared,
    journal: Journal,
    run_dir: Path,
    *,
    status: str,
    began: float,
    peak: float,
    details: Mapping[str, Any],
) -> dict[str, Any]:
    recipe, num_plans = prepared.recipe, prepared.recipe.run.plans
    if journal.is_fork:
        meta, num_plans = journal.meta, journal.last_plan - journal.forked_at
        details = {"fork": {k: meta[k] for k in ("forked_from", "forked_at", "fork_changes")}, **details}
    facts = {
        "model": recipe.model.path,
        "algorithm": recipe.algorithm.name,
        "seed": recipe.run.seed,
        **prepared.digests,
        **environment(),
        **details,
    }
    rows, setup = read_metrics(run_dir), advice_setup(recipe)
    usage = measure(rows, setup)
    facts |= {"usage": usage.as_dict() if usage else None, "advice": advise(usage, setup)}
    return build_summary(
        rows,
        run=str(run_dir),
        status=status,
        num_plans=num_plans,
        wall_s=time.time() - began,
        before=eval_stats(read_eval(run_dir / "eval" / "before.jsonl")),
        after=eval_stats(read_eval(run_dir / "eval" / "after.jsonl")),
        peak_memory_mb=peak,
        details=facts,
    )


def advice_setup(recipe: Recipe) -> Setup:
    """What advice needs of a recipe and of this machine; of a cluster of others its cores are not known here."""
    is_ours = recipe.cluster.address == "local"
    cpus = available_cpus() if recipe.cluster.cpus == "auto" else int(recipe.cluster.cpus)
    return Setup(
        actors=recipe.rollout.actors,
        engine_threads=plan_placement(recipe, cpus=cpus).rollout.threads,
        slots=recipe.engine.slots,
        answers_per_plan=recipe.learner.tasks_per_plan * recipe.rollout.group_size,
        max_staleness=recipe.buffer.max_staleness,
        reward_workers=recipe.reward.workers,
        max_redo_s=recipe.checkpoint.max_redo_s,
        checkpoint_every=recipe.checkpoint.every,
        eval_every=recipe.eval.every,
        weights_every=recipe.weights.every,
        cpus=cpus if is_ours else None,
    )
