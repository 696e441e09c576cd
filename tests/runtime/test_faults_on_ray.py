"""Failures caused for real on one machine: signals, dying engines and rewards, inf, a full disk.

Each run ends as the failure table says, within a bound, and its record is whole. Deaths of the driver are in
test_ray_runs.py and in tests/crash, resources that are not there in test_placement.py and tests/cli.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ray
from safetensors.torch import load_file

import cauce
from cauce.errors import CauceError, RewardError, WorkerError
from cauce.journal import Journal
from cauce.metrics.observer import NullObserver
from cauce.models.weights_hash import checksum
from cauce.rewards.load import load_reward
from cauce.rewards.verifiers import last_number
from cauce.runtime import session, watchdog
from cauce.runtime.process import process_tree
from cauce.runtime.roles import LearnerWorker, RewardWorker, RolloutWorker
from cauce.types import Row
from tests.runtime.test_ray_runs import ROWS, SETTINGS, checksums
from tests.tiny import byte_tokenizer

AS_ROOT = [] if os.geteuid() == 0 else ["sudo", "-n"]
POISON = "say 4"  # a task among the first: rows are not shuffled here

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def letters(completions: list[str], **_: Any) -> list[float]:
    return [float(sum(letter.isalpha() for letter in text)) for text in completions]


def exits_for_poison(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    if POISON in prompts:
        os._exit(3)
    return letters(completions)


def sleeps_for_poison(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    if POISON in prompts:
        time.sleep(3600)
    return letters(completions)


class Watcher(NullObserver):
    """Strikes one worker after the first plan, and keeps what it is told."""

    def __init__(self, strike: Callable[[], None] = lambda: None) -> None:
        self.notes: list[tuple[float, str]] = []
        self.strike = strike
        self.struck = 0.0

    def on_plan(self, plan: int, metrics: Any) -> None:
        if plan == 1:
            self.struck = time.monotonic()
            self.strike()

    def on_note(self, text: str) -> None:
        self.notes.append((time.monotonic(), text))

    def told(self, words: str) -> float:
        """Seconds from the strike to the first note with these words."""
        return next(at for at, text in self.notes if words in text) - self.struck


def worker_pid(run: Path, name: str) -> int:
    return int((run / "logs" / f"{name}.log").read_text().split("process ")[1].split()[0])


def train(model: str, run: Path, *, watcher: Watcher, reward: Any = letters, **settings: Any) -> dict[str, Any]:
    named = {key.replace("__", "."): value for key, value in settings.items()}
    given = {**SETTINGS, "data.shuffle": False, "run.dir": str(run.parent), "run.name": run.name, **named}
    return cauce.Trainer(model=model, data=ROWS, reward=reward, settings=given, observer=watcher).train()


def states(run: Path) -> dict[str, int]:
    with Journal.read_only(run) as journal:
        return {state: count for state, count in journal.counts().items() if count}


def dropped(run: Path) -> dict[str, str]:
    """Prompt -> reason."""
    with Journal.read_only(run) as journal:
        rows = journal.select("SELECT id, reason FROM task WHERE state = 'dropped'")
        return {journal.task(task).row.prompt: reason for task, reason in rows}


def test_a_stopped_actor_is_named_killed_and_replaced(
    model: str, tmp_path: Path, shared_ray: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGSTOP: the process is there and says nothing; it must be gone before another has its room."""
    monkeypatch.setattr(session, "HANG_S", 6.0)
    monkeypatch.setattr(watchdog, "WARNING_S", 2.0)
    run, pids = tmp_path / "run", []

    def stop() -> None:
        pids.append(worker_pid(run, "rollout-0"))
        assert pids[0] in process_tree(os.getpid())
        os.kill(pids[0], signal.SIGSTOP)

    watcher = Watcher(stop)
    assert train(model, run, watcher=watcher)["status"] == "finished"
    assert 2 <= watcher.told("rollout-0 generates task") < 6
    assert 6 <= watcher.told("no word for 6 s, so it was killed") < 15
    assert watcher.told("rollout-1 takes its place") < 60
    assert pids[0] not in process_tree(os.getpid())
    assert states(run) == {"trained": 9}


def test_a_killed_learner_is_rebuilt_from_the_record(model: str, tmp_path: Path, shared_ray: None) -> None:
    run = tmp_path / "run"
    watcher = Watcher(lambda: os.kill(worker_pid(run, "learner-0"), signal.SIGKILL))
    assert train(model, run, watcher=watcher, engine__deterministic=True)["status"] == "finished"
    assert watcher.told("learner learner-0 on") < 15
    train(model, tmp_path / "straight", watcher=Watcher(), engine__deterministic=True)
    assert checksums(run) == checksums(tmp_path / "straight")
    with Journal.read_only(run) as journal:
        assert len(journal.events("learner_died")) == 1


