"""Training tasks on their way from the data to the buffer.

    admit -> lease -> (answers, durable) -> (outcomes, durable) -> ready, or dropped with a reason

Consumes: answers, outcomes and losses from the exchange. Waits for nothing itself. Produces: accepted groups. Every
step is in the journal before anything depends on it; what a crash leaves half done, `restore` takes up again, asking
only for answers that are missing.

A worker that dies with several tasks accuses none of them: they become suspects, and get a worker for themselves, one
suspect at a time. Only a death with a single task counts towards poison. Both are in the record, so that a resume
goes on with the same suspects.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cauce.algorithms.advantages import has_reward_spread
from cauce.algorithms.table import Algorithm
from cauce.errors import DataError, RewardError
from cauce.faults import fault_point
from cauce.journal import Journal
from cauce.runtime.pool import Lost, RolloutPool
from cauce.runtime.reward_pool import RewardPool, ScoredJob, ScoreJob
from cauce.runtime.tasks import TaskSource
from cauce.runtime.world import Clock
from cauce.types import Completion, DropReason, GenerationRequest, Group, Outcome, Sampling

LEASE_S = 120.0
POISON_DEATHS = 3
MIN_SCORED = 2
AMONG_OTHERS = "its worker died among several tasks: "  # begins the recorded end of a suspect's lease


@dataclass(slots=True, kw_only=True)
class Tally:
    """Counts since the last plan; the trainer reads and resets them."""

    scored: int = 0
    unscored: int = 0
    first_failure: str = ""
    aborted: int = 0  # tasks that only the engine could tell to be too long
    drops: dict[str, int] = field(default_factory=dict)
    reward_metrics: dict[str, list[float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowSettings:
    """What the flow needs of the recipe."""

    group_size: int
    sampling: Sampling
    dynamic_sampling: bool
    algorithm: Algorithm  # which answers count in a group
    max_failure_rate: float
    max_steps: int


class RolloutFlow:
    """The desk of training tasks."""

    def __init__(
        self,
        *,
        journal: Journal,
        pool: RolloutPool,
        rewards: RewardPool,
        source: TaskSource,
        settings: FlowSettings,
        clock: Clock,
        on_ready: Callable[[Group], None],
    ) -> None:
        self._journal = journal
        self._pool = pool
        self._rewards = rewards
        self._source = source
        self._settings = settings
        self._clock = clock
        self._on_ready = on_ready
        self._open: set[int] = set()  # admitted, neither ready nor dropped
        self._until: dict[int, float] = {}  # when the lease of an open task ends
        self._suspects: deque[int] = deque()  # a worker died while it held them; none of these is leased
        self._suspect: int | None = None  # the one that is tried now, alone
        self.version = 0
        self.num_answers = 0  # since the last plan
        self.tally = Tally()

    def undecided(self) -> set[int]:
        """Admitted tasks of which nobody knows yet whether they will be accepted."""
        return set(self._open)

    def reset_tally(self) -> None:
        """A plan has been reported; counting begins anew."""
        self.tally = Tally()
        self.num_answers = 0

    def admit(self, num: int) -> None:
        """Takes the next rows of the data; prompts that are too long are admitted and dropped, with a count."""
        if num <= 0:
            return
        admitted = too_long_in_a_row = 0
        with self._journal.transaction():
            while admitted < num:
                task = self._source.task(self._journal.next_task_id)
                self._journal.admit([task])
                if self._source.is_too_long(task):
                    self._drop(task.id, "too_long", f"{len(task.prompt_ids)} tokens")
                    too_long_in_a_row += 1
                    self._refuse_only_long(too_long_in_a_row)
                    continue
                self._open.add(task.id)
                self._dispatch(task.id, tuple(range(self._settings.group_size)))
                admitted, too_long_in_a_row = admitted + 1, 0
        fault_point("after_lease")

    def restore(self) -> None:
        """Takes up what the record holds unfinished: missing answers first, then missing outcomes; suspects alone."""
        for task in self._journal.tasks("leased"):
            self._journal.release(task, counts_as_death=False, reason="the driver stopped")
        for task in self._journal.tasks("pending"):
            self._open.add(task)
            missing = self._journal.missing(task, self._settings.group_size)
            if not missing:
                self._settle(task)
            elif self._was_suspect(task):
                self._suspects.append(task)
            else:
                self._dispatch(task, missing)
        self._try_suspect()

    def on_answers(self, completions: Sequence[Completion]) -> None:
        """Records answers, and sends a group to the reward once it is complete."""
        aborted = {completion.task for completion in completions if completion.finish_reason == "aborted"}
        for task in sorted(aborted & self._open):
            self._drop(task, "too_long", "the prompt leaves no room in the model's context")
            self.tally.aborted += 1
        completions = [completion for completion in completions if completion.task not in aborted]
        fault_point("answers_arrived")
        self.num_answers += sum(self._journal.record_answers(completions))
        fault_point("answers_recorded")
        for task in dict.fromkeys(completion.task for completion in completions):
            if task in self._open and not self._journal.missing(task, self._settings.group_size):
                self._settle(task)

    def on_lost(self, lost: Sequence[Lost]) -> None:
        """A worker is gone: its tasks are leased again for what is missing, alone if it had begun them, or dropped as
        poison."""
        for item in lost:
            task, cause = item.request.task, item.cause.splitlines()[0]
            if task not in self._open:
                continue
            was_alone = item.num_held == 1
            reason = f"{AMONG_OTHERS}{cause}" if item.num_held > 1 else cause
            deaths = self._journal.release(task, counts_as_death=was_alone, reason=reason)
            if was_alone and deaths >= POISON_DEATHS:
                self._drop(task, "poison", f"{deaths} workers died on it; the last: {cause}")
            elif task == self._suspect or not item.num_held:
                self._dispatch_missing(task)
            else:
                self._suspects.append(task)
        self._try_suspect()

    def on_scored(self, scored: Sequence[ScoredJob]) -> None:
        """Records outcomes and decides each group: accepted, or dropped with a reason."""
        fault_point("outcomes_arrived")
        with self._journal.transaction():
            for item in scored:
                task = item.job.key
                if task not in self._open:
                    continue
                self._count(item)
                outcomes = enumerate(item.outcomes)
                self._journal.record_outcomes([(task, index, outcome) for index, outcome in outcomes])
                self._decide(task)
        fault_point("outcomes_recorded")
        self._check_failures()

    def on_progress(self, tasks: set[int]) -> None:
        """Tokens came in: leases that have passed half of their time live on."""
        now = self._clock.now()
        alive = [task for task in sorted(tasks & self._open) if self._until.get(task, now) - now < LEASE_S / 2]
        if alive:
            self._journal.renew(alive, until=now + LEASE_S)
            self._until.update(dict.fromkeys(alive, now + LEASE_S))

    def _dispatch(self, task: int, indices: tuple[int, ...]) -> None:
        """The lease is durable before the request leaves: the pool sends it with the next turn."""
        until = self._clock.now() + LEASE_S
        self._until[task] = until
        alone = task == self._suspect
        worker = self._pool.next_worker(alone=alone)
        attempt = self._journal.lease(task, indices=indices, worker=worker, version=self.version, until=until)
        fault_point("lease_open")
        self._pool.submit(
            GenerationRequest(
                task=task,
                attempt=attempt,
                indices=indices,
                prompt_ids=self._journal.task(task).prompt_ids,
                sampling=self._settings.sampling,
            ),
            alone=alone,
        )

    def _dispatch_missing(self, task: int) -> None:
        if missing := self._journal.missing(task, self._settings.group_size):
            self._dispatch(task, missing)

    def _was_suspect(self, task: int) -> bool:
        """Of a task with answers missing: by all its leases, since only its last answer would have acquitted it."""
        ends = self._journal.lease_ends(task)
        return self._journal.deaths(task) > 0 or any(end.startswith(AMONG_OTHERS) for end in ends)

    def _try_suspect(self) -> None:
        while self._suspect is None and self._suspects:
            task = self._suspects.popleft()
            if task in self._open:
                self._suspect = task
                self._dispatch_missing(task)

    def _acquit(self, task: int) -> None:
        """All answers are there, or the task is closed: the next suspect's turn."""
        if task == self._suspect:
            self._suspect = None
            self._try_suspect()

    def _settle(self, task: int) -> None:
        """All answers are there: decide from the record, or ask the reward."""
        self._acquit(task)
        if not self._journal.unscored(task):
            self._decide(task)
            return
        row = self._journal.task(task).row
        completions = self._journal.answers(task)
        self._rewards.submit(
            ScoreJob(
                key=task,
                row=row,
                texts=tuple(self._source.answer_text(c.token_ids) for c in completions),
                token_ids=tuple(tuple(c.token_ids.tolist()) for c in completions),
                step=self.version,
                max_steps=self._settings.max_steps,
            )
        )

    def _decide(self, task: int) -> None:
        group = self._journal.group(task)
        scored = [s.outcome.value for s in group.samples if s.outcome.status == "scored"]
        if len(scored) < MIN_SCORED:
            detail = next((s.outcome.detail for s in group.samples if s.outcome.detail), "")
            self._drop(task, "unscorable", f"{len(scored)} of {len(group.samples)} answers have a reward; {detail}")
        elif self._settings.dynamic_sampling and not has_reward_spread(self._settings.algorithm, group):
            self._drop(task, "no_signal", f"the rewards are {scored}, equal in all answers that count")
        else:
            self._journal.mark_ready(task)
            self._close(task)
            self._on_ready(group)

    def _drop(self, task: int, reason: DropReason, detail: str) -> None:
        self._journal.drop(task, reason, detail=detail)
        self._close(task)
        self._pool.cancel(task)
        self.tally.drops[reason] = self.tally.drops.get(reason, 0) + 1

    def _close(self, task: int) -> None:
        self._open.discard(task)
        self._until.pop(task, None)
        self._acquit(task)

    def _refuse_only_long(self, in_a_row: int) -> None:
        # So many in a row hold a whole epoch, wherever they begin: two orders can have their long prompts side by side.
        if in_a_row >= 2 * len(self._source) - 1:
            raise DataError(
                f"every one of the {len(self._source)} prompts has more than {self._source.max_prompt_tokens} tokens; "
                "raise data.max_prompt_tokens as far as the model's context allows, or shorten the prompts"
            )

    def _count(self, item: ScoredJob) -> None:
        for outcome in item.outcomes:
            if outcome.status == "scored":
                self.tally.scored += 1
            elif outcome.status in ("failed", "timed_out"):
                self.tally.unscored += 1
                self.tally.first_failure = self.tally.first_failure or _describe(outcome)
        for name, value in item.metrics.items():
            self.tally.reward_metrics.setdefault(name, []).append(value)

    def _check_failures(self) -> None:
        total = self.tally.scored + self.tally.unscored
        if self.tally.unscored < 2 * self._settings.group_size or not total:
            return  # too few to speak of a rate
        rate = self.tally.unscored / total
        if rate > self._settings.max_failure_rate:
            raise RewardError(
                f"{self.tally.unscored} of {total} rewards failed or timed out, above reward.max_failure_rate="
                f"{self._settings.max_failure_rate:g}. The first: {self.tally.first_failure}"
            )


def _describe(outcome: Outcome) -> str:
    return f"{outcome.status}: {outcome.detail}"
