"""What the two records of a chaos run say: what was lost, what was done twice, and what the faults have cost."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from cauce.errors import JournalError
from cauce.journal import Journal, JournalReader
from cauce.metrics.writer import read_metrics
from cauce.stages.record import recorded_recipe

# The event that tells of a fault, and the one that says it is made good; the others are a driver's.
NOTICED = {"rollout": "worker_died", "hang": "worker_died", "reward": "worker_died", "learner": "learner_died"}
REPLACED = {"rollout": "worker_started", "hang": "worker_started", "reward": "worker_started"}
TERMINAL = ("trained", "dropped")
Answer = tuple[int, int]  # task, index


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What a journal has acknowledged at one moment."""

    plan: int  # the newest that was decided
    answers: dict[Answer, tuple[str, int]]  # where each answer's record lies
    checksums: dict[int, str]  # plan -> weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One that was put in."""

    kind: str
    worker: str  # its name in the run; empty for the driver
    pid: int
    time: float  # unix
    plan: int  # the one under way


def read_record(run_dir: Path) -> Record:
    with Journal.read_only(run_dir) as journal:
        answers = journal.select("SELECT task, idx, file, offset FROM sample")
        checksums = journal.select("SELECT number, checksum FROM plan WHERE state = 'applied'")
        return Record(
            plan=journal.last_decided,
            answers={(task, index): (file, offset) for task, index, file, offset in answers},
            checksums=dict(checksums),
        )


def judge(
    run_dir: Path,
    faults: Sequence[Fault],
    before: Sequence[Record],
    *,
    wall_s: float,
    undisturbed: Path,
    undisturbed_s: float,
) -> dict[str, Any]:
    """The verdict, with the numbers behind it. Seconds throughout."""
    after, peace = read_record(run_dir), read_record(undisturbed)
    with Journal.read_only(run_dir) as journal, Journal.read_only(undisturbed) as quiet:
        tasks = _lost_tasks(journal, quiet)
        max_reuse = int(journal.meta["max_reuse"])
        used = journal.select("SELECT task, COUNT(*) FROM plan_use GROUP BY task")
        again = journal.select(
            "SELECT lease.task, idx FROM lease, json_each(lease.indices) JOIN sample ON sample.task = lease.task "
            "AND sample.idx = json_each.value WHERE lease.attempt > sample.attempt"
        )
        asked = journal.select("SELECT COUNT(*) FROM lease, json_each(lease.indices)")[0][0]
        injected = [_told(fault, faults, journal) for fault in faults]
        lost = {**tasks, **_missing(before, after), "damaged_answers": _damaged(journal)}
        recipe = recorded_recipe(journal)
    equal = sum(after.checksums.get(plan) == found for plan, found in peace.checksums.items())
    must_be_equal = recipe.engine.deterministic and recipe.buffer.max_staleness == 0 and not any(tasks.values())
    return {
        "lost": sum(lost.values()),
        "trained_twice": sum(count > max_reuse for _, count in used),
        "regenerated": len(again),
        "effective": undisturbed_s / wall_s,
        "wall_s": {"undisturbed": undisturbed_s, "disturbed": wall_s},
        "plans": {"undisturbed": peace.plan, "disturbed": after.plan},
        "plans_with_equal_weights": equal,
        "plans_with_other_weights": len(peace.checksums) - equal if must_be_equal else None,
        "lost_by_kind": lost,
        "answers": len(after.answers),
        "asked_for_again": asked - len(after.answers),  # under way when a fault came, and not recorded yet
        "by_kind": {kind: _summary(kind, injected) for kind in dict.fromkeys(fault.kind for fault in faults)},
        "seconds": {"undisturbed": _split(undisturbed, undisturbed_s), "disturbed": _split(run_dir, wall_s)},
        "faults": injected,
        "runs": {"undisturbed": str(undisturbed), "disturbed": str(run_dir)},
    }