def test_a_killed_reward_worker_is_replaced(model: str, tmp_path: Path, shared_ray: None) -> None:
    run = tmp_path / "run"
    watcher = Watcher(lambda: os.kill(worker_pid(run, "reward-0"), signal.SIGKILL))
    assert train(model, run, watcher=watcher)["status"] == "finished"
    assert watcher.told("reward-1 takes its place") < 30
    assert states(run) == {"trained": 9}


def test_a_reward_that_ends_its_process_gives_no_number(model: str, tmp_path: Path, shared_ray: None) -> None:
    """os._exit, as a crash in a native library: three processes die of that group, then it has no number."""
    run = tmp_path / "run"
    summary = train(model, run, watcher=Watcher(), reward=exits_for_poison, reward__max_failure_rate=1.0)
    assert summary["status"] == "finished"
    assert dropped(run)[POISON] == "unscorable"
    with Journal.read_only(run) as journal:
        assert 3 <= len(journal.events("worker_died")) <= 4  # the first perhaps with other groups


def test_a_stuck_reward_is_ended_and_gives_no_number(model: str, tmp_path: Path, shared_ray: None) -> None:
    """E3: the work ends too, not only the wait for it."""
    run, watcher = tmp_path / "run", Watcher()
    settings = {"reward__timeout_s": 2.0, "reward__max_failure_rate": 1.0}
    summary = train(model, run, watcher=watcher, reward=sleeps_for_poison, **settings)
    assert summary["status"] == "finished"
    assert dropped(run)[POISON] == "unscorable"
    with Journal.read_only(run) as journal:
        (task,) = journal.select("SELECT id FROM task WHERE state = 'dropped' AND reason = 'unscorable'")[0]
        statuses = journal.select("SELECT DISTINCT status FROM sample WHERE task = ?", task)
    assert statuses == [("timed_out",)]


