"""Both runs of a comparison, one after the other: left in peace, and with faults."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cauce.chaos.faults import ENDS_DRIVER, KINDS, Schedule
from cauce.chaos.processes import find, require_proc, strike
from cauce.chaos.verdict import Fault, Record, judge, read_record
from cauce.errors import JournalError, RecipeError, TrainingStopped
from cauce.journal import Journal
from cauce.recipe.load import load_recipe
from cauce.recipe.models import Recipe
from cauce.stages.record import recorded_recipe

LOOK_S = 0.1
TELL_S = 20.0  # between two lines of a run that nothing befalls
END_S = 60.0  # that a driver gets to end when chaos itself is stopped
LAST_LINES = 25
MAX_LIVES = 200

Tell = Callable[[str], None]


@dataclass(slots=True, kw_only=True)
class Life:
    """What one run took, and what befell it."""

    run_dir: Path
    wall_s: float = 0.0  # from the first start to the end
    at_work_since: float = 0.0  # unix time; faults are counted from here
    faults: list[Fault] = field(default_factory=list)
    before: list[Record] = field(default_factory=list)  # what was acknowledged when each fault came


def chaos(
    recipe: str,
    settings: Sequence[str],
    *,
    faults: Mapping[str, float],
    minutes: float | None,
    seed: int,
    undisturbed: Path | None,
    folder: Path,
    tell: Tell,
) -> dict[str, Any]:
    """Runs a recipe with faults, and before that without where no such run is given; writes `folder`/chaos.json.

    Raises:
        RecipeError: for settings that are chaos's own, or a given run of another recipe.
        TrainingStopped: where one of the runs ended otherwise than finished; the text has the end of its log.
    """
    require_proc()
    loaded = _loaded(recipe, settings)
    folder.mkdir(parents=True, exist_ok=True)
    own = [*settings, f"run.dir={folder}", "logging.live=false"]
    if undisturbed is None:
        tell("first the run in peace")
        life = Life(run_dir=folder / "undisturbed")
        _live(life, ["train", recipe, *own, "run.name=undisturbed"], Schedule({}, seed), stop_s=0.0, tell=tell)
        quiet, quiet_s = life.run_dir, life.wall_s
    else:
        quiet, quiet_s = undisturbed, _wall_s(undisturbed, loaded)
    tell("now with faults: " + ", ".join(f"{kind} {rate:g} a minute" for kind, rate in faults.items()))
    life = Life(run_dir=folder / "disturbed")
    stop_s = 60 * minutes if minutes else float("inf")
    _live(life, ["train", recipe, *own, "run.name=disturbed"], Schedule(faults, seed), stop_s=stop_s, tell=tell)
    result = {
        "recipe": recipe,
        "settings": list(settings),
        "faults_per_minute": dict(faults),
        "minutes": minutes,
        "seed": seed,
        **judge(life.run_dir, life.faults, life.before, wall_s=life.wall_s, undisturbed=quiet, undisturbed_s=quiet_s),
    }
    (folder / "chaos.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
    return result


def _live(life: Life, command: list[str], schedule: Schedule, *, stop_s: float, tell: Tell) -> None:
    """One run from its first start to its end, resumed whenever a fault has ended its driver."""
    began = time.time()
    for number in range(MAX_LIVES):
        log = life.run_dir.parent / f"{life.run_dir.name}-{number}.log"
        driver = _start(command, log)
        try:
            ended_by = _accompany(life, driver, schedule, stop_s=stop_s, tell=tell)
        finally:
            _end(driver)
        if not ended_by and driver.returncode == 0:
            life.wall_s = time.time() - began
            return
        if not ended_by:
            tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:])
            raise TrainingStopped(f"{life.run_dir} ended with exit code {driver.returncode}; the end of {log}:\n{tail}")
        command = ["resume", str(life.run_dir)]
    raise TrainingStopped(f"{life.run_dir} has been ended {MAX_LIVES} times and is not done; use fewer driver faults")


def _accompany(
    life: Life, driver: subprocess.Popen[bytes], schedule: Schedule, *, stop_s: float, tell: Tell
) -> str:
    """Watches one driver until it ends, and does what is due meanwhile. Returns the fault that ended it, or ""."""
    born, told, is_at_work = time.time(), time.monotonic(), False
    while driver.poll() is None:
        time.sleep(LOOK_S)
        if time.monotonic() - told > TELL_S:
            told = time.monotonic()
            tell(f"plan {_plans(life.run_dir)}")
        is_at_work = is_at_work or _is_at_work(life.run_dir, since=born)
        if not is_at_work:
            continue
        life.at_work_since = life.at_work_since or time.time()
        seconds = time.time() - life.at_work_since
        kind = schedule.due(seconds) if seconds <= stop_s else None
        pid = find(driver.pid, kind) if kind else None
        if kind is None or pid is None:  # what is being replaced has its turn when the next one is there
            continue
        record = read_record(life.run_dir)
        if not strike(pid, kind):
            continue
        life.faults.append(Fault(kind=kind, pid=pid, time=time.time(), plan=record.plan + 1))
        life.before.append(record)
        schedule.done(kind)
        tell(f"plan {record.plan + 1}: {KINDS[kind]} (process {pid})")
        if kind in ENDS_DRIVER:
            driver.wait()
            return kind
    return ""


def _start(command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as file:
        return subprocess.Popen([sys.executable, "-m", "cauce", *command], stdout=file, stderr=subprocess.STDOUT)


def _end(driver: subprocess.Popen[bytes]) -> None:
    """Of a driver that still lives, because chaos itself was stopped: its run pauses, and can be resumed."""
    if driver.poll() is not None:
        return
    driver.terminate()
    try:
        driver.wait(END_S)
    except subprocess.TimeoutExpired:
        driver.kill()
        driver.wait()


def _is_at_work(run_dir: Path, *, since: float) -> bool:
    """Whether this driver has a learner that has taken up the record."""
    try:
        with Journal.read_only(run_dir) as journal:
            return any(event.time >= since for event in journal.events("learner_ready"))
    except JournalError:  # it has no tables yet
        return False


def _plans(run_dir: Path) -> int:
    try:
        with Journal.read_only(run_dir) as journal:
            return journal.last_decided
    except JournalError:
        return 0


def _loaded(recipe: str, settings: Sequence[str]) -> Recipe:
    loaded = load_recipe(recipe, list(settings))
    given = [s for s in settings if s.lstrip("-").startswith(("run.dir", "run.name"))]
    if given:
        raise RecipeError(f"{given[0]}: chaos makes two runs in a folder of its own; say where by --folder")
    if loaded.cluster.address != "local":
        raise RecipeError(
            f"cluster.address={loaded.cluster.address!r}: chaos kills the processes of a Ray that the run starts itself; "
            "leave it at local"
        )
    return loaded


def _wall_s(run_dir: Path, recipe: Recipe) -> float:
    """Of a run that was left in peace, from its own summary."""
    with Journal.read_only(run_dir) as journal:
        found = recorded_recipe(journal)
        disturbed = [kind for kind in ("worker_died", "learner_died") if journal.events(kind)]
        starts = len(journal.events("started"))
    if disturbed or starts != 1:
        raise RecipeError(f"--undisturbed {run_dir}: it was not left in peace: {starts} starts, {disturbed or 'no'} deaths")
    other = [name for name, value in _learning(found).items() if value != _learning(recipe)[name]]
    if other:
        raise RecipeError(f"--undisturbed {run_dir} is a run of another recipe: [{other[0]}] differs")
    summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    if summary["status"] != "finished":
        raise RecipeError(f"--undisturbed {run_dir}: its status is {summary['status']}, not finished")
    return float(summary["wall_s"])


def _learning(recipe: Recipe) -> dict[str, Any]:
    """The settings by section, without those that say where a run lies and what is shown of it."""
    return recipe.model_dump(exclude={"run": {"dir", "name"}, "logging": True})
