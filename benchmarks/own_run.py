"""A run of the real command, `cauce train`, and what it left behind."""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.bench import Bench
from benchmarks.trl_environment import ROOT

COMMAND = Path(sys.executable).with_name("cauce")
TIMEOUT_S = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnRun:
    """When the command was called, and the files of its run that hold numbers."""

    began: float  # time.time()
    rows: tuple[dict[str, Any], ...]  # metrics.jsonl, in plan order
    summary: dict[str, Any]

    @property
    def plans(self) -> list[dict[str, Any]]:
        """The rows of plans; row 0 is the evaluation before the first."""
        return [row for row in self.rows if row["plan"] > 0]


def train(bench: Bench, name: str, recipe: str, settings: Mapping[str, Any]) -> OwnRun:
    """Runs a recipe to its end and reads its files; the run folder is removed."""
    from cauce.metrics.writer import read_metrics

    folder = bench.cache / "runs"
    folder.mkdir(parents=True, exist_ok=True)
    log = bench.log(name)
    log.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as home:
        overrides = {"run.dir": home, "run.name": "run", **settings}
        command = [str(COMMAND), "train", recipe, *(f"{key}={value}" for key, value in overrides.items())]
        began = time.time()
        with log.open("w", encoding="utf-8") as file:
            done = subprocess.run(
                command, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT, check=False, timeout=TIMEOUT_S
            )
        if done.returncode != 0:
            tail = "\n".join(log.read_text(encoding="utf-8").splitlines()[-25:])
            raise RuntimeError(f"{name}: the run ended with exit code {done.returncode}; the end of {log}:\n{tail}")
        run_dir = Path(home) / "run"
        rows = tuple(dict(row) for row in read_metrics(run_dir))
        summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    return OwnRun(began=began, rows=rows, summary=summary)
