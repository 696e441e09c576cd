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
    """Writes every finite number of every plan as a scalar.

    A resumed run adds a file, which tells TensorBoard to hide what earlier processes wrote from its
    first plan on.
    """

    def __init__(self, run_dir: Path) -> None:
        self._folder = Path(run_dir) / "tensorboard"
        self._writer: Any = None  # tensorboardX has no types
        self._text = ""

    def on_start(self, info: RunInfo) -> None:
        what = f"{info.recipe_name}: {info.algorithm} on {info.model}"
        self._text = f"{what}, {info.num_plans} plans, {info.cluster}"

    def on_plan(self, plan: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            if value is not None and math.isfinite(float(value)):
                self._open(plan).add_scalar(name, float(value), plan)

    def on_eval(self, plan: int, name: str, accuracy: float) -> None:
        self._open(plan).add_scalar(f"eval/{name}/accuracy", float(accuracy), plan)

    def on_end(self, summary: Mapping[str, Any]) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _open(self, plan: int) -> Any:
        if self._writer is None:
            from tensorboardX import SummaryWriter

            is_resumed = any(self._folder.glob("*tfevents*"))
            self._writer = SummaryWriter(
                str(self._folder),
                purge_step=plan if is_resumed else None,
                # Its file names tell seconds apart and no less: two files of one second would be one.
                filename_suffix=f".{time.time_ns()}",
                flush_secs=FLUSH_SECS,
            )
            if self._text:
                self._writer.add_text("run", self._text, plan)
        return self._writer
