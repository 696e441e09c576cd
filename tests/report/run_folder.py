"""Run folders as a run leaves them, written by the journal and the metrics writer; no model runs."""

import json
from pathlib import Path

import numpy as np

from cauce.journal.store import Journal
from cauce.metrics.summary import build_summary, environment, eval_stats, read_eval
from cauce.metrics.writer import MetricsWriter, read_metrics
from cauce.types import Completion, Outcome, Plan, Row, Task
from tests.tiny import EOS_ID, byte_tokenizer

GROUP_SIZE = 4
TASKS_PER_PLAN = 2
TOKENIZER = byte_tokenizer()
HOSTILE = "</script><script>window.broken = 1</script><img src=x onerror='window.broken = 2'>"
UNICODE = "caf\u00e9 \U0001f600\nsecond line"
RECIPE = '[model]\npath = "tiny"\n\n[data]\nsystem = "</pre><script>window.broken = 3</script>"\n'


def make_run(run_dir: Path, *, num_plans: int, evaluates: bool = True, ends: bool = True) -> Path:
    """A run of `num_plans` plans; one that does not evaluate, or did not end, lacks what such a run lacks."""
    run_dir.mkdir(parents=True)
    (run_dir / "recipe.toml").write_text(RECIPE)
    TOKENIZER.save_pretrained(run_dir / "model")
    _write_journal(run_dir, num_plans)
    writer = MetricsWriter(run_dir, clock=lambda: 1e9)
    if evaluates:
        _write_eval(run_dir, "before", right=3)
        writer.on_eval(0, "test", 0.15)
    for plan in range(1, num_plans + 1):
        writer.on_plan(plan, plan_metrics(plan))
        if evaluates and plan % 10 == 0:
            _write_eval(run_dir, f"plan_{plan:06d}", right=10)
            writer.on_eval(plan, "test", 0.5)
    if evaluates and ends:
        _write_eval(run_dir, "after", right=15)
        writer.on_eval(num_plans, "test", 0.75)
    writer.close()
    if ends:
        _write_summary(run_dir, num_plans)
    return run_dir


def plan_metrics(plan: int) -> dict[str, float]:
    """Numbers of one plan, with a loss near 0 and one skipped plan (the third)."""
    is_skipped = plan == 3
    return {
        "optim/step": plan,
        "optim/lr": 1e-5 * (1 - plan / 50),
        "optim/skipped": int(is_skipped),
        "optim/grad_norm": float("nan") if is_skipped else 1.0 + 0.1 * (plan % 3),
        "reward/mean": min(0.9, 0.1 + 0.05 * plan + 0.03 * (plan % 3)),
        "reward/std": 0.4,
        "reward/zero_variance_fraction": 0.125 * (plan % 4),
        "response/length_mean": 30.0 - plan / 2,
        "response/truncated_fraction": max(0.0, 0.4 - plan / 20),
        "policy/entropy": 1.2 - plan / 30,
        "policy/clip_fraction_low": 0.0,
        "policy/clip_fraction_high": 0.0,
        "sampler/log_ratio_abs_mean": 4e-6 + 1e-7 * plan,
        "loss/policy": 0.004 * (-1) ** plan,
        "time/generate": 3.0 + 0.1 * (plan % 4),
        "time/reward": 0.2,
        "time/learn": 3.5,
        "time/sync": 0.5,
        "time/idle": 0.1,
        "time/journal": 0.02,
        "time/checksum": 0.08,
        "time/checkpoint": 0.4 if plan % 10 == 1 else 0.0,
        "time/eval": 2.0 if plan % 10 == 1 else 0.0,
        "time/total": 7.4 + 0.1 * (plan % 4),
        "tokens_per_s": 400.0 + plan,
    }


def _write_journal(run_dir: Path, num_plans: int) -> None:
    meta = {"group_size": str(GROUP_SIZE), "fingerprint": json.dumps({"threads": 2, "isa": "avx512"})}
    with Journal.create(run_dir, meta=meta, clock=lambda: 1e9) as journal:
        journal.event("death", {"worker": "rollout-0", "cause": "killed by signal 9 <b>bold</b>"})
        for plan in range(1, num_plans + 1):
            tasks = tuple(range((plan - 1) * TASKS_PER_PLAN, plan * TASKS_PER_PLAN))
            with journal.transaction():
                journal.admit([_task(task) for task in tasks])
                for task in tasks:
                    _write_group(journal, task, plan)
            journal.write_plan(Plan(number=plan, tasks=tasks, mini_batches=(tasks,)))
            journal.mark_applied(plan, checksum=f"{plan:016x}", metrics={})


def _task(task: int) -> Task:
    row = Row(id=f"train:{task}", prompt=f"What is {task} + 2?", columns={"answer": str(task + 2)})
    return Task(id=task, row=row, content_hash=f"{task:x}", prompt_ids=_ids(str(row.prompt)))


def _write_group(journal: Journal, task: int, plan: int) -> None:
    indices = tuple(range(GROUP_SIZE))
    attempt = journal.lease(task, indices=indices, worker="rollout-0", version=plan - 1, until=2e9)
    texts = [f"The answer is {task + 2}.", UNICODE, HOSTILE, f"I think {task}"]
    completions = []
    for index, text in zip(indices, texts, strict=True):
        ids = np.append(_ids(text), np.int32(EOS_ID)).astype(np.int32)
        if index == 3:
            ids = ids[:-1]
        logps = np.log(np.linspace(0.99, 0.05, len(ids))).astype(np.float32)
        completions.append(
            Completion(
                task=task,
                index=index,
                attempt=attempt,
                token_ids=ids,
                logps=logps,
                versions=np.full(len(ids), plan - 1, dtype=np.int32),
                mask=np.ones(len(ids), dtype=np.uint8),
                finish_reason="length" if index == 3 else "stop",
            )
        )
    journal.record_answers(completions)
    scored = [Outcome(status="scored", value=float(i == 0), parts={"r": float(i == 0)}, detail="") for i in range(3)]
    failed = Outcome(status="failed", value=None, parts={"r": None}, detail="ValueError: no")
    journal.record_outcomes([(task, index, outcome) for index, outcome in enumerate([*scored, failed])])
    journal.mark_ready(task)


def _write_eval(run_dir: Path, name: str, *, right: int, count: int = 20) -> None:
    folder = run_dir / "eval"
    folder.mkdir(exist_ok=True)
    with (folder / f"{name}.jsonl").open("w") as file:
        for task in range(count):
            answer = {
                "task": task,
                "row": {"id": f"test:{task}", "columns": {"answer": str(task)}},
                "prompt": f"How much is {task}?",
                "completion": HOSTILE if task == 1 else f"{task} it is ({name})",
                "reward": float(task < right),
                "finish_reason": "length" if name == "before" and task % 2 else "stop",
                "num_tokens": 12,
            }
            file.write(json.dumps(answer) + "\n")


def _write_summary(run_dir: Path, num_plans: int) -> None:
    summary = build_summary(
        read_metrics(run_dir),
        run=str(run_dir),
        status="finished",
        num_plans=num_plans,
        wall_s=312.5,
        before=eval_stats(read_eval(run_dir / "eval" / "before.jsonl")),
        after=eval_stats(read_eval(run_dir / "eval" / "after.jsonl")),
        peak_memory_mb=4100.0,
        details={"model": "tiny <model>", "algorithm": "grpo", **environment()},
    )
    (run_dir / "summary.json").write_text(json.dumps(summary))


def _ids(text: str) -> np.ndarray:
    return np.asarray(TOKENIZER.encode(text, add_special_tokens=False), dtype=np.int32)
