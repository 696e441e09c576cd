"""The buffer's policy: distinct draws, reuse, staleness, order, and the capacity formula."""

from collections import Counter

import pytest

from cauce.errors import JournalError
from cauce.journal import Accepted, Buffer, capacity


def filled(num: int, *, max_reuse: int = 1, sampling: str = "in_order", seed: int = 0) -> Buffer:
    buffer = Buffer(num, max_reuse=max_reuse, sampling=sampling, seed=seed)  # type: ignore[arg-type]
    for task in range(num):
        buffer.put(task, 0)
    return buffer


@pytest.mark.parametrize("sampling", ["in_order", "random"])
def test_sixteen_tasks_drawn_are_sixteen_tasks(sampling: str) -> None:
    """D9."""
    buffer = filled(16, max_reuse=3, sampling=sampling)
    assert buffer.size == 16
    drawn = buffer.sample(16, version=0, max_staleness=0)
    assert sorted(drawn) == list(range(16))
    assert buffer.size == 16  # tasks are counted, not the two uses that each has left


@pytest.mark.parametrize("sampling", ["in_order", "random"])
@pytest.mark.parametrize("max_reuse", [1, 2, 3])
def test_no_task_is_drawn_more_often_than_max_reuse(sampling: str, max_reuse: int) -> None:
    buffer = filled(12, max_reuse=max_reuse, sampling=sampling)
    drawn: Counter[int] = Counter()
    while buffer.size >= 3:
        drawn.update(buffer.sample(3, version=0, max_staleness=0))
    drawn.update(buffer.sample(buffer.size, version=0, max_staleness=0) if buffer.size else ())
    assert max(drawn.values()) <= max_reuse
    if sampling == "in_order":
        assert set(drawn.values()) == {max_reuse}


def test_in_order_takes_the_lowest_numbers_whatever_the_order_of_arrival() -> None:
    buffer = Buffer(8)
    for task in (5, 2, 7, 0, 3):
        buffer.put(task, 0)
    assert buffer.sample(3, version=0, max_staleness=0) == (0, 2, 3)
    assert buffer.sample(2, version=0, max_staleness=0) == (5, 7)
    assert buffer.size == 0


def test_a_random_draw_depends_on_seed_and_draw_number_only() -> None:
    straight = filled(20, max_reuse=9, sampling="random", seed=4)
    draws = [straight.sample(6, version=0, max_staleness=0) for _ in range(4)]
    assert len(set(draws)) == 4
    again = filled(20, max_reuse=9, sampling="random", seed=4)
    assert [again.sample(6, version=0, max_staleness=0) for _ in range(4)] == draws
    other = filled(20, max_reuse=9, sampling="random", seed=5)
    assert other.sample(6, version=0, max_staleness=0) != draws[0]
    # A resume after two plans: the same contents, the number of draws so far, another order of arrival.
    uses = Counter(task for draw in draws[:2] for task in draw)
    resumed = Buffer(20, max_reuse=9, sampling="random", seed=4, num_draws=2)
    resumed.restore(Accepted(task=task, version=0, uses=uses[task]) for task in reversed(range(20)))
    assert [resumed.sample(6, version=0, max_staleness=0) for _ in range(2)] == draws[2:]


def test_stale_groups_are_named_and_never_drawn() -> None:
    buffer = Buffer(4, max_reuse=2)
    for task, version in ((0, 1), (1, 3), (2, 2)):
        buffer.put(task, version)
    assert buffer.stale(version=3, max_staleness=1) == (0,)
    assert buffer.sample(2, version=3, max_staleness=1) == (1, 2)
    with pytest.raises(JournalError, match=r"3 tasks asked for, and 2 of 3 can be planned at version 3"):
        buffer.sample(3, version=3, max_staleness=1)
    buffer.remove(0)
    assert buffer.tasks == (1, 2)
    assert buffer.available(version=4, max_staleness=1) == (1,)


def test_put_refuses_what_would_break_a_count() -> None:
    buffer = Buffer(1, max_reuse=2)
    with pytest.raises(JournalError, match="was used 2 times and max_reuse is 2"):
        buffer.put(3, 0, uses=2)
    buffer.put(3, 0, uses=1)
    with pytest.raises(JournalError, match="already"):
        buffer.put(3, 0)
    with pytest.raises(JournalError, match="holds 1 tasks of 1"):
        buffer.put(4, 0)
    assert buffer.sample(1, version=0, max_staleness=0) == (3,)  # its last use
    assert 3 not in buffer
    with pytest.raises(JournalError, match="task 3 is not in the buffer"):
        buffer.remove(3)
    with pytest.raises(ValueError, match=r"buffer\.sampling is 'lifo'"):
        Buffer(1, sampling="lifo")  # type: ignore[arg-type]


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_admitting_up_to_capacity_keeps_staleness_in_bounds(max_staleness: int) -> None:
    """Simulated: tasks are generated at the version at which they are admitted, and planned in order."""
    groups_per_plan, version, trained, skipped = 4, 0, 0, 0
    waiting: list[int] = []  # version of each group under way, in admission order
    for number in range(1, 13):
        room = capacity(
            max_staleness=max_staleness,
            version=version,
            groups_per_plan=groups_per_plan,
            trained=trained + skipped,
            planned=0,
            ready=len(waiting),
            running=0,
        )
        waiting += [version] * room
        batch, waiting = waiting[:groups_per_plan], waiting[groups_per_plan:]
        assert len(batch) == groups_per_plan  # never starved either
        assert version - min(batch) <= max_staleness
        if number % 5 == 0:
            skipped += groups_per_plan  # a plan of non-finite numbers takes a version, too
        else:
            trained += groups_per_plan
        version = number
