"""RUN/tensorboard: the same names and the same x axis (the plan) as metrics.jsonl, for those who watch there.

tensorboardX comes with Ray Tune, so this costs no dependency of its own.
"""

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cauce.metrics.observer import NullObserver, RunInfo

FLUSH_SECS = 5  # a thread of its own writes, so that a plan never waits for it


class TensorBoardWriter(NullObserver):
    """Writes every finite number of every plan as a scalar."""

    def __init__(self, run_dir: Path, *, resume_from: int | None = None) -> None:
        """`resume_from`: the checkpoint's plan; TensorBoard hides what an earlier process wrote after it."""
        from tensorboardX import SummaryWriter

        purge_step = None if resume_from is None else resume_from + 1
        # Its file names tell seconds apart and no less: two writers of one second would overwrite each other.
        suffix = f".{time.time_ns()}"
        folder = str(Path(run_dir) / "tensorboard")
        self._writer = SummaryWriter(
            folder, purge_step=purge_step, filename_suffix=suffix, flush_secs=FLUSH_SECS
        )

    def on_start(self, info: RunInfo) -> None:
        text = f"{info.recipe_name}: {info.algorithm} on {info.model}, {info.num_plans} plans, {info.cluster}"
        self._writer.add_text("run", text, 0)

    def on_plan(self, plan: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            if value is not None and math.isfinite(float(value)):
                self._writer.add_scalar(name, float(value), plan)

    def on_eval(self, plan: int, name: str, accuracy: float) -> None:
        self._writer.add_scalar(f"eval/{name}/accuracy", float(accuracy), plan)

    def on_end(self, summary: Mapping[str, Any]) -> None:
        self._writer.close()
