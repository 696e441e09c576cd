"""What every measurement gets: the model, how often to measure, and where its files go."""

import json
from dataclasses import dataclass
from pathlib import Path

from benchmarks.trl_environment import CACHE, ROOT
from benchmarks.workload import Workload

MODEL = "SmolLM2-135M-Instruct"
STEP_TIMEOUT_S = 1800.0
START_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """One call of `make bench`."""

    model: str = MODEL
    steps: int = 5  # measured steps of a comparison, after one to warm up
    cache: Path = CACHE
    charts: Path = ROOT / "benchmarks"

    @property
    def model_folder(self) -> Path:
        from cauce.models.load import local_folder  # imports torch, which the quick measurements do without

        return local_folder(self.model)

    @property
    def dtype(self) -> str:
        """What `auto` means on this machine."""
        from cauce.models.load import resolve_dtype

        return {"bfloat16": "bf16", "float32": "fp32"}[str(resolve_dtype("auto")).removeprefix("torch.")]

    def log(self, name: str) -> Path:
        """Where the output of a measured process goes."""
        return self.cache / "logs" / f"{name}.log"

    def workload(self, folder: Path, *, reward: str, num_steps: int) -> Workload:
        """The work of a comparison, with its rows written to `folder`: two-digit sums in the order of the data set."""
        from cauce.data.addition import addition_rows

        rows = folder / "rows.jsonl"
        workload = Workload(
            model=str(self.model_folder.resolve()),
            rows=str(rows),
            reward="ramp" if reward == "ramp" else "correct",
            num_steps=num_steps,
        )
        chosen = addition_rows("train")[: num_steps * workload.num_prompts]
        lines = [json.dumps({"prompt": row.prompt, **row.columns}) for row in chosen]
        rows.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return workload
