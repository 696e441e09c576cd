"""What must hold when a run has ended: read from its files, and compared with the same run without any fault."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cauce import checkpoint
from cauce.algorithms.table import Algorithm
from cauce.journal import Journal, JournalReader
from cauce.runtime.flow import MIN_SCORED, POISON_DEATHS
from cauce.runtime.learn import LearnerVerbs
from cauce.runtime.recovery import redo
from cauce.simulate.invariants import Witness, content
from cauce.simulate.roles import TRAITS, ScriptedLearner, expected_outcome
from cauce.simulate.script import Script, Violation
from cauce.types import Batch, ScoredBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A finished run, as far as another may be compared with it."""

    plans: tuple[tuple[Any, ...], ...]  # number, state, checksum, tasks
    drops: frozenset[tuple[int, str]]
    is_comparable: bool  # one machine, and every outcome is the one that the reward gives without a fault


def check_ended(
    run_dir: Path, witness: Witness, settings: dict[str, Any], algorithm: Algorithm, *, machines: int
) -> Ended:
    """Raises Violation for anything that may not be in the record of a finished run."""
    rows = witness.rows
    for what, query in (
        ("tasks in no terminal state", "SELECT id, state FROM task WHERE state NOT IN ('trained', 'dropped')"),
        ("plans that were never decided", "SELECT number FROM plan WHERE state = 'planned'"),
    ):
        if found := rows(query):
            raise Violation(f"the run has ended with {what}: {found[:5]}")
    plans = rows("SELECT number, state, checksum FROM plan ORDER BY number")
    if len(plans) != settings["run.plans"]:
        raise Violation(f"the run has ended after {len(plans)} plans of {settings['run.plans']}")
    _check_metrics(run_dir, len(plans))
    with Journal.read_only(run_dir) as journal:
        is_as_scored = _check_samples(journal, witness)
        _check_drops(journal, witness, settings)
        _check_weights(run_dir, journal, algorithm, is_one_lineage=machines == 1)
    uses: dict[int, list[int]] = {number: [] for number, _, _ in plans}
    for number, task in rows("SELECT plan, task FROM plan_use ORDER BY plan, position"):
        uses[number].append(task)
    return Ended(
        plans=tuple((number, state, checksum, tuple(uses[number])) for number, state, checksum in plans),
        drops=frozenset(rows("SELECT id, reason FROM task WHERE state = 'dropped'")),
        is_comparable=is_as_scored and machines == 1,
    )


def check_equal(ended: Ended, undisturbed: Ended) -> bool:
    """Of a synchronous run: faults that took away no task have changed nothing. False if they did take one."""
    if ended.drops != undisturbed.drops:
        return False
    for ours, other in zip(ended.plans, undisturbed.plans, strict=True):
        if ours != other:
            raise Violation(f"with faults plan {ours[0]} is {ours[1:]}, and without {other[1:]}")
    return True


def _check_metrics(run_dir: Path, num_plans: int) -> None:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    found = [line["plan"] for line in lines if line["plan"] > 0]
    if found != list(range(1, num_plans + 1)):
        raise Violation(f"metrics.jsonl has the plans {found}, and {num_plans} were made")


def _check_samples(journal: JournalReader, witness: Witness) -> bool:
    """Every recorded answer is one that an engine gave; says whether every outcome is the reward's own."""
    is_as_scored = True
    for task, row in witness.rows("SELECT id, source FROM task"):
        outcomes = witness.rows("SELECT status, value FROM sample WHERE task = ? ORDER BY idx", task)
        for answer, (status, value) in zip(journal.answers(task), outcomes, strict=True):
            if content(answer) not in witness.answers.get((task, answer.index), ()):
                raise Violation(f"answer {task}[{answer.index}] on record is none that an engine gave")
            text = " ".join(str(int(token)) for token in answer.token_ids if token)
            expected = expected_outcome(row, text)
            if status == "scored" and value != expected.value:
                raise Violation(f"answer {task}[{answer.index}] has the reward {value} instead of {expected.value}")
            is_as_scored &= status is None or status == expected.status
    return is_as_scored


def _check_drops(journal: JournalReader, witness: Witness, settings: dict[str, Any]) -> None:
    """No task is given up without the cause that is stated."""
    for task, reason in witness.rows("SELECT id, reason FROM task WHERE state = 'dropped'"):
        if not _is_true(reason, task, journal, witness, settings):
            raise Violation(f"task {task} was dropped as {reason}, and that is not so")


def _is_true(reason: str, task: int, journal: JournalReader, witness: Witness, settings: dict[str, Any]) -> bool:
    query = "SELECT value, finish_reason FROM sample WHERE task = ? AND status = 'scored'"
    scored = witness.rows(query, task)
    match reason:
        case "too_long":
            return int(journal.task(task).prompt_ids[0]) in (TRAITS["long"], TRAITS["aborts"])
        case "poison":
            return witness.deaths[task] >= POISON_DEATHS
        case "unscorable":
            return len(scored) < MIN_SCORED
        case "no_signal":
            masked = settings["algorithm.mask_truncated"]
            counted = {value for value, end in scored if not (masked and end == "length")}
            return settings["algorithm.dynamic_sampling"] and len(counted) < 2
        case "stale":
            return settings["buffer.max_staleness"] > 0
        case "non_finite":
            return bool(witness.rows("SELECT 1 FROM plan_use WHERE task = ?", task))
        case _:
            return reason == "run_complete"


class _InProcess(LearnerVerbs):
    """A learner of this process, for a redo."""

    def __init__(self, learner: ScriptedLearner) -> None:
        self._learner = learner

    def score(self, groups: Any, *, proximal: bool) -> ScoredBatch:
        return self._learner.score(groups=groups, proximal=proximal)

    def forward_backward(self, batch: Batch) -> dict[str, float]:
        return self._learner.forward_backward(batch=batch)

    def optim_step(self) -> dict[str, float]:
        return self._learner.optim_step()

    def checksum(self) -> str:
        return self._learner.checksum()


def _check_weights(run_dir: Path, journal: JournalReader, algorithm: Algorithm, *, is_one_lineage: bool) -> None:
    """The last checkpoint has taken every step of every plan once, in order; so does a replay of the record."""
    learner = ScriptedLearner(Script(0))
    result = redo(_InProcess(learner), journal=journal, algorithm=algorithm, after=0)
    if result.divergence is not None and is_one_lineage:
        raise Violation(f"a replay of the record differs: {result.divergence}")
    newest = checkpoint.latest(run_dir)
    if newest is None or newest[0] != journal.last_plan:
        raise Violation(f"the newest checkpoint of the ended run is {newest}")
    state = json.loads((newest[1] / "state.json").read_text())
    if state["trained"] != learner.trained:
        raise Violation(f"the last weights have taken the steps {state['trained']}, on record are {learner.trained}")
    if is_one_lineage and state["weights"] != learner.weights.hex():
        raise Violation("the last checkpoint holds other weights than a replay of the record gives")
