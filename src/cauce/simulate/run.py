"""One seed, from the first start of its run, through every death of its driver, to its end.

`simulate(seed)` returns a `Report`; a `Violation` in it is a fault of ours. Replaying a seed is running it again.
"""

import hashlib
import logging
import re
import shutil
import signal
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cauce.algorithms.table import resolve
from cauce.data.source import load_rows
from cauce.errors import CauceError, FencedError, JournalError, RewardError, TrainingStopped, WeightsError, WorkerError
from cauce.journal import Journal
from cauce.metrics.observer import NullObserver
from cauce.recipe.checks import check_recipe
from cauce.recipe.load import recipe_from_tables
from cauce.recipe.models import Recipe
from cauce.runtime.restarts import DEATHS_IN_A_ROW
from cauce.runtime.tasks import TaskSource
from cauce.runtime.trainer import MAX_LEARNER_DEATHS
from cauce.runtime.world import WorkerDied
from cauce.simulate.ending import Ended, check_ended, check_equal
from cauce.simulate.files import Disk, SimulatedJournal, journal_on
from cauce.simulate.invariants import Witness, check_record
from cauce.simulate.roles import STOP, Words
from cauce.simulate.script import Crashed, Script, Violation
from cauce.simulate.session import SimulatedSession, session_of
from cauce.simulate.workers import SimulatedWorkers
from cauce.stages.prepare import Prepared
from cauce.stages.run import Parts, Training, run
from cauce.types import Row, Sampling

