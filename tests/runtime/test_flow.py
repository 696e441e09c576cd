"""Training tasks against a real journal, with scripted workers: deaths, poison, failures, lengths, restore."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cauce.algorithms.advantages import train_sequences
from cauce.errors import DataError, JournalError, RewardError
from cauce.journal import Journal
from cauce.rewards.reward import RewardResult
from cauce.runtime.flow import FlowSettings, RolloutFlow
from cauce.runtime.roles import WorkResult
from cauce.runtime.world import WorkerDied
from cauce.types import GenerationRequest, Group, Outcome, Plan, Row, ScoredBatch, Task
from tests.algorithms.cases import algorithm, first_advantages
from tests.fakes import GREEDY, ScriptedRollout
from tests.runtime.rig import PoolRig


class Source:
    """Tasks with a prompt of `lengths[i]` tokens, cycling."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = list(lengths)
        self.max_prompt_tokens = 8

    def __len__(self) -> int:
        return len(self.lengths)

    def task(self, number: int) -> Task:
        row = Row(id=f"train:{number % len(self)}", prompt="p", columns={"answer": "1"})
        ids = np.arange(self.lengths[number % len(self)], dtype=np.int32)
        return Task(id=number, row=row, content_hash="h", prompt_ids=ids)

    def is_too_long(self, task: Task) -> bool:
        return len(task.prompt_ids) > self.max_prompt_tokens

    def answer_text(self, token_ids: np.ndarray) -> str:
        return "text"


class Scorer:
    """A reward worker whose outcomes come from a function of the row's id."""

    def __init__(self, outcomes: Callable[[str, int], list[Outcome]]) -> None:
        self.outcomes = outcomes

    def score(self, *, rows: Sequence[Row], texts: Sequence[str], **_: Any) -> RewardResult:
        return RewardResult(outcomes=self.outcomes(rows[0].id, len(texts)), metrics={})

    def score_many(self, *, jobs: Sequence[dict[str, Any]]) -> list[RewardResult]:
        return [self.score(**job) for job in jobs]


class Mortal(ScriptedRollout):
    """Dies of any task that is poison, whatever else it holds."""

    def __init__(self, script: Sequence[str], poison: set[int]) -> None:
        super().__init__(script)
        self.poison = poison
        self.seen: list[set[int]] = []

    def work(self, *, requests: Sequence[GenerationRequest], **kwargs: Any) -> WorkResult:
        self.seen.append({request.task for request in [*self.requests, *requests]})
        if self.poison & self.seen[-1]:
            raise WorkerDied("out of memory")
        return super().work(requests=requests, **kwargs)


def scored(value: float) -> Outcome:
    return Outcome(status="scored", value=value, parts={}, detail="")


def failed() -> Outcome:
    return Outcome(status="failed", value=None, parts={}, detail="ValueError: no")


def mixed(row: str, n: int) -> list[Outcome]:
    return [scored(float(i % 2)) for i in range(n)]


class Rig(PoolRig):
    def __init__(
        self,
        journal: Journal,
        *,
        lengths: Sequence[int] = (3,),
        scripts: dict[str, list[str]] | None = None,
        outcomes: Callable[[str, int], list[Outcome]] = mixed,
        dynamic: bool = False,
        group_size: int = 2,
        actors: int = 1,
        poison: Sequence[int] = (),
        mask_truncated: bool = False,
    ) -> None:
        self.poison = set(poison)
        self.ready: list[int] = []
        self.rollouts: list[Mortal] = []
        super().__init__(lambda name: self.make(name, scripts or {}, outcomes), actors=actors, timeout_s=5)
        self.journal = journal
        self.flow = RolloutFlow(
            journal=journal,
            pool=self.pool,
            rewards=self.rewards,
            source=Source(lengths),  # type: ignore[arg-type]
            settings=FlowSettings(
                group_size=group_size,
                sampling=GREEDY,
                dynamic_sampling=dynamic,
                algorithm=algorithm(mask_truncated=mask_truncated),
                max_failure_rate=0.5,
                max_steps=9,
            ),
            clock=self.clock,
            on_ready=self.take,
        )
        self.exchange.training = self.flow

    def take(self, group: Group) -> None:
        self.ready.append(group.task)

    def make(self, name: str, scripts: dict[str, list[str]], outcomes: Any) -> Any:
        if name.startswith("reward"):
            return Scorer(outcomes)
        self.rollouts.append(Mortal(scripts.get(name, scripts.get("*", [])), self.poison))
        return self.rollouts[-1]

    def turns(self, num: int) -> None:
        for _ in range(num):
            self.clock.sleep(50.0)
            self.exchange.turn()


