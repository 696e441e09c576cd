"""TRL's side of `time_to_accuracy_vs_trl`: the quickstart in TRL, run by the Python of TRL's own environment.

    python -m benchmarks.peer_trl_accuracy WORK SETTINGS

Every few steps it stops its clock, writes its weights, says so, and goes on when it is told to; whoever told it has
evaluated them meanwhile. It ends when its pipes are closed.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOTrainer  # type: ignore[import-not-found]  # lives in an environment of its own

from benchmarks.peer_trl import REWARDS, config_of
from benchmarks.turns import Turns
from benchmarks.workload import Workload


class Pauses(TrainerCallback):
    """Counts the seconds of steps; hands the weights out after every `every` of them."""

    def __init__(self, turns: Turns, *, every: int, folder: Path) -> None:
        self._turns = turns
        self._every = every
        self._folder = folder
        self._began = self._seconds = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._turns.tell("ready", {"threads": torch.get_num_threads()})
        self._turns.wait()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._seconds += time.perf_counter() - self._began
        if state.global_step % self._every == 0:
            others["model"].save_pretrained(self._folder)
            self._turns.tell("round", {"step": state.global_step, "seconds": self._seconds})
            self._turns.wait()


def main() -> None:
    turns = Turns.from_pipes()
    given = json.loads(sys.argv[1])
    workload, settings = Workload(**given["workload"]), json.loads(sys.argv[2])
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))

    from datasets import Dataset  # comes with TRL

    model: Any = AutoModelForCausalLM.from_pretrained(
        workload.model, dtype=getattr(torch, settings["weights"]), attn_implementation="sdpa"
    )
    model.generation_config.eos_token_id = given["stop_ids"]  # TRL ends and masks answers by these
    rows = [
        {
            "prompt": [{"role": "system", "content": given["system"]}, {"role": "user", "content": row["prompt"]}],
            "answer": row["answer"],
        }
        for row in workload.read_rows()
    ]
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(workload, settings, folder, {"lr_scheduler_type": given["schedule"]})
        config.model_init_kwargs = None  # the model is given as it is
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=REWARDS[workload.reward],
            args=config,
            train_dataset=Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(workload.model, padding_side="left"),
            callbacks=[Pauses(turns, every=given["every"], folder=Path(given["weights"]))],
        )
        trainer.train()
    turns.tell("end", {})
    turns.wait()


if __name__ == "__main__":
    main()
