"""Threads from the CPUs there are, and refusals in words."""

import os
import subprocess
import sys

import pytest

from cauce.errors import ResourceError
from cauce.recipe.load import load_recipe
from cauce.runtime.placement import NodeRoom, check_room, plan_placement

GIVEN = ["model.path=m", "data.train=t.jsonl", "reward.fn=f.py:f"]


def recipe(*overrides: str):
    return load_recipe("grpo", [*GIVEN, *overrides])


def room(cpus: float, gpus: float = 0) -> list[NodeRoom]:
    return [NodeRoom(name="n", cpus=cpus, gpus=gpus, memory_bytes=8e9)]


@pytest.mark.parametrize("cpus", [1, 2, 3, 8, 64])
@pytest.mark.parametrize("actors", [1, 2, 3, 5, 6, 7])
@pytest.mark.parametrize("staleness", [0, 1])
def test_threads_that_run_at_once_never_exceed_the_cpus(cpus: int, actors: int, staleness: int) -> None:
    """H12. A thread is the least a process has, so more actors than CPUs get one each."""
    plan = plan_placement(recipe(f"rollout.actors={actors}", f"buffer.max_staleness={staleness}"), cpus=cpus)
    at_once = plan.rollout.threads * actors + (plan.learner.threads if staleness else 0)
    assert at_once <= max(cpus, actors + (1 if staleness else 0))
    assert plan.learner.threads <= cpus
    check_room(plan, room(cpus))


def test_one_cpu_of_the_affinity_mask_is_one_cpu() -> None:
    """H12, with a real mask."""
    code = "from cauce.runtime.process import available_cpus; print(available_cpus())"
    cpu = min(os.sched_getaffinity(0))

    def pin() -> None:
        os.sched_setaffinity(0, {cpu})

    done = subprocess.run([sys.executable, "-c", code], preexec_fn=pin, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"


def test_a_request_that_cannot_fit_is_refused_with_each_role_and_what_there_is() -> None:
    """H4."""
    with pytest.raises(ResourceError) as caught:
        check_room(plan_placement(recipe("rollout.cpus=4"), cpus=2), room(2))
    text = str(caught.value)
    assert "rollout 1 x (4 CPUs, 0 GPUs)" in text
    assert "learner 1 x (1 CPUs" in text
    assert "n 2 CPUs" in text
    assert 'rollout.cpus="auto"' in text


def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(ResourceError, match="no room for a learner worker"):
        check_room(plan_placement(recipe("learner.gpus=1"), cpus=2), room(2))


def test_fractions_of_a_gpu_share_it() -> None:
    plan = plan_placement(recipe("learner.gpus=0.5", "rollout.gpus=0.5"), cpus=2)
    check_room(plan, room(2, gpus=1))


def test_threads_of_the_recipe_win() -> None:
    plan = plan_placement(recipe("learner.threads=1", "engine.threads=2"), cpus=8)
    assert (plan.learner.threads, plan.rollout.threads) == (1, 2)


def test_memory_that_is_left_to_us_is_not_reserved() -> None:
    plan = plan_placement(recipe("rollout.memory=2GiB"), cpus=2)
    assert (plan.rollout.memory_bytes, plan.learner.memory_bytes) == (2 * 2**30, None)