def alarms_for_poison(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    if POISON in prompts:
        signal.alarm(1)
        time.sleep(30)
    return letters(completions)


def test_an_alarm_that_nobody_handles_ends_a_reward_worker_and_not_the_run(
    model: str, tmp_path: Path, shared_ray: None
) -> None:
    """E2: and the cause is told with the worker's role."""
    run, watcher = tmp_path / "run", Watcher()
    summary = train(model, run, watcher=watcher, reward=alarms_for_poison, reward__max_failure_rate=1.0)
    assert summary["status"] == "finished"
    assert dropped(run)[POISON] == "unscorable"
    assert any(text.startswith("reward reward-0 on") for _, text in watcher.notes)
    with Journal.read_only(run) as journal:
        ((detail,),) = journal.select("SELECT DISTINCT detail FROM sample WHERE status = 'failed'")
    assert detail.startswith("the reward alarms_for_poison ended its process 3 times")


def fails_mostly(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    if int(prompts[0].split()[1]) % 4:
        raise ValueError("this row has no answer")
    return letters(completions)


def test_a_reward_that_fails_too_often_stops_the_run_with_its_first_failure(
    model: str, tmp_path: Path, shared_ray: None
) -> None:
    with pytest.raises(RewardError, match="this row has no answer"):
        train(model, tmp_path / "run", watcher=Watcher(), reward=fails_mostly, run__plans=20)


class DyingRollout(RolloutWorker):
    """An engine that cannot do its work at all."""

    def work(self, **kwargs: Any) -> Any:
        os._exit(11)


def test_engines_that_all_die_stop_the_run_with_the_last_cause(
    model: str, tmp_path: Path, shared_ray: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "RolloutWorker", DyingRollout)
    with pytest.raises(WorkerError, match="6 rollout workers in a row died"):
        train(model, tmp_path / "run", watcher=Watcher())


class HasAlarm:
    """A reward that limits its own time by an alarm, as verifiers of mathematics do."""

    def __call__(self, completions: list[str], **_: Any) -> list[float]:
        def late(*_: Any) -> None:
            raise TimeoutError

        before = signal.signal(signal.SIGALRM, late)
        signal.alarm(20)
        try:
            return letters(completions)
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)


def score_of(reward: Any) -> float | None:
    """Of a right answer, by the class that scores in reward workers."""
    row = Row(id="0", prompt="2 + 3", columns={"answer": "5"})
    given = {"rows": [row], "texts": ["it is 5"], "token_ids": [[1]], "step": 0, "max_steps": 1}
    value: float | None = RewardWorker(reward=load_reward(reward)).score(**given).outcomes[0].value
    return value


def by_last_number(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    return last_number(completions, answer)


@pytest.mark.parametrize("reward", [by_last_number, HasAlarm()], ids=["plain", "alarm"])
def test_a_right_answer_is_right_wherever_it_is_scored(reward: Any, shared_ray: None) -> None:
    """E1: in the main thread, an actor, and for a reward without signals also in threads and async actors."""

    @ray.remote(num_cpus=0)
    class Plain:
        def score(self) -> float | None:
            return score_of(reward)

    @ray.remote(num_cpus=0)
    class Async:
        async def score(self) -> float | None:
            return score_of(reward)

    wanted = score_of(reward)
    assert wanted
    assert ray.get(Plain.remote().score.remote()) == wanted
    if isinstance(reward, HasAlarm):
        return
    assert ray.get(Async.remote().score.remote()) == wanted
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(score_of, reward).result() == wanted


def test_a_reward_with_signals_fails_in_a_thread_and_is_never_a_0() -> None:
    """E1: reward workers score in their main thread; whoever scores elsewhere is told, by no number."""
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(score_of, HasAlarm()).result() is None


class PoisonedRollout(RolloutWorker):
    """An engine that a prompt kills, as a fault of a native library would."""

    def work(self, **kwargs: Any) -> Any:
        poison = byte_tokenizer()(POISON, add_special_tokens=False).input_ids
        for request in kwargs["requests"]:
            if str(poison)[1:-1] in str(request.prompt_ids.tolist()):
                os._exit(9)
        return super().work(**kwargs)


def test_a_task_that_kills_engines_is_dropped_as_poison(
    model: str, tmp_path: Path, shared_ray: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "RolloutWorker", PoisonedRollout)
    run = tmp_path / "run"
    assert train(model, run, watcher=Watcher())["status"] == "finished"
    assert dropped(run)[POISON] == "poison"
    assert states(run)["trained"] == 9
    with Journal.read_only(run) as journal:
        assert 3 <= len(journal.events("worker_died")) <= 4  # one with several tasks, then three with it alone


class InfiniteLearner(LearnerWorker):
    """A learner whose third plan meets inf in its second micro-batch."""

    plans = 0

    def forward_backward(self, *, batch: Any) -> dict[str, float]:
        self.plans += 1
        calls, learner = [], self._learner
        honest = learner._micro_batch_loss

        def loss(*args: Any) -> Any:
            calls.append(0)
            found = honest(*args)
            return found * float("inf") if self.plans == 3 and len(calls) == 2 else found

        learner._micro_batch_loss = loss
        try:
            return super().forward_backward(batch=batch)
        finally:
            learner._micro_batch_loss = honest


def test_inf_in_one_micro_batch_skips_the_plan_and_changes_no_weight(
    model: str, tmp_path: Path, shared_ray: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "LearnerWorker", InfiniteLearner)
    run = tmp_path / "run"
    settings = {"learner__token_budget": 1}  # each answer is a micro-batch of its own
    assert train(model, run, watcher=Watcher(), **settings)["status"] == "finished"
    with Journal.read_only(run) as journal:
        plans = journal.plans()
    assert [record.state for record in plans] == ["applied", "applied", "skipped"]
    assert set(dropped(run).values()) == {"non_finite"}
    assert checksum(load_file(run / "model" / "model.safetensors")) == plans[1].checksum


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 2 MB, which `grow` makes larger."""
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(
        [*AS_ROOT, "mount", "-t", "tmpfs", "-o", "size=2m,mode=0777", "tmpfs", str(folder)],
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        reason = f"mounting a small filesystem needs root, or sudo without a password: {done.stderr.strip()}"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
    yield folder
    subprocess.run([*AS_ROOT, "umount", "-l", str(folder)], check=True)


def test_a_full_disk_stops_the_run_and_with_room_it_goes_on_to_the_same_weights(
    model: str, tmp_path: Path, small_disk: Path, shared_ray: None
) -> None:
    run, settings = small_disk / "run", {"engine__deterministic": True, "run__plans": 4}

    def fill() -> None:
        left = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize
        (small_disk / "ballast").write_bytes(bytes(max(0, left - 4096)))

    with pytest.raises((CauceError, OSError)) as ended:
        train(model, run, watcher=Watcher(fill), **settings)
    assert any(words in str(ended.value) for words in ("No space left", "could not be written", "disk is full"))
    with Journal.read_only(run) as journal:
        before = journal.last_decided
    assert 1 <= before < 4
    subprocess.run([*AS_ROOT, "mount", "-o", "remount,size=60m", str(small_disk)], check=True)
    summary = cauce.Trainer.resume(run, reward=letters, data=ROWS, observer=NullObserver())
    assert summary["status"] == "finished"
    train(model, tmp_path / "straight", watcher=Watcher(), **settings)
    assert checksums(run) == checksums(tmp_path / "straight")
