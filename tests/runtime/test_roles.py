"""The plain classes of the worker processes, as objects: weights between learner and sampler, slices, owner epochs."""

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

import cauce
from cauce.algorithms.advantages import make_batch, train_sequences
from cauce.errors import FencedError, WeightsError
from cauce.journal import Journal
from cauce.recipe.models import LearnerSettings
from cauce.runtime.roles import LearnerWorker, RolloutWorker, WorkResult
from cauce.types import Completion, Group, Outcome, Sample
from cauce.weights.store import WeightStore
from tests.algorithms.cases import algorithm
from tests.engine.asking import ask, random_prompt


def rollout(model: Path, folder: Path) -> RolloutWorker:
    return RolloutWorker(
        model_path=str(model),
        dtype="fp32",
        slots=8,
        deterministic=False,
        compiled=True,
        weights_folder=str(folder),
        lineage="0",
    )


def learner(model: Path, folder: Path) -> LearnerWorker:
    return LearnerWorker(
        model_path=str(model),
        algorithm=algorithm(),
        settings=LearnerSettings(dtype="fp32", lr=0.05),
        temperature=1.0,
        total_steps=10,
        seed=0,
        weights_folder=str(folder),
        weights_keep=2,
        publish_dtype="fp32",
    )


def work(worker: RolloutWorker, *requests, version: int = 0, epoch: int = 1, seconds: float = 60.0) -> WorkResult:
    """Slices until it is idle; the last result with all completions."""
    done: list[Completion] = []
    while True:
        result = worker.work(epoch=epoch, version=version, requests=requests, cancel=(), seconds=seconds)
        done += result.completions
        requests = ()
        if result.is_idle:
            break
    assert result.completions == () or result.completions == tuple(done[-len(result.completions) :])
    return WorkResult(
        completions=tuple(done),
        progress=result.progress,
        num_tokens=result.num_tokens,
        busy_s=result.busy_s,
        sync_s=result.sync_s,
        version=result.version,
        checksum=result.checksum,
        is_idle=True,
    )


def as_group(task: int, prompt: np.ndarray, completions: tuple[Completion, ...]) -> Group:
    samples = tuple(
        Sample(completion=c, outcome=Outcome(status="scored", value=float(c.index % 2), parts={}, detail=""))
        for c in completions
    )
    return Group(task=task, prompt_ids=prompt, samples=samples)


def take_a_step(each: LearnerWorker, group: Group) -> None:
    scored = each.score(groups=[group], proximal=False)
    each.forward_backward(batch=make_batch(train_sequences(algorithm(), scored)))
    assert each.optim_step()["optim/skipped"] == 0


def test_after_each_sync_content_answers_and_log_probs_are_the_learners(tiny: Path, tmp_path: Path) -> None:
    """D1: a checksum of what the sampler serves equals the learner's, on five greedy prompts they agree, and the log-
    probs it records for fresh tokens are those that the learner computes."""
    teacher, sampler = learner(tiny, tmp_path), rollout(tiny, tmp_path)
    published = teacher.publish(epoch=1, version=0, lineage="0")
    prompts = [random_prompt(4 + n, n) for n in range(5)]
    first = work(sampler, *(ask(n, p, samples=2) for n, p in enumerate(prompts)))
    assert first.checksum == published == teacher.checksum()
    for version in (1, 2):
        ours = tuple(c for c in first.completions if c.task == 0)
        take_a_step(teacher, as_group(0, prompts[0], ours))
        assert teacher.publish(epoch=1, version=version, lineage="0") != published
        result = work(sampler, *(ask(n, p, samples=2) for n, p in enumerate(prompts)), version=version)
        assert (result.version, result.checksum) == (version, teacher.checksum())
        again = rollout(tiny, tmp_path)  # one that joins late pulls before it serves
        greedy = [ask(n, p, temperature=0.0) for n, p in enumerate(prompts)]
        answers = [
            [c.token_ids.tolist() for c in work(each, *greedy, version=version).completions]
            for each in (sampler, again)
        ]
        assert answers[0] == answers[1]
        by_task = {n: tuple(c for c in result.completions if c.task == n) for n in range(5)}
        groups = [as_group(n, prompts[n], by_task[n]) for n in range(5)]
        scored = teacher.score(groups=groups, proximal=True)
        assert scored.proximal_logps is not None
        for group, logps in zip(groups, scored.proximal_logps, strict=True):
            for sample, logp in zip(group.samples, logps, strict=True):
                np.testing.assert_allclose(sample.completion.logps, logp, atol=1e-5)
                assert set(sample.completion.versions.tolist()) == {version}
        first = result


def test_a_version_that_is_not_there_moves_nothing(tiny: Path, tmp_path: Path) -> None:
    """D3: the pull raises; what is sampled afterwards carries the old version and is the old policy's."""
    teacher, sampler = learner(tiny, tmp_path), rollout(tiny, tmp_path)
    teacher.publish(epoch=1, version=0, lineage="0")
    before = work(sampler, ask(0, random_prompt(5), samples=2))
    with pytest.raises(WeightsError, match="version 1 is not in"):
        sampler.work(epoch=1, version=1, requests=[ask(1, random_prompt(5))], cancel=(), seconds=1.0)
    assert (sampler.status()["version"], sampler.status()["checksum"]) == (0, before.checksum)
    after = work(sampler, ask(0, random_prompt(5), samples=2))
    assert [c.token_ids.tolist() for c in after.completions] == [c.token_ids.tolist() for c in before.completions]
    assert {int(v) for c in after.completions for v in c.versions} == {0}


