"""Who gets which CPUs: resources per role, threads per process, and a refusal in words when it does not fit.

In a synchronous run (`buffer.max_staleness = 0`) generating and learning never overlap, so each phase may use every
CPU; only workers of the same phase share. In an overlapped run the learner takes half. What Ray *reserves* is apart
from that: it only has to keep other jobs away, so the roles of one run split the machine between them.
"""

import math
from dataclasses import dataclass
from typing import Literal

from cauce.errors import ResourceError
from cauce.recipe.models import Recipe
from cauce.runtime.world import Resources


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Resources of each role of a run."""

    rollout: Resources
    learner: Resources
    reward: Resources
    num_rollout: int
    num_reward: int

    def roles(self) -> list[tuple[str, int, Resources]]:
        return [
            ("rollout", self.num_rollout, self.rollout),
            ("learner", 1, self.learner),
            ("reward", self.num_reward, self.reward),
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRoom:
    """What one node of the cluster offers."""

    name: str
    cpus: float
    gpus: float
    memory_bytes: float


def plan_placement(recipe: Recipe, *, cpus: int) -> Placement:
    """Fills in what the recipe leaves to us ("auto") for a node with `cpus` CPUs."""
    actors = recipe.rollout.actors
    overlapping = recipe.buffer.max_staleness > 0
    learner_threads = max(1, min(cpus // 2, cpus - actors)) if overlapping else cpus
    rollout_threads = max(1, (cpus - learner_threads if overlapping else cpus) // actors)
    if recipe.learner.threads != "auto":
        learner_threads = int(recipe.learner.threads)
    if recipe.engine.threads != "auto":
        rollout_threads = int(recipe.engine.threads)
    learner_cpus = cpus / 2 if recipe.learner.cpus == "auto" else float(recipe.learner.cpus)
    rollout_cpus = cpus / 2 / actors if recipe.rollout.cpus == "auto" else float(recipe.rollout.cpus)
    return Placement(
        rollout=Resources(
            cpus=_round_down(rollout_cpus),
            gpus=float(recipe.rollout.gpus),
            memory_bytes=_reserved(recipe.rollout.memory),
            threads=rollout_threads,
        ),
        learner=Resources(
            cpus=_round_down(learner_cpus),
            gpus=float(recipe.learner.gpus),
            memory_bytes=_reserved(recipe.learner.memory),
            threads=learner_threads,
        ),
        reward=Resources(cpus=0, gpus=0, memory_bytes=None, threads=1),
        num_rollout=actors,
        num_reward=recipe.reward.workers,
    )


def check_room(placement: Placement, nodes: list[NodeRoom]) -> None:
    """Refuses within a second what Ray would wait for for ever.

    Raises:
        ResourceError: with a table of what each role asks for, what there is, and a setting that fits.
    """
    free = {node.name: [node.cpus, node.gpus, node.memory_bytes] for node in nodes}
    for role, count, need in placement.roles():
        wanted = [need.cpus, need.gpus, float(need.memory_bytes or 0)]
        for _ in range(count):
            home = next(
                (n for n, room in free.items() if all(w <= r + 1e-6 for w, r in zip(wanted, room, strict=True))),
                None,
            )
            if home is None:
                raise ResourceError(_refusal(placement, nodes, role))
            free[home] = [room - want for want, room in zip(wanted, free[home], strict=True)]


def _refusal(placement: Placement, nodes: list[NodeRoom], role: str) -> str:
    asked = "; ".join(
        f"{name} {count} x ({need.cpus:g} CPUs, {need.gpus:g} GPUs"
        + (f", {need.memory_bytes / 1e9:.1f} GB)" if need.memory_bytes else ")")
        for name, count, need in placement.roles()
    )
    there = "; ".join(
        f"{node.name} {node.cpus:g} CPUs, {node.gpus:g} GPUs, {node.memory_bytes / 1e9:.1f} GB" for node in nodes
    )
    section = "rollout" if role == "rollout" else role
    hint = f'set {section}.cpus="auto" and {section}.gpus=0'
    if role == "rollout" and placement.num_rollout > 1:
        hint += ", or fewer rollout.actors"
    return f"no room for a {role} worker. Asked: {asked}. There is: {there or 'no node'}. To fit: {hint}"


def _round_down(cpus: float) -> float:
    """Ray counts CPUs in ten-thousandths; rounded up, thirds of a machine would not fit into it."""
    return math.floor(cpus * 10_000) / 10_000


def _reserved(memory: int | Literal["auto"]) -> int | None:
    """Bytes for Ray to reserve; left to us, nothing is."""
    return None if memory == "auto" else memory
