"""`journal_share`: the share of a plan's time that goes into journal calls, in the quickstart."""

from benchmarks.bench import Bench
from benchmarks.own_run import OwnRun, train
from benchmarks.results import Result

NAME = "journal_share"
BOUND = 0.01
NUM_PLANS = 8


def journal_share(bench: Bench) -> dict[str, Result]:
    """All journal seconds over all seconds of plans, so that long plans weigh by their length."""
    settings = {"run.plans": NUM_PLANS, "eval.every": 0, "eval.at_start": "false", "eval.tasks": 8}
    run = train(bench, NAME, "quickstart", {"model.path": bench.model, **settings})
    shares = shares_of(run)
    journal, total = sums_of(run)
    return {
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
        )
    }


def sums_of(run: OwnRun) -> tuple[float, float]:
    """Seconds in the journal, and seconds in all."""
    return (
        sum(float(plan["time/journal"]) for plan in run.plans),
        sum(float(plan["time/total"]) for plan in run.plans),
    )


def shares_of(run: OwnRun) -> list[float]:
    return [plan["time/journal"] / plan["time/total"] for plan in run.plans]
