"""RUN/tensorboard: the same names and the same x axis (the plan) as metrics.jsonl, for those who watch there.

tensorboardX comes with Ray Tune, so this costs no dependency of its own.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cauce.metrics.observer import NullObserver, RunInfo


class TensorBoardWriter(NullObserver):
    """Writes every finite number of every plan as a scalar."""

    def __init__(self, run_dir: Path, *, resume_from: int | None = None) -> None:
        """`resume_from`: the checkpoint's plan; TensorBoard hides what an earlier process wrote after it."""
        from tensorboardX import SummaryWriter

        purge_step = None if resume_from is None else resume_from + 1
        self._writer = SummaryWriter(str(Path(run_dir) / "tensorboard"), purge_step=purge_step)

    def on_start(self, info: RunInfo) -> None:
        text = f"{info.recipe_name}: {info.algorithm} on {info.model}, {info.num_plans} plans, {info.cluster}"
        self._writer.add_text("run", text, 0)

    def on_plan(self, plan: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            if value is not None and math.isfinite(float(value)):
                self._writer.add_scalar(name, float(value), plan)
        self._writer.flush()

    def on_eval(self, plan: int, name: str, accuracy: float) -> None:
        self._writer.add_scalar(f"eval/{name}/accuracy", float(accuracy), plan)
        self._writer.flush()

    def on_end(self, summary: Mapping[str, Any]) -> None:
        self._writer.close()