@pytest.fixture
def journal(tmp_path: Path):
    with Journal.create(tmp_path / "run", meta={"group_size": "2"}) as journal:
        yield journal


def test_tasks_become_ready_groups(journal: Journal) -> None:
    rig = Rig(journal)
    rig.flow.admit(3)
    assert rig.flow.undecided() == {0, 1, 2}
    rig.turns(4)
    assert sorted(rig.ready) == [0, 1, 2]
    assert journal.counts()["ready"] == 3
    assert rig.flow.undecided() == set()


def test_the_lease_is_recorded_before_the_request_leaves(journal: Journal) -> None:
    rig = Rig(journal)
    rig.flow.admit(1)
    assert [lease.task for lease in journal.leases()] == [0]
    assert rig.rollouts == []  # not even a worker was asked


def test_a_death_leases_again_only_what_is_missing(journal: Journal) -> None:
    """H17: each prompt is trained on once, and no answer is asked for twice."""
    rig = Rig(journal, scripts={"rollout-0": ["die"]})
    rig.flow.admit(1)
    rig.turns(5)
    assert rig.ready == [0]
    assert journal.deaths(0) == 1
    assert len(journal.answers(0)) == 2


def test_a_task_that_kills_three_workers_is_poison(journal: Journal) -> None:
    rig = Rig(journal, scripts={"*": ["die"]})
    rig.flow.admit(1)
    rig.turns(8)
    assert journal.drops() == {"poison": 1}
    assert rig.flow.tally.drops == {"poison": 1}
    assert rig.flow.undecided() == set()


@pytest.mark.parametrize("actors", [1, 2])
@pytest.mark.parametrize("poison", [0, 1, 2])
def test_only_the_task_that_kills_is_poison(journal: Journal, poison: int, actors: int) -> None:
    """Those that a worker held beside it are not accused of its death."""
    rig = Rig(journal, poison=[poison], actors=actors)
    rig.flow.admit(3)
    rig.turns(16)
    assert journal.drops() == {"poison": 1}
    assert journal.state(poison) == "dropped"
    assert sorted(rig.ready) == sorted({0, 1, 2} - {poison})
    assert [journal.deaths(task) for task in rig.ready] == [0, 0]
    assert rig.flow.undecided() == set()


def test_a_suspect_is_alone_with_its_worker_while_new_tasks_are_admitted(journal: Journal) -> None:
    rig = Rig(journal, poison=[1])
    rig.flow.admit(3)
    for _ in range(20):
        rig.turns(1)
        rig.flow.admit(3 - len(rig.flow.undecided()))
    assert journal.drops() == {"poison": 1}
    joint = [seen for rollout in rig.rollouts for seen in rollout.seen if 1 in seen and len(seen) > 1]
    assert joint == [{0, 1, 2}]
    assert {0, 2, 3, 4, 5} <= set(rig.ready)


