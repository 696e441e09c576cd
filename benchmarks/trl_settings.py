"""TRL at its best on this machine: candidates, one measured step of each, and the fastest of a dtype.

A choice is kept in .bench/ by machine, versions, model and work, since trying all candidates takes minutes; delete
.bench/trl_settings.json to try again. All candidates sample with all CPUs and train without gradient checkpointing,
which TRL switches on by default and which only costs time where memory suffices.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.settings_cache import digest, read, write

DTYPES = ("fp32", "bf16")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrlSettings:
    """What TRL can choose for the same work."""

    weights: str  # what the model is loaded as
    autocast: bool  # bf16 compute over these weights
    batch: int  # samples in one forward and backward pass
    continuous_batching: bool = False  # transformers' own, in place of `generate`
    malloc: bool = False  # huge pages and kept memory, as our own workers have it

    @property
    def dtype(self) -> str:
        return "bf16" if self.autocast or self.weights == "bfloat16" else "fp32"

    @property
    def label(self) -> str:
        precision = f"{self.weights} weights" + (", bf16 autocast" if self.autocast else "")
        more = (", continuous batching" if self.continuous_batching else "") + (", malloc tuned" if self.malloc else "")
        return f"{precision}, batch {self.batch}{more}"

    def to_json(self) -> str:
        return json.dumps(asdict(self))


CANDIDATES = (
    TrlSettings(weights="float32", autocast=False, batch=64, malloc=True),
    TrlSettings(weights="bfloat16", autocast=False, batch=64),
    TrlSettings(weights="bfloat16", autocast=False, batch=64, malloc=True),
    TrlSettings(weights="float32", autocast=True, batch=64, malloc=True),
    # transformers' continuous batching is left out: it samples at less than half the speed of `generate` here.
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One candidate's step in seconds, or why it could not be run."""

    settings: TrlSettings
    seconds: float | None
    failure: str = ""


def choose(trials: Sequence[Trial], dtype: str | None) -> Trial:
    """The fastest trial of a dtype, or of all."""
    usable = [trial for trial in trials if trial.seconds is not None and dtype in (None, trial.settings.dtype)]
    if not usable:
        failures = "; ".join(f"{trial.settings.label}: {trial.failure}" for trial in trials if trial.failure)
        raise RuntimeError(f"no candidate of dtype {dtype or 'any'} could be run. {failures}")
    return min(usable, key=lambda trial: trial.seconds or 0.0)


def tried(
    try_one: Callable[[TrlSettings], Trial], *, dtype: str | None, key: Mapping[str, Any], cache: Path
) -> list[Trial]:
    """Trials of all candidates of a dtype; those that the cache has under the same key are not run again."""
    kept = read(cache)
    trials = []
    for settings in CANDIDATES:
        if dtype not in (None, settings.dtype):
            continue
        name = digest({**key, **asdict(settings)})
        if name not in kept:
            trial = try_one(settings)
            kept[name] = {"label": settings.label, "seconds": trial.seconds, "failure": trial.failure}
            write(cache, kept)
        entry = kept[name]
        trials.append(Trial(settings=settings, seconds=entry["seconds"], failure=entry["failure"]))
    return trials


def table(trials: Sequence[Trial]) -> dict[str, float | str]:
    """Trials as results.json lists them."""
    return {
        trial.settings.label: trial.failure.splitlines()[0] if trial.seconds is None else trial.seconds
        for trial in trials
    }