MAX_STARTS = 60
MAX_WAKES = 200_000
QUIET_S = 4000.0  # virtual seconds that a run without faults may take
FAULT_S = 600.0  # ... and more for each fault; for one that only a learner's time limit ends:
LEARNER_FAULT_S = 4200.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cast:
    """The classes of a simulated run. A test puts a faulty one in place of one, to see it found."""

    session: type[SimulatedSession] = SimulatedSession
    training: type[Training] = Training
    journal: type[SimulatedJournal] = SimulatedJournal
    workers: type[SimulatedWorkers] = SimulatedWorkers


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What became of a seed."""

    seed: int
    settings: dict[str, Any]
    trace: list[str]
    violation: str  # empty where everything held
    status: str  # finished, or the error that a run ends with again and again
    starts: int
    faults: Counter[str] = field(default_factory=Counter)
    compared: bool = False  # with the run without faults, plan by plan
    digest: str = ""  # of the whole trace


def simulate(seed: int, cast: Cast | None = None) -> Report:
    """Runs a seed to its end, and a synchronous one once more without faults."""
    cast = cast or Cast()
    logging.getLogger("cauce.stages.run").setLevel(logging.ERROR)  # what it says of a full disk is in the trace
    script = Script(seed)
    violation, status, ended, compared, life = "", "", None, False, None
    with _folder() as folder:
        life = _Life(script, folder / "run", cast)
        try:
            status, ended = life.live()
            if ended is not None and ended.is_comparable and not script.settings["buffer.max_staleness"]:
                undisturbed = _undisturbed(seed, folder / "quiet", cast)
                compared = undisturbed is not None and check_equal(ended, undisturbed)
        except Violation as found:
            violation = str(found)
            script.log(f"VIOLATION {violation}")
        finally:
            life.witness.close()
    return Report(
        seed=seed,
        settings=script.settings,
        trace=script.trace,
        violation=violation,
        status=status,
        starts=life.starts,
        faults=script.total,
        compared=compared,
        digest=hashlib.sha256("\n".join(script.trace).encode()).hexdigest()[:16],
    )


def _undisturbed(seed: int, run_dir: Path, cast: Cast) -> Ended | None:
    """The same settings without faults; None where the data alone stop the run, which a resume may get over."""
    life = _Life(Script(seed, quiet=True), run_dir, cast)
    try:
        return life.live()[1]
    finally:
        life.witness.close()


class _Life:
    """A run folder and the drivers that own it one after the other."""

    def __init__(self, script: Script, run_dir: Path, cast: Cast) -> None:
        self.script, self.run_dir, self.cast = script, run_dir, cast
        self.disk = Disk(script)
        self.witness = Witness(run_dir / "journal.db")
        self.prepared = _prepare(script)
        self.starts = self.wakes = 0
        self._machine = 0
        script.clock.on_wake = self._wake

    def live(self) -> tuple[str, Ended | None]:
        """Until the run has finished, or ends twice in a row by the same error without any fault."""
        status = ""
        while True:
            self.starts += 1
            self.script.counts.clear()
            self.script.losses.clear()
            before, status = status, self._drive()
            self.script.log(f"driver {self.starts}: {status}")
            if status == "finished":
                self.script.budget = 0  # the checks themselves are not to fail
                return status, self._check_end()
            if status == before and not self.script.counts and not self.disk.was_full:
                return status, None
            if self.starts > MAX_STARTS:
                raise Violation(f"after {self.starts} starts the run has not ended; the last: {status}")
            slowest = 600 if self.disk.was_full else 60  # to make room takes a person
            self.script.clock.advance(self.script.delay(slowest / 60, slowest), until=lambda: False)

    def _drive(self) -> str:
        """One driver, from its start to its end, by whatever; says which."""
        journal = None
        self.disk.was_full = False
        try:
            journal = self._open()
            self.witness.begin()
            check_record(self.witness, self.script.settings)
            self._change_what_a_resume_may()
            workers = self.cast.workers(self.script, self.witness, self.disk, machine=str(self._machine))
            parts = Parts(session=session_of(workers, self.disk, self.cast.session), training=self.cast.training)
            return str(run(self.prepared, journal, self.run_dir, _Trace(self.script), parts)["status"])
        except Crashed:
            return "died"
        except KeyboardInterrupt:
            if self.script.counts["stop"] < 2:
                raise  # by a person, who wants to stop the simulation
            return "interrupted"
        except (CauceError, OSError) as error:
            text = re.sub(r"pid \d+", "pid", str(error)).replace(str(self.run_dir), "RUN")
            self._require(f"{type(error).__name__}: {text}", self._is_allowed(error))
            return type(error).__name__
        except Exception as error:
            self.script.trace += traceback.format_exc().splitlines()
            raise Violation(f"the run ended by {type(error).__name__}: {error}") from error
        finally:
            if journal is not None:
                journal.close()
            if self.disk.is_dead and self.script.rng.random() < 0.3:
                self.disk.lose_power(self.run_dir)
            self.disk.is_dead = False

    def _change_what_a_resume_may(self) -> None:
        """The number of workers, and the machine."""
        rng = self.script.rng
        if self.starts > 1 and rng.random() < 0.3:
            rollout = self.prepared.recipe.rollout.model_copy(update={"actors": rng.randint(1, 4)})
            reward = self.prepared.recipe.reward.model_copy(update={"workers": rng.randint(1, 3)})
            recipe = self.prepared.recipe.model_copy(update={"rollout": rollout, "reward": reward})
            self.prepared = replace(self.prepared, recipe=recipe)
        if self.starts > 1 and self.script.fires("moved"):
            self._machine += 1

    def _open(self) -> Journal:
        settings, journal_class = self.script.settings, journal_on(self.disk, self.script, self.cast.journal)
        if (self.run_dir / "recipe.toml").exists():
            return journal_class.open(self.run_dir, clock=self.script.clock.now)
        meta = {
            "run_id": "simulated",
            "lineage": "0",
            "max_reuse": str(settings["buffer.max_reuse"]),
            "group_size": str(settings["rollout.group_size"]),
        }
        shutil.rmtree(self.run_dir, ignore_errors=True)  # a driver that died before there was a run
        journal = journal_class.create(self.run_dir, meta=meta, clock=self.script.clock.now)
        (self.run_dir / "recipe.toml").touch()
        return journal

    def _wake(self) -> None:
        """Whatever befalls a driver that has waited."""
        self.wakes += 1
        script = self.script
        script_s = script.clock.monotonic()
        slow = sum(script.total[f"learner_{kind}"] for kind in ("hang", "lost"))
        allowed = QUIET_S + FAULT_S * sum(script.total.values()) + LEARNER_FAULT_S * slow
        if script_s > allowed or self.wakes > MAX_WAKES:
            raise Violation(f"no end after {script_s:.0f} s and {self.wakes} waits; {allowed:.0f} s are enough")
        self.disk.point("at a wake-up")
        if script.fires("stop") and callable(signal.getsignal(signal.SIGTERM)):
            signal.raise_signal(signal.SIGTERM)
        if script.fires("takeover"):
            Journal.open(self.run_dir, takeover=True, clock=script.clock.now).close()

    def _require(self, what: str, is_allowed: bool) -> None:
        self.script.log(f"driver ends by {what.splitlines()[0]}")
        if not is_allowed:
            raise Violation(f"the run ended by {what}, and no fault explains it")

    def _is_allowed(self, error: Exception) -> bool:
        """Whether the faults of this driver explain how it ended."""
        counts = self.script.counts
        if isinstance(error, FencedError):
            return counts["takeover"] > 0
        if isinstance(error, WorkerDied):
            return self.script.losses["learner"] >= MAX_LEARNER_DEATHS
        if isinstance(error, WorkerError):
            starts = sum(counts[f"{role}_start"] for role in ("rollout", "reward", "learner"))
            return starts > 0 or self.script.losses["rollout"] >= DEATHS_IN_A_ROW
        if isinstance(error, JournalError | OSError | WeightsError):
            return self.disk.was_full
        if isinstance(error, RewardError):
            return any(counts[f"reward_{kind}"] for kind in ("raises", "hang", "lost", "pause", "death", "late_death"))
        return isinstance(error, TrainingStopped) and self._is_untrainable(str(error))

    def _is_untrainable(self, text: str) -> bool:
        """The data of a seed can be such that nothing is left to train on; a stall never is."""
        return any(
            words in text
            for words in (
                "non-finite",
                "carried no signal",
                "groups were dropped",
                "could be scored",
                "changed the weights",
            )
        )

    def _check_end(self) -> Ended:
        check_record(self.witness, self.script.settings)
        return check_ended(
            self.run_dir, self.witness, self.script.settings, self.prepared.algorithm, machines=self._machine + 1
        )


class _Trace(NullObserver):
    """What a person watching the run is told."""

    def __init__(self, script: Script) -> None:
        self._script = script

    def on_note(self, text: str) -> None:
        self._script.log(f"note: {text.splitlines()[0][:120]}")

    def on_plan(self, plan: int, metrics: Any) -> None:
        self._script.losses["learner"] = 0
        self._script.log(f"plan {plan}, reward {metrics['reward/mean']:.3f}, staleness {metrics['staleness/max']:.0f}")

    def on_eval(self, plan: int, name: str, accuracy: float) -> None:
        self._script.log(f"evaluation at plan {plan}: {accuracy:.3f}")


def _prepare(script: Script) -> Prepared:
    """What a recipe of these settings needs, without a model."""
    recipe = _recipe(script.settings)
    rows = load_rows(script.rows, settings=recipe.data, split="train")
    stops = (STOP,)
    source = TaskSource(
        rows,
        Words(),
        seed=recipe.run.seed,
        shuffle=recipe.data.shuffle,
        max_prompt_tokens=recipe.data.max_prompt_tokens,
        eos_token_ids=stops,
    )
    sampling = Sampling(
        max_tokens=recipe.rollout.max_tokens, temperature=1.0, stop_token_ids=stops, seed=recipe.run.seed
    )
    return Prepared(
        recipe=recipe,
        algorithm=resolve(recipe.algorithm, max_tokens=recipe.rollout.max_tokens, correction_needed=False),
        model_path="",
        model_bytes=0,
        source=source,
        test_rows=tuple(Row(id=f"test:{i}", prompt=f"held out {i}", columns={"trait": "plain"}) for i in range(3)),
        reward=None,
        sampling=sampling,
        eval_sampling=sampling,
        tolerance=1e-4,
        digests={},
    )


def _recipe(settings: dict[str, Any]) -> Recipe:
    fixed = {"model.path": "none", "logging.tensorboard": False, "engine.dtype": "fp32", "learner.dtype": "fp32"}
    tables: dict[str, dict[str, Any]] = {}
    for key, value in (settings | fixed).items():
        section, _, name = key.partition(".")
        tables.setdefault(section, {})[name] = value
    recipe = recipe_from_tables(tables)
    check_recipe(recipe)
    return recipe


@contextmanager
def _folder() -> Iterator[Path]:
    """In memory where that is possible: a commit costs nothing there."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="cauce-simulate-", dir=shared if shared.is_dir() else None) as folder:
        yield Path(folder)
