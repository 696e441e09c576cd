"""Shares of a run's time that go into its record, in the quickstart, without faults.

journal_share    journal calls
control_share    journal calls, and all that the driver does with what comes back: leases, watchdog
checksum_share   checksums of weights, as each plan's record has them
"""

from benchmarks.bench import Bench
from benchmarks.own_run import OwnRun, train
from benchmarks.results import Result

NAME = "journal_share"
BOUND = 0.01
CONTROL_BOUND = 0.02
CHECKSUM_BOUND = 0.06
NUM_PLANS = 8


def journal_share(bench: Bench) -> dict[str, Result]:
    """All seconds of a part over all seconds of plans, so that long plans weigh by their length."""
    settings = {"run.plans": NUM_PLANS, "eval.every": 0, "eval.at_start": "false", "eval.tasks": 8}
    run = train(bench, NAME, "quickstart", {"model.path": bench.model, **settings})
    shares = shares_of(run)
    journal, total = sums_of(run)
    control, wall = float(run.summary["control_s"]), float(run.summary["wall_s"])
    checksums = [float(plan["time/checksum"]) for plan in run.plans]
    of_each = [plan["time/checksum"] / plan["time/total"] for plan in run.plans]
    return {
        "control_share": Result(
            # Journal calls about what comes back are counted twice, so this is more than the true share.
            ours=(journal + control) / wall,
            peer=CONTROL_BOUND,
            unit="fraction",
            dtype=bench.dtype,
            runs=1,
            peer_is="bound",
            spread={},
            settings={"recipe": "quickstart", "plans": NUM_PLANS, "journal.keep": "all"},
            detail={"journal_s": journal, "control_s": control, "wall_s": wall},
        ),
        "checksum_share": Result(
            ours=sum(checksums) / total,
            peer=CHECKSUM_BOUND,
            unit="fraction",
            dtype=bench.dtype,
            runs=len(checksums),
            peer_is="bound",
            spread={"ours": [min(of_each), max(of_each)]},
            settings={"recipe": "quickstart", "plans": NUM_PLANS, "learner": "fp32 masters"},
            detail={"checksum_s_per_plan": sum(checksums) / len(checksums)},
        ),
        NAME: Result(
            ours=journal / total,
            peer=BOUND,
            unit="fraction",
            dtype=bench.dtype,
            runs=len(shares),
            peer_is="bound",
            spread={"ours": [min(shares), max(shares)]},
            settings={"recipe": "quickstart", "plans": NUM_PLANS, "journal.keep": "all"},
            detail={
                "journal_s_per_plan": journal / len(shares),
                "total_s_per_plan": total / len(shares),
                "commits_per_plan": run.summary["journal_commits"] / len(shares),
            },
        ),
    }


def sums_of(run: OwnRun) -> tuple[float, float]:
    """Seconds in the journal, and seconds in all."""
    return (
        sum(float(plan["time/journal"]) for plan in run.plans),
        sum(float(plan["time/total"]) for plan in run.plans),
    )


def shares_of(run: OwnRun) -> list[float]:
    return [plan["time/journal"] / plan["time/total"] for plan in run.plans]
