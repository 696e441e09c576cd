"""`make bench [NAME...]`: measures, and merges figures into benchmarks/results.json as soon as each is there.

At the end docs/performance.md is made anew from them. Nothing else should run on the machine meanwhile.
"""

import argparse
import datetime
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import (
    control_plane,
    generation,
    grpo_step,
    journal_share,
    learner_long,
    learner_speed,
    numerics,
    page,
    rates,
    reward_curve,
    startup,
    time_to_accuracy,
    weights_sync,
)
from benchmarks.bench import MODEL, Bench
from benchmarks.machine import describe
from benchmarks.results import RESULTS, Result, merge, read

Measurement = Callable[[Bench], dict[str, Result]]

# In the order in which they are run: the quick ones first.
MEASUREMENTS: dict[str, Measurement] = {
    "startup": startup.startup,
    "journal_share": journal_share.journal_share,
    "control_plane_1000": control_plane.control_plane_1000,
    "control_plane_memory": control_plane.control_plane_memory,
    "first_plan_log_ratio_fp32": numerics.fp32,
    "first_plan_log_ratio_bf16": numerics.bf16,
    "grpo_step_vs_trl": grpo_step.best_of_each,
    "grpo_step_vs_trl_bf16": grpo_step.bf16,
    "grpo_step_vs_trl_fp32": grpo_step.fp32,
    "grpo_step_vs_trl_all_signal": grpo_step.all_signal,
    "weights_vs_copy": weights_sync.weights_vs_copy,
    "decode_vs_gemm": rates.decode,
    "learner_vs_gemm": rates.learner,
    "learner_vs_padded": learner_speed.headline,
    "learner_long": learner_long.learner_long,
    "generate_vs_transformers": generation.against_transformers,
    "generate_vs_vllm": generation.against_vllm,
    "reward_curve_vs_trl": reward_curve.reward_curve,
    "learner_surface": learner_speed.surface,
    "time_to_accuracy_vs_trl": time_to_accuracy.time_to_accuracy,
}


def run(
    names: Sequence[str],
    bench: Bench,
    results: Path,
    measurements: Mapping[str, Measurement] = MEASUREMENTS,
) -> int:
    """Measures each name; one that fails does not keep the others from being measured. Returns an exit code."""
    failed = []
    for name in names:
        print(f"{name} ...", flush=True)
        began = time.monotonic()
        try:
            found = measurements[name](bench)
            facts = (describe(), time.monotonic() - began, datetime.date.today().isoformat())
            entries = {key: result.entry(*facts) for key, result in found.items()}
        except Exception as error:  # reported below; the figures so far are on disk
            print(f"{name} failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            failed.append(name)
            continue
        merge(entries, results)
        for key, result in found.items():
            print(f"{key}: {result.sentence()}")
        print(f"  took {facts[1]:.0f} s", flush=True)
    if failed:
        print(f"not measured: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(MEASUREMENTS)}; none: all")
    parser.add_argument("--model", default=MODEL, help="folder or pulled name")
    parser.add_argument("--steps", type=int, default=5, help="measured steps of a comparison")
    parser.add_argument("--results", type=Path, default=RESULTS, help="file that figures are merged into")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in MEASUREMENTS]
    if unknown:
        known = "".join(f"\n  {name}" for name in MEASUREMENTS)
        print(f"unknown: {', '.join(unknown)}. There are:{known}", file=sys.stderr)
        return 2
    bench = Bench(model=options.model, steps=options.steps, charts=options.results.parent)
    code = run(options.names or list(MEASUREMENTS), bench, options.results)
    if options.results == RESULTS:
        page.write(read(RESULTS))
    return code


if __name__ == "__main__":
    sys.exit(main())
