"""Many seeds, on several processes, in order: the first that fails ends it."""

from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import get_context

from cauce.simulate.run import Report, simulate

SEEDS_AT_ONCE = 10  # per process and task


@dataclass(slots=True, kw_only=True)
class Tally:
    """What clean seeds went through."""

    seeds: int = 0
    starts: int = 0
    compared: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)

    def add(self, report: Report) -> None:
        self.seeds += 1
        self.starts += report.starts
        self.compared += report.compared
        self.faults += report.faults
        self.statuses[report.status] += 1

    def __str__(self) -> str:
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.faults.most_common(6))
        return (
            f"{self.seeds} seeds clean: {self.starts} starts of a driver, {self.faults.total()} faults ({kinds}, ...), "
            f"{self.compared} runs equal to the undisturbed one plan by plan"
        )


def run_seeds(seeds: Sequence[int], *, jobs: int) -> Iterator[Report]:
    """One report per seed, in the order given; those of clean seeds come without their trace."""
    if jobs == 1:
        yield from map(_brief, seeds)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        try:
            starts = range(0, len(seeds), SEEDS_AT_ONCE)
            for reports in pool.map(_some, [seeds[start : start + SEEDS_AT_ONCE] for start in starts]):
                yield from reports
        finally:
            pool.shutdown(cancel_futures=True)


def _some(seeds: Sequence[int]) -> list[Report]:
    return [_brief(seed) for seed in seeds]


def _brief(seed: int) -> Report:
    report = simulate(seed)
    return report if report.violation else replace(report, trace=[])