def test_suspects_stay_suspects_when_the_run_is_resumed(tmp_path: Path) -> None:
    """Their worker died before the stop; put together again, they would all be accused of the next death."""
    with Journal.create(tmp_path / "run", meta={"group_size": "2"}) as journal:
        rig = Rig(journal, poison=[1])
        rig.flow.admit(3)
        rig.turns(1)
        assert [seen for rollout in rig.rollouts for seen in rollout.seen] == [{0, 1, 2}]
    with Journal.open(tmp_path / "run") as journal:
        again = Rig(journal, poison=[1])
        again.flow.restore()
        again.turns(20)
        assert [seen for rollout in again.rollouts for seen in rollout.seen if len(seen) > 1] == []
        assert journal.drops() == {"poison": 1}
        assert sorted(again.ready) == [0, 2]
        assert [journal.deaths(task) for task in (0, 2)] == [0, 0]


def test_a_task_that_killed_a_worker_is_alone_after_a_resume_and_its_deaths_count_on(tmp_path: Path) -> None:
    with Journal.create(tmp_path / "run", meta={"group_size": "2"}) as journal:
        rig = Rig(journal, poison=[0])
        rig.flow.admit(1)
        rig.turns(1)
        rig.flow.admit(2)
        assert journal.deaths(0) == 1
    with Journal.open(tmp_path / "run") as journal:
        again = Rig(journal, poison=[0])
        again.flow.restore()
        again.turns(12)
        alone = [seen for rollout in again.rollouts for seen in rollout.seen if 0 in seen]
        assert alone == [{0}, {0}]
        assert journal.drops() == {"poison": 1}
        assert sorted(again.ready) == [1, 2]


def test_too_few_scores_drop_the_group_and_a_failure_is_never_zero(journal: Journal) -> None:
    """E5, E6."""
    rig = Rig(journal, outcomes=lambda row, n: [scored(1.0), failed()])
    rig.flow.admit(1)
    rig.turns(4)
    assert journal.drops() == {"unscorable": 1}
    statuses = [s.outcome.status for s in journal.group(0).samples]
    assert statuses == ["scored", "failed"]


def test_failures_above_the_rate_stop_with_the_first_traceback(journal: Journal) -> None:
    """E6."""
    rig = Rig(journal, outcomes=lambda row, n: [failed()] * n)
    rig.flow.admit(3)
    with pytest.raises(RewardError, match=r"max_failure_rate=0\.5.*ValueError: no"):
        rig.turns(6)


def test_seven_of_eight_scores_are_trained_on_and_the_eighth_is_no_zero(tmp_path: Path) -> None:
    """E5, E6: one of eight raises; the other seven are a group, with statistics of their own."""

    def one_fails(row: str, n: int) -> list[Outcome]:
        return [failed() if i == 2 else scored(float(i % 2)) for i in range(n)]

    with Journal.create(tmp_path / "run", meta={"group_size": "8"}) as journal:
        rig = Rig(journal, outcomes=one_fails, group_size=8)
        rig.flow.admit(1)
        rig.turns(4)
        assert rig.ready == [0]
        assert (rig.flow.tally.scored, rig.flow.tally.unscored) == (7, 1)
        assert rig.flow.tally.first_failure == "failed: ValueError: no"
        batch = ScoredBatch(groups=(journal.group(0),), proximal_logps=None, reference_logps=None)
    got = first_advantages(train_sequences(algorithm(), batch))
    values = np.asarray([0.0, 1, 1, 0, 1, 0, 1])
    np.testing.assert_allclose(got, (values - values.mean()) / values.std(ddof=1), rtol=1e-5)


def test_an_aborted_answer_is_in_no_record_and_its_task_is_replaced(journal: Journal) -> None:
    """E7, C20: the prompt leaves no room in the model's context, which only the engine could know."""
    rig = Rig(journal, scripts={"rollout-0": ["abort"]})
    rig.flow.admit(1)
    rig.turns(2)
    assert journal.drops() == {"too_long": 1}
    assert journal.answers(0) == ()
    assert rig.flow.undecided() == set()
    rig.flow.admit(1)
    rig.turns(3)
    assert rig.ready == [1]
    with pytest.raises(JournalError, match="task 0 is dropped"):
        journal.write_plan(Plan(number=1, tasks=(0, 1), mini_batches=((0, 1),)))


