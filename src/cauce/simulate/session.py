"""A session whose workers are simulated: pools, exchange and learners are put together by the real one."""

from typing import Any, ClassVar

from cauce.runtime.cluster import Cluster
from cauce.runtime.placement import plan_placement
from cauce.runtime.session import Session
from cauce.simulate.files import Disk
from cauce.simulate.workers import SimulatedWorkers

CPUS = 8


class SimulatedSession(Session):
    """Starts and stops in virtual time."""

    disk: ClassVar[Disk]
    simulated: ClassVar[SimulatedWorkers]

    def __enter__(self) -> "SimulatedSession":
        recipe = self._plan.recipe
        self.clock = self.simulated.clock
        self.workers = self.simulated  # type: ignore[assignment]  # a session's own are Ray's
        self.cluster = Cluster(how="simulated", dashboard=None, ours=False, folder=None, reaper=None)
        self.placement = plan_placement(recipe, cpus=CPUS)
        self.weights_folder = self._plan.run_dir / f"weights-{self._plan.owner_epoch}"
        self._connect()
        self._start_learner()
        self.pool.fill()
        self.rewards.warm_up()
        return self

    def close(self) -> None:
        """A driver that ends ends its workers; one that dies leaves them to notice."""
        if self.disk.is_dead:
            self.simulated.outlive_driver()
        else:
            self.simulated.end_all()

    def sample_memory(self, *, every_s: float = 3.0) -> float:
        return 0.0


def session_of(workers: SimulatedWorkers, disk: Disk, base: type[SimulatedSession]) -> type[SimulatedSession]:
    """The session class, bound to the workers of one driver."""
    bound: dict[str, Any] = {"simulated": workers, "disk": disk}
    return type(base.__name__, (base,), bound)