def _lost_tasks(journal: JournalReader, quiet: JournalReader) -> dict[str, int]:
    """Tasks without an end, and tasks that deaths have ended: more of these than the run in peace had."""
    states = dict(journal.select("SELECT state, COUNT(*) FROM task GROUP BY state"))
    # Of the tasks that the end of a run drops, none may have a lower number than one that was trained on.
    passed_over = "SELECT COUNT(*) FROM task WHERE reason = 'run_complete' AND id < (SELECT MAX(task) FROM plan_use)"
    deaths = (
        "SELECT COUNT(DISTINCT task.id) FROM task JOIN sample ON sample.task = task.id "
        "WHERE reason = 'unscorable' AND status IN ('failed', 'timed_out')"
    )
    poison = "SELECT COUNT(*) FROM task WHERE reason = 'poison'"

    def more(query: str) -> int:
        return max(0, journal.select(query)[0][0] - quiet.select(query)[0][0])

    return {
        "open_tasks": sum(count for state, count in states.items() if state not in TERMINAL),
        "tasks_passed_over": more(passed_over),
        "tasks_called_poison": more(poison),
        "tasks_without_reward": more(deaths),
    }


def _missing(before: Sequence[Record], after: Record) -> dict[str, int]:
    """Answers and weights that were acknowledged when a fault came, and are not on record as they were."""
    answers = {key for record in before for key, place in record.answers.items() if after.answers.get(key) != place}
    plans = {plan for record in before for plan, sum_ in record.checksums.items() if after.checksums.get(plan) != sum_}
    return {"missing_answers": len(answers), "plans_with_changed_weights": len(plans)}


def _damaged(journal: JournalReader) -> int:
    """Tasks whose answers cannot be read as they were written, by the CRC of each record."""
    count = 0
    for task in journal.tasks():
        try:
            journal.answers(task)
        except JournalError:
            count += 1
    return count


def _told(fault: Fault, faults: Sequence[Fault], journal: JournalReader) -> dict[str, Any]:
    """A fault with how long it took to be noticed and made good; null where the driver was ended before that."""
    role = fault.worker.partition("-")[0]
    until = min((f.time for f in faults if f.time > fault.time and not f.worker), default=float("inf"))

    def first(kind: str, since: float, **words: str) -> tuple[float, dict[str, Any]] | None:
        for event in sorted(journal.events(kind), key=lambda event: event.time):
            says = all(str(event.detail.get(key, "")).startswith(word) for key, word in words.items())
            if since <= event.time < until and says:
                return event.time, event.detail
        return None

    told: dict[str, Any] = {"kind": fault.kind, "worker": fault.worker, "plan": fault.plan, "time": fault.time}
    told |= {"noticed_s": None, "replaced_s": None}
    by_name = {"worker": fault.worker} if fault.kind in REPLACED else {}
    noticed = first(NOTICED.get(fault.kind, "started"), fault.time, **by_name)
    if noticed is None:
        return told
    by_role = {"worker": f"{role}-"} if fault.kind in REPLACED else {}
    replaced = first(REPLACED.get(fault.kind, "learner_ready"), noticed[0], **by_role)
    told["noticed_s"] = noticed[0] - fault.time
    if replaced is not None:
        told["replaced_s"] = replaced[0] - fault.time
        if "redo_s" in replaced[1]:
            redo = float(replaced[1]["redo_s"])
            told |= {"redo_s": redo, "without_redo_s": told["replaced_s"] - redo}
    return told


def _summary(kind: str, injected: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Count, and the median and the largest of each time."""
    own = [fault for fault in injected if fault["kind"] == kind]
    facts: dict[str, Any] = {"count": len(own)}
    for name in ("noticed_s", "replaced_s", "redo_s", "without_redo_s"):
        times = [fault[name] for fault in own if fault.get(name) is not None]
        if times:
            facts[name] = {"median": median(times), "max": max(times)}
    return facts


def _split(run_dir: Path, wall_s: float) -> dict[str, float]:
    """Where the time of a run went, by its metrics; `outside` is what no plan has in its own: starts, redo, ends."""
    totals: dict[str, float] = {}
    for row in read_metrics(run_dir):
        for name, value in row.items():
            if name.startswith("time/"):
                part = name.removeprefix("time/")
                totals[part] = totals.get(part, 0.0) + float(value or 0.0)
    inside = sum(totals.get(part, 0.0) for part in ("total", "eval", "checkpoint"))
    totals.pop("total", None)
    return {**totals, "outside": wall_s - inside}
