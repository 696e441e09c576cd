"""Both runs of a comparison, one after the other: left in peace, and with faults."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cauce.chaos.faults import KINDS, Schedule
from cauce.chaos.given import load, locked, wall_of
from cauce.chaos.processes import find, require_proc, strike, worker_name
from cauce.chaos.verdict import Fault, Record, judge, read_record
from cauce.cli.exit_codes import STOPPED
from cauce.errors import FencedError, JournalError, TrainingStopped
from cauce.journal import Journal

LOOK_S = 0.1
TELL_S = 20.0  # between two lines of a run that nothing befalls
END_S = 60.0  # that a driver gets to end when chaos itself is stopped, or when it was killed
PAUSE_S = 900.0  # ... and after a SIGTERM, which lets it finish its plan
LAST_LINES = 25
FRUITLESS_LIVES = 5  # drivers in a row that are ended before they have made a plan

ENDS_DRIVER = {"driver": -signal.SIGKILL, "pause": STOPPED}  # kind -> the exit code that shows it came to that
Tell = Callable[[str], None]


@dataclass(slots=True, kw_only=True)
class Life:
    """What one run took, and what befell it."""

    run_dir: Path
    wall_s: float = 0.0  # from the first start to the end
    work_s: float = 0.0  # of that with a learner that has taken up the record; faults are due by it
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
        RecipeError: for settings that are chaos's own, or a given run that cannot be compared with.
        TrainingStopped: where one of the runs ended otherwise than finished; the text has the end of its log.
    """
    require_proc()
    loaded = load(recipe, settings)
    quiet_s = wall_of(undisturbed, loaded) if undisturbed is not None else 0.0
    folder.mkdir(parents=True, exist_ok=True)
    own = [*settings, f"run.dir={folder}", "logging.live=false"]
    if undisturbed is None:
        tell("first the run in peace")
        life = Life(run_dir=folder / "undisturbed")
        live(life, ["train", recipe, *own, "run.name=undisturbed"], Schedule({}, seed), stop_s=0.0, tell=tell)
        undisturbed, quiet_s = life.run_dir, life.wall_s
    tell("now with faults: " + ", ".join(f"{kind} {rate:g} a minute" for kind, rate in faults.items()))
    life = Life(run_dir=folder / "disturbed")
    stop_s = 60 * minutes if minutes else float("inf")
    live(life, ["train", recipe, *own, "run.name=disturbed"], Schedule(faults, seed), stop_s=stop_s, tell=tell)
    result = {
        "recipe": recipe,
        "settings": list(settings),
        "faults_per_minute": dict(faults),
        "minutes": minutes,
        "seed": seed,
        **judge(
            life.run_dir, life.faults, life.before, wall_s=life.wall_s, undisturbed=undisturbed, undisturbed_s=quiet_s
        ),
    }
    (folder / "chaos.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
    return result


def live(life: Life, command: list[str], schedule: Schedule, *, stop_s: float, tell: Tell) -> None:
    """One run from its first start to its end, resumed whenever a fault has ended its driver."""
    began, plans, fruitless, number = time.monotonic(), -1, 0, 0
    while fruitless < FRUITLESS_LIVES:
        log = life.run_dir.parent / f"{life.run_dir.name}-{number}.log"
        driver = _start(command, log)
        try:
            ended_by = _accompany(life, driver, schedule, stop_s=stop_s, tell=tell)
        finally:
            _end(driver)
        if driver.returncode != ENDS_DRIVER.get(ended_by):  # by itself; a fault that came to nothing is none
            if ended_by:
                life.faults.pop()
                life.before.pop()
            if driver.returncode == 0:
                life.wall_s = time.monotonic() - began
                return
            tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:])
            raise TrainingStopped(f"{life.run_dir} ended with exit code {driver.returncode}; the end of {log}:\n{tail}")
        made, plans = plans, _plans(life.run_dir)
        fruitless = 0 if plans > made else fruitless + 1
        command, number = ["resume", str(life.run_dir)], number + 1
    raise TrainingStopped(
        f"{life.run_dir}: {FRUITLESS_LIVES} drivers in a row were ended before they had made a plan, so it would never "
        "end; ask for fewer driver faults a minute"
    )


def _accompany(life: Life, driver: subprocess.Popen[bytes], schedule: Schedule, *, stop_s: float, tell: Tell) -> str:
    """Watches one driver until it ends, and does what is due meanwhile. Returns the fault that is to have ended it."""
    born, told, is_at_work = time.time(), time.monotonic(), False
    looked = time.monotonic()
    while driver.poll() is None:
        time.sleep(LOOK_S)
        before, looked = looked, time.monotonic()
        if looked - told > TELL_S:
            told = looked
            tell(f"plan {_plans(life.run_dir) + 1}")
        if not is_at_work:
            is_at_work = _is_at_work(life.run_dir, since=born)
            continue
        life.work_s += looked - before
        kind = _strike_due(life, driver, schedule, tell=tell) if life.work_s <= stop_s else ""
        if kind in ENDS_DRIVER:
            try:
                driver.wait(END_S if kind == "driver" else PAUSE_S)
            except subprocess.TimeoutExpired:
                raise TrainingStopped(f"the driver of {life.run_dir} is still there after {KINDS[kind]}") from None
            return kind
    return ""


def _strike_due(life: Life, driver: subprocess.Popen[bytes], schedule: Schedule, *, tell: Tell) -> str:
    """Puts in the first fault that is due and has somebody to befall; returns its kind, or ""."""
    for kind in schedule.due(life.work_s):
        pid = find(driver.pid, kind, schedule.random)
        if pid is None:  # what is being replaced has its turn when the next one is there
            continue
        record, name = read_record(life.run_dir), worker_name(life.run_dir, pid)
        if not strike(pid, kind):
            continue
        life.faults.append(Fault(kind=kind, worker=name, pid=pid, time=time.time(), plan=record.plan + 1))
        life.before.append(record)
        schedule.done(kind, life.work_s)
        tell(f"plan {record.plan + 1}: {KINDS[kind]} ({name or 'process'} {pid})")
        return kind
    return ""


def _start(command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """In a session of its own: Ctrl-C is for chaos, which then ends the driver as it should."""
    with log.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "cauce", *command], stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )


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
    except FencedError as error:
        raise locked(str(error)) from error
    except JournalError:  # it has no tables yet
        return False


def _plans(run_dir: Path) -> int:
    try:
        with Journal.read_only(run_dir) as journal:
            return journal.last_decided
    except JournalError:
        return 0