def test_ten_prompts_on_four_actors_are_ten_groups(journal: Journal) -> None:
    """F14."""
    rig = Rig(journal, actors=4)
    rig.flow.admit(10)
    rig.turns(12)
    assert sorted(rig.ready) == list(range(10))
    assert len(rig.rollouts) == 4
    assert journal.counts()["ready"] == 10


def test_a_stuck_reward_is_killed_and_its_group_timed_out(journal: Journal) -> None:
    """E3: the pool does not shrink; the next group scores."""
    rig = Rig(journal)
    rig.flow.admit(1)
    rig.workers.held.add("reward-0")
    rig.turns(4)
    assert rig.workers.killed == ["reward-0"]
    assert journal.drops() == {"unscorable": 1}
    assert journal.group(0).samples[0].outcome.status == "timed_out"
    rig.flow.admit(1)
    rig.turns(4)
    assert rig.ready == [1]


def test_prompts_that_are_too_long_are_dropped_with_a_count_and_others_go_on(journal: Journal) -> None:
    """C18, C20."""
    rig = Rig(journal, lengths=(99, 3))
    rig.flow.admit(2)
    rig.turns(4)
    assert journal.drops() == {"too_long": 2}
    assert sorted(rig.ready) == [1, 3]


def test_only_prompts_that_are_too_long_is_an_error(journal: Journal) -> None:
    """C18."""
    rig = Rig(journal, lengths=(99, 98))
    with pytest.raises(DataError, match="every one of the 2 prompts has more than 8 tokens"):
        rig.flow.admit(1)


def test_dynamic_sampling_drops_groups_of_equal_rewards(journal: Journal) -> None:
    """D10."""
    rig = Rig(journal, outcomes=lambda row, n: [scored(1.0)] * n, dynamic=True)
    rig.flow.admit(2)
    rig.turns(4)
    assert journal.drops() == {"no_signal": 2}
    assert rig.ready == []


def test_dynamic_sampling_asks_for_a_difference_among_the_answers_that_count(journal: Journal) -> None:
    """An answer that is cut off and masked is trained on no more than its reward counts."""
    rig = Rig(journal, scripts={"*": ["cut"]}, outcomes=lambda row, n: [scored(0.0), scored(1.0), scored(1.0)],
              dynamic=True, mask_truncated=True, group_size=3)  # fmt: skip
    rig.flow.admit(1)
    rig.turns(4)
    assert journal.drops() == {"no_signal": 1}
    assert rig.ready == []


def test_dynamic_sampling_sees_no_difference_in_rounding(journal: Journal) -> None:
    rig = Rig(journal, outcomes=lambda row, n: [scored(0.3), scored(0.1 + 0.2)], dynamic=True)
    rig.flow.admit(1)
    rig.turns(4)
    assert journal.drops() == {"no_signal": 1}


def test_what_was_under_way_is_taken_up_again(tmp_path: Path) -> None:
    with Journal.create(tmp_path / "run", meta={"group_size": "2"}) as journal:
        rig = Rig(journal, scripts={"rollout-0": ["wait", "wait", "wait"]})
        rig.flow.admit(2)
        rig.turns(2)
    with Journal.open(tmp_path / "run") as journal:
        again = Rig(journal)
        again.flow.restore()
        again.turns(4)
        assert sorted(again.ready) == [0, 1]
        assert journal.next_task_id == 2
        assert journal.deaths(0) == 0  # the driver's stop is not the task's fault


def test_leases_are_renewed_by_progress_and_only_when_half_is_gone(journal: Journal) -> None:
    rig = Rig(journal, scripts={"rollout-0": ["wait"] * 5})
    rig.flow.admit(1)
    first = journal.leases()[0].until
    rig.turns(1)
    assert journal.leases()[0].until == first
    rig.turns(1)
    assert journal.leases()[0].until > first
