"""TRL's side of a comparison: its GRPOTrainer on the same work, run by the Python of TRL's own environment.

    python -m benchmarks.peer_trl WORKLOAD SETTINGS

The seconds of a step go from TRL's on_step_begin to its on_step_end: sampling, rewards, forward, backward and the
optimizer. Fetching the batch and logging come outside of it and are not counted.
"""

import json
import os
import sys
import tempfile
import time
from typing import Any

import torch
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]  # lives in an environment of its own

from benchmarks import rewards
from benchmarks.turns import Turns
from benchmarks.workload import Workload, prompt_digest

# A cache as large as the work needs; by itself it takes half of the machine's memory anew at every step.
CONTINUOUS_BATCHING = {"num_blocks": 96, "page_size": 128, "max_batch_tokens": 4096}

REWARDS = {"correct": rewards.correct, "ramp": rewards.ramp}


class TakesTurns(TrainerCallback):
    """Waits before each step; reports it when TRL logs it, which is right after its end."""

    def __init__(self, turns: Turns, ready: dict[str, Any]) -> None:
        self._turns = turns
        self._ready = ready
        self._began = self._seconds = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._turns.tell("ready", self._ready)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._turns.wait()
        self._began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._seconds = time.perf_counter() - self._began

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "reward" not in logs:
            return  # the line about the whole training, at its end
        facts = {
            "seconds": self._seconds,
            "reward": logs["reward"],
            "silent_groups": logs["frac_reward_zero_std"],
            "length": logs["completions/mean_length"],
        }
        self._turns.tell("step", {name: float(value) for name, value in facts.items()})


def config_of(workload: Workload, settings: dict[str, Any], folder: str, changes: dict[str, Any] | None = None) -> Any:
    """TRL's configuration of this work; `settings` are those that trl_settings.py chooses among."""
    num_samples = workload.num_prompts * workload.group_size
    values = {
        "output_dir": folder,
        "use_cpu": True,
        "seed": workload.seed,
        "model_init_kwargs": {"dtype": settings["weights"], "attn_implementation": "sdpa"},
        "bf16": settings["autocast"],
        "per_device_train_batch_size": settings["batch"],
        "gradient_accumulation_steps": num_samples // settings["batch"],
        "use_transformers_continuous_batching": settings["continuous_batching"],
        "transformers_continuous_batching_config": CONTINUOUS_BATCHING if settings["continuous_batching"] else None,
        "gradient_checkpointing": False,
        "use_vllm": False,
        "max_steps": workload.num_steps,
        "num_generations": workload.group_size,
        "max_completion_length": workload.max_tokens,
        "temperature": workload.temperature,
        "learning_rate": workload.lr,
        "lr_scheduler_type": "constant",
        "loss_type": "grpo",
        "scale_rewards": "group",
        "beta": 0.0,
        "num_iterations": 1,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "shuffle_dataset": False,
        "dataloader_num_workers": 0,
        "logging_strategy": "steps",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    return GRPOConfig(**{**values, **(changes or {})})


def main() -> None:
    turns = Turns.from_pipes()
    workload = Workload.from_json(sys.argv[1])
    settings = json.loads(sys.argv[2])
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))

    from datasets import Dataset  # comes with TRL

    tokenizer = AutoTokenizer.from_pretrained(workload.model, padding_side="left", truncation_side="left")
    rows = [
        {"prompt": [{"role": "user", "content": row["prompt"]}], "answer": row["answer"]}
        for row in workload.read_rows()
    ]
    prompts: list[Any] = [row["prompt"] for row in rows]
    rendered: Any = tokenizer.apply_chat_template(prompts, add_generation_prompt=True, tokenize=True, return_dict=True)
    ready = {"prompts": prompt_digest(rendered["input_ids"]), "threads": torch.get_num_threads()}
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=workload.model,
            reward_funcs=REWARDS[workload.reward],
            args=config_of(workload, settings, folder),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            callbacks=[TakesTurns(turns, ready)],
        )
        trainer.train()
    turns.wait()
    turns.tell("end", {})


if __name__ == "__main__":
    main()
