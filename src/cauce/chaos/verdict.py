"""What the two records of a chaos run say: what was lost, what was done twice, and what the faults have cost."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from cauce.journal import Journal, JournalReader
from cauce.metrics.writer import read_metrics

# A fault's kind -> the event that tells of it, and the one that says it is made good.
NOTICED = {"rollout": "worker_died", "hang": "worker_died", "reward": "worker_died", "learner": "learner_died"}
REPLACED = {"rollout": "worker_started", "hang": "worker_started", "reward": "worker_started"}
ROLES = {"rollout": "rollout-", "hang": "rollout-", "reward": "reward-"}
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
    with Journal.read_only(run_dir) as journal:
        states = dict(journal.select("SELECT state, COUNT(*) FROM task GROUP BY state"))
        max_reuse = int(journal.meta["max_reuse"])
        used = journal.select("SELECT task, COUNT(*) FROM plan_use GROUP BY task")
        again = journal.select(
            "SELECT lease.task, idx FROM lease, json_each(lease.indices) JOIN sample ON sample.task = lease.task "
            "AND sample.idx = json_each.value WHERE lease.attempt > sample.attempt"
        )
        asked = journal.select("SELECT COUNT(*) FROM lease, json_each(lease.indices)")[0][0]
        injected = [_told(fault, journal) for fault in faults]
    after, peace = read_record(run_dir), read_record(undisturbed)
    return {
        "lost": sum(count for state, count in states.items() if state not in TERMINAL) + _missing(before, after),
        "trained_twice": sum(count > max_reuse for _, count in used),
        "regenerated": len(again),
        "effective": undisturbed_s / wall_s,
        "wall_s": {"undisturbed": undisturbed_s, "disturbed": wall_s},
        "plans": {"undisturbed": peace.plan, "disturbed": after.plan},
        "plans_with_equal_weights": sum(after.checksums.get(plan) == sum_ for plan, sum_ in peace.checksums.items()),
        "tasks": states,
        "answers": len(after.answers),
        "asked_for_again": asked - len(after.answers),  # under way when a fault came, and not recorded yet
        "by_kind": {kind: _summary(kind, injected) for kind in dict.fromkeys(fault.kind for fault in faults)},
        "seconds": {"undisturbed": _split(undisturbed, undisturbed_s), "disturbed": _split(run_dir, wall_s)},
        "faults": injected,
        "runs": {"undisturbed": str(undisturbed), "disturbed": str(run_dir)},
    }

def _missing(before: Sequence[Record], after: Record) -> int:
    """Answers and weights that were acknowledged when a fault came, and are not on record as they were."""
    answers = {key for record in before for key, place in record.answers.items() if after.answers.get(key) != place}
    plans = {plan for record in before for plan, sum_ in record.checksums.items() if after.checksums.get(plan) != sum_}
    return len(answers) + len(plans)

def _told(fault: Fault, journal: JournalReader) -> dict[str, Any]:
    """A fault with how long it took to be noticed and made good; null where the record does not say."""

    def first(kind: str, role: str = "") -> tuple[float | None, dict[str, Any]]:
        for event in journal.events(kind):
            if event.time >= fault.time and str(event.detail.get("worker", "")).startswith(role):
                return event.time - fault.time, event.detail
        return None, {}

    role = ROLES.get(fault.kind, "")
    noticed, _ = first(NOTICED.get(fault.kind, "started"), role)
    replaced, detail = first(REPLACED.get(fault.kind, "learner_ready"), role)
    told = {"kind": fault.kind, "plan": fault.plan, "time": fault.time, "noticed_s": noticed, "replaced_s": replaced}
    if fault.kind not in REPLACED and replaced is not None:
        redo = float(detail["redo_s"])
        told |= {"redo_s": redo, "without_redo_s": replaced - redo}
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
                totals[part] = totals.get(part, 0.0) + value
    inside = sum(totals.get(part, 0.0) for part in ("total", "eval", "checkpoint"))
    totals.pop("total", None)
    return {**totals, "outside": wall_s - inside}