def test_the_same_version_of_another_lineage_is_pulled_again(tiny: Path, tmp_path: Path) -> None:
    """A learner that was rebuilt under another fingerprint publishes a number that engines have served already."""
    teacher, sampler = learner(tiny, tmp_path), rollout(tiny, tmp_path)
    first = teacher.publish(epoch=1, version=0, lineage="0")
    answered = work(sampler, ask(0, random_prompt(5), samples=2))
    assert answered.checksum == first
    take_a_step(teacher, as_group(0, random_prompt(5), answered.completions))
    second = teacher.publish(epoch=1, version=0, lineage="1")
    asked = {"epoch": 1, "version": 0, "requests": (), "cancel": (), "seconds": 1.0}
    result = sampler.work(lineage="1", **asked)
    assert result.checksum == second != first
    assert result.sync_s > 0
    assert sampler.work(lineage="1", **asked).sync_s == 0.0


def test_a_slice_ends_in_time_and_says_how_far_it_came(tiny: Path, tmp_path: Path) -> None:
    sampler = rollout(tiny, tmp_path)
    learner(tiny, tmp_path).publish(epoch=1, version=0, lineage="0")
    asked = [ask(0, random_prompt(5), samples=3, max_tokens=40)]
    slices: list[WorkResult] = []
    while not slices or not slices[-1].is_idle:
        slices.append(sampler.work(epoch=1, version=0, requests=asked, cancel=(), seconds=1e-3))
        asked = []
    assert len(slices) > 2
    told = [result.progress[0] for result in slices[:-1]]
    assert told == sorted(told)
    assert told[-1] > 0
    assert [result.progress for result in slices[-1:]] == [{}]
    made = sum(len(c.token_ids) for result in slices for c in result.completions)
    assert sum(result.num_tokens for result in slices) == made  # each token in one slice
    whole = work(rollout(tiny, tmp_path), ask(0, random_prompt(5), samples=3, max_tokens=40))
    cut = {c.index: c.token_ids.tolist() for result in slices for c in result.completions}
    assert cut == {c.index: c.token_ids.tolist() for c in whole.completions}


def test_cancelled_work_is_dropped(tiny: Path, tmp_path: Path) -> None:
    sampler = rollout(tiny, tmp_path)
    learner(tiny, tmp_path).publish(epoch=1, version=0, lineage="0")
    asked = [ask(task, random_prompt(5), max_tokens=20) for task in (0, 1)]
    sampler.work(epoch=1, version=0, requests=asked, cancel=(), seconds=1e-3)
    result = sampler.work(epoch=1, version=0, requests=(), cancel=[0], seconds=60.0)
    assert {c.task for c in result.completions} <= {1}
    assert 0 not in result.progress


def test_an_owner_that_was_replaced_is_obeyed_no_more(tiny: Path, tmp_path: Path) -> None:
    sampler = rollout(tiny, tmp_path)
    learner(tiny, tmp_path).publish(epoch=1, version=0, lineage="0")
    work(sampler, ask(0, random_prompt(5)), epoch=2)
    with pytest.raises(FencedError, match="owner epoch 1 is over; this worker serves epoch 2"):
        work(sampler, ask(1, random_prompt(5)), epoch=1)
    teacher = learner(tiny, tmp_path)
    teacher.publish(epoch=2, version=1, lineage="0")
    with pytest.raises(FencedError, match="owner epoch 1 is over; this worker serves epoch 2"):
        teacher.publish(epoch=1, version=2, lineage="0")
    with pytest.raises(FencedError, match="owner epoch 1 is over; this worker serves epoch 2"):
        teacher.save_checkpoint(epoch=1, run_dir=str(tmp_path), plan=1)
    assert not (tmp_path / "checkpoints").exists()
    assert WeightStore(tmp_path, keep=2).versions() == [0, 1]


def test_a_checkpoint_is_not_put_into_the_folder_of_a_newer_owner(tiny: Path, tmp_path: Path) -> None:
    """The older driver's own worker has heard of no other epoch; the folder has."""
    with Journal.create(tmp_path / "run", meta={}):
        pass
    teacher = learner(tiny, tmp_path)
    teacher.save_checkpoint(epoch=1, run_dir=str(tmp_path / "run"), plan=1)
    with Journal.open(tmp_path / "run"), pytest.raises(FencedError, match=r"taken over by host .*epoch 2, ours is 1"):
        teacher.save_checkpoint(epoch=1, run_dir=str(tmp_path / "run"), plan=2)
    assert [f.name for f in (tmp_path / "run" / "checkpoints").iterdir()] == ["plan_000001"]


def test_the_learners_status_carries_what_bits_depend_on(tiny: Path, tmp_path: Path) -> None:
    fingerprint = learner(tiny, tmp_path).status()["fingerprint"]
    versions = {"cauce": cauce.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
    assert {name: fingerprint[name] for name in versions} == versions
    others = {"threads", "instructions", "bf16_instructions", "dtype", "packing", "kernels", "ranks"}
    assert set(fingerprint) == {*versions, *others}
    has = torch.cpu._is_avx512_bf16_supported(), torch.cpu._is_amx_tile_supported()
    assert [word in fingerprint["bf16_instructions"] for word in ("avx512_bf16", "amx")] == list(has)
    assert (fingerprint["dtype"], fingerprint["packing"], fingerprint["ranks"]) == ("float32", "apart", "1")
