"""Figures and the file they are kept in, results.json: one entry per name, merged when one is measured again.

`ratio` always says how many times better ours is: peer / ours where less is better, ours / peer where more is. The
peer is another trainer, or a bound that we have set ourselves; `peer_is` says which.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

RESULTS = Path(__file__).parent / "results.json"
DIGITS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One figure, with what it takes to judge it."""

    ours: float
    peer: float | None
    unit: str  # "fraction" for shares
    dtype: str
    runs: int  # how many measurements `ours` stands for
    better: Literal["lower", "higher"] = "lower"
    peer_is: str = ""
    spread: Mapping[str, Any] = field(default_factory=dict)  # smallest and largest of the measurements
    settings: Mapping[str, Any] = field(default_factory=dict)
    detail: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ratio(self) -> float | None:
        """How many times better we are; None where there is nothing to compare with."""
        if self.peer is None:
            return None
        best, other = (self.ours, self.peer) if self.better == "lower" else (self.peer, self.ours)
        if best <= 0:
            raise ValueError(
                f"ours {self.ours}, peer {self.peer}, {self.better} is better: a ratio needs numbers above 0"
            )
        return other / best

    def entry(self, machine: Mapping[str, Any], took_s: float, measured: str) -> dict[str, Any]:
        """The figure as results.json holds it."""
        entry = {
            "ours": self.ours,
            "peer": self.peer,
            "ratio": self.ratio,
            "unit": self.unit,
            "dtype": self.dtype,
            "runs": self.runs,
            "better": self.better,
            "peer_is": self.peer_is,
            "spread": dict(self.spread),
            "settings": dict(self.settings),
            "detail": dict(self.detail),
            "machine": dict(machine),
            "measured": measured,
            "took_s": round(took_s),
        }
        rounded: dict[str, Any] = _rounded(entry)
        return rounded

    def sentence(self) -> str:
        """The figure for a person."""
        text = f"{self.ours:.{DIGITS}g} {self.unit}"
        if self.peer is not None and self.ratio is not None:
            text += f", {self.peer_is or 'peer'} {self.peer:.{DIGITS}g}: {self.ratio:.3g} times better"
        return text + (f" ({self.dtype})" if self.dtype else "")


def read(path: Path = RESULTS) -> dict[str, Any]:
    """All entries by name; none where the file is missing."""
    if not path.exists():
        return {}
    entries = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(entries, dict):
        raise ValueError(f"{path} holds {type(entries).__name__}, not entries by name; delete it to start anew")
    return entries


def merge(entries: Mapping[str, Any], path: Path = RESULTS) -> None:
    """Puts new entries over old ones of the same name, in one rename; other names stay as they are."""
    merged = {**read(path), **entries}
    text = json.dumps({name: merged[name] for name in sorted(merged)}, indent=1, allow_nan=False) + "\n"
    beside = path.with_suffix(".tmp")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)


def _rounded(value: Any) -> Any:
    """Digits beyond the fourth are noise, and would change at every measurement."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return value
