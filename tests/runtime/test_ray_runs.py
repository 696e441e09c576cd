"""Whole runs of a tiny model on a real Ray of their own: learning, seeds, deaths, kill -9, replay, two runs at once."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import ray

import cauce
from cauce.journal import Journal
from cauce.metrics.observer import NullObserver
from cauce.runtime.process import process_tree
from cauce.stages import rl

ROWS = [{"prompt": f"say {i}", "answer": str(i)} for i in range(40)]
SETTINGS: dict[str, Any] = {
    "run.plans": 3,
    "rollout.max_tokens": 6,
    "rollout.group_size": 4,
    "learner.tasks_per_plan": 3,
    "learner.lr": 1e-3,
    "engine.dtype": "fp32",
    "learner.dtype": "fp32",
    "eval.every": 0,
    "cluster.dashboard": False,
    "logging.tensorboard": False,
    "logging.live": False,
}


def likes_letters(completions: list[str], **_: Any) -> list[float]:
    """Share of the answer that is lower-case letters: something a random model can learn to please."""
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [sum("a" <= letter <= "z" for letter in text) / 6 for text in texts]


def trainer(model: str, run_dir: Path, **settings: Any) -> cauce.Trainer:
    named = {key.replace("__", "."): value for key, value in settings.items()}
    return cauce.Trainer(
        model=model,
        data=ROWS,
        test=ROWS[:4],
        reward=likes_letters,
        settings={**SETTINGS, "run.dir": str(run_dir.parent), "run.name": run_dir.name, **named},
        observer=NullObserver(),
    )


def recorded(run: Path) -> list[tuple[int, int, list[int], list[float]]]:
    """Task, index, tokens and log-probs of every answer in the journal."""
    with Journal.read_only(run) as journal:
        return [
            (task, c.index, c.token_ids.tolist(), c.logps.tolist())
            for task in journal.tasks()
            for c in journal.answers(task)
        ]


def checksums(run: Path) -> list[str | None]:
    with Journal.read_only(run) as journal:
        return [record.checksum for record in journal.plans()]


def test_the_reward_rises_and_the_run_folder_is_whole(model: str, tmp_path: Path, shared_ray: None) -> None:
    run = tmp_path / "run"
    summary = trainer(model, run, run__plans=12, learner__lr=1e-2, learner__tasks_per_plan=6).train()
    assert summary["status"] == "finished"
    assert summary["plans"] == 12
    assert summary["eval_after"] > summary["eval_before"] + 0.2
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["plan"] for row in rows] == list(range(13))
    first = rows[1]
    assert first["sampler/log_ratio_abs_mean"] < 1e-4  # fp32, on policy
    assert first["optim/grad_norm"] > 0
    parts = ("generate", "reward", "learn", "checksum", "sync", "journal", "idle")
    assert sum(first[f"time/{part}"] for part in parts) == pytest.approx(first["time/total"], rel=0.02)
    for name in ("recipe.toml", "recipe.json", "summary.json", "eval/before.jsonl", "eval/after.jsonl"):
        assert (run / name).is_file(), name
    with Journal.read_only(run) as journal:
        counts = journal.counts()
        assert counts == {**dict.fromkeys(counts, 0), "trained": 72}
        assert [c.plan for c in journal.checkpoints()][-1] == 12


def test_the_final_model_generates_what_the_run_evaluated(model: str, tmp_path: Path, shared_ray: None) -> None:
    """G14."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run = tmp_path / "run"
    trainer(model, run).train()
    folder = run / "model"
    loaded, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    for line in (run / "eval" / "after.jsonl").read_text().splitlines():
        record = json.loads(line)
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": record["prompt"]}], tokenize=False, add_generation_prompt=True
        )
        ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
        out = loaded.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
        assert tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True) == record["completion"]


def test_the_seed_decides_and_the_number_of_actors_does_not(model: str, tmp_path: Path, shared_ray: None) -> None:
    """D13, D14: seed 1 with one actor and with two gives the same samples; seed 2 gives others."""
    one, two, other = tmp_path / "one", tmp_path / "two", tmp_path / "other"
    trainer(model, one, run__seed=1, run__plans=1).train()
    trainer(model, two, run__seed=1, run__plans=1, rollout__actors=2, rollout__cpus=0.4).train()
    trainer(model, other, run__seed=2, run__plans=1).train()
    tokens = [[(t, i, ids) for t, i, ids, _ in recorded(run)] for run in (one, two, other)]
    assert tokens[0] == tokens[1]
    assert [ids for _, _, ids in tokens[0]] != [ids for _, _, ids in tokens[2]]
    answers = [tuple(ids) for task, _, ids in tokens[0] if task == 0]
    assert len(set(answers)) > 1  # the samples of a group differ


def test_a_killed_actor_is_replaced_and_explained(model: str, tmp_path: Path, shared_ray: None) -> None:
    """H2, H17."""

    class Killer(NullObserver):
        def __init__(self) -> None:
            self.notes: list[str] = []
            self.done = False

        def on_plan(self, plan: int, metrics: Any) -> None:
            if not self.done:
                self.done = True
                (log,) = (tmp_path / "run" / "logs").glob("rollout-0.log")
                pid = int(log.read_text().split("process ")[1].split()[0])
                os.kill(pid, signal.SIGKILL)

        def on_note(self, text: str) -> None:
            self.notes.append(text)

    watcher = Killer()
    run = tmp_path / "run"
    made = trainer(model, run)
    made._observer = watcher
    summary = made.train()
    assert summary["status"] == "finished"
    told = "\n".join(watcher.notes)
    assert "rollout rollout-0 on" in told
    assert "died" in told
    assert "memory when last seen" in told
    assert "last lines" in told
    with Journal.read_only(run) as journal:
        assert journal.counts()["trained"] == 9
        assert sum(len(record.plan.tasks) for record in journal.plans()) == 9
        assert [event.kind for event in journal.events("worker_died")] == ["worker_died"]


def test_a_run_works_inside_an_event_loop_and_twice(model: str, tmp_path: Path, shared_ray: None) -> None:
    async def cell() -> dict[str, Any]:
        return trainer(model, tmp_path / f"run-{time.time_ns()}", run__plans=1).train()

    assert asyncio.run(cell())["plans"] == 1
    assert asyncio.run(cell())["plans"] == 1
    assert ray.is_initialized()  # a Ray that was there before stays


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ten_short_runs_end_well_and_say_nothing_of_errors(model: str, tmp_path: Path) -> None:
    """H3: where a run's end races with its workers' ends, one in four said so elsewhere."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    settings = {**SETTINGS, "run.plans": 1, "run.dir": tmp_path, "model.path": model, "data.train": rows}
    settings["reward.fn"] = "tests.runtime.test_ray_runs:likes_letters"
    command = [
        sys.executable,
        "-m",
        "cauce",
        "train",
        "grpo",
        *(f"{k}={str(v).lower() if isinstance(v, bool) else v}" for k, v in settings.items()),
    ]
    root = Path(__file__).parents[2]
    for number in range(10):
        done = subprocess.run(
            [*command, f"run.name=run-{number}"],
            capture_output=True,
            text=True,
            timeout=120,
            cwd=root,
            env={**os.environ, "PYTHONPATH": f"{root / 'src'}:{root}"},
        )
        said = done.stdout + done.stderr
        assert done.returncode == 0, said
        assert "error" not in said.lower(), said


@pytest.mark.slow
def test_a_cell_that_is_run_twice_starts_a_ray_of_its_own_twice(model: str, tmp_path: Path) -> None:
    code = f"""
        import asyncio
        from pathlib import Path
        from tests.runtime.test_ray_runs import trainer
        async def cell(name):
            return trainer({model!r}, Path({str(tmp_path)!r}) / name, run__plans=1).train()["status"]
        async def notebook():
            return [await cell("one"), await cell("two")]
        print(asyncio.run(notebook()))
        import ray
        assert not ray.is_initialized()
    """
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=180,
        cwd=root,
        env={**os.environ, "PYTHONPATH": f"{root / 'src'}:{root}"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "['finished', 'finished']" in done.stdout


def test_a_reward_never_runs_in_the_engines_process(model: str, tmp_path: Path, shared_ray: None) -> None:
    seen = tmp_path / "pids"

    def where(completions: list[Any], **_: Any) -> list[float]:
        with seen.open("a") as file:
            file.write(f"{os.getpid()}\n")
        return [float(i) for i in range(len(completions))]

    run = tmp_path / "run"
    made = trainer(model, run, run__plans=1)
    made._reward = where
    made.train()
    pids = set(seen.read_text().split())
    logs = {log.name: log.read_text() for log in (run / "logs").glob("*.log")}
    engine = logs["rollout-0.log"].split("process ")[1].split()[0]
    assert pids == {logs["reward-0.log"].split("process ")[1].split()[0]}
    assert engine not in pids
    assert str(os.getpid()) not in pids


def script(tmp_path: Path, model: str, run: Path, **changes: Any) -> Path:
    """A program that trains, for tests that kill it; changed settings as section__key."""
    path = tmp_path / f"program-{run.name}.py"
    settings = {**SETTINGS, "run.dir": str(run.parent), "run.name": run.name, "run.plans": 8, "checkpoint.every": 2}
    settings |= {key.replace("__", "."): value for key, value in changes.items()}
    path.write_text(
        textwrap.dedent(f"""
        import cauce
        rows = [{{"prompt": f"say {{i}}", "answer": str(i)}} for i in range(40)]
        def score(completions, **_):
            texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
            return [sum(letter == "e" for letter in text) / 6 for text in texts]
        if __name__ == "__main__":
            cauce.Trainer(model={model!r}, data=rows, reward=score, settings={settings!r}).train()
        """)
    )
    return path


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie that its parent has not collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
def test_kill_9_of_the_driver_leaves_nothing_behind_and_resumes_bitwise(model: str, tmp_path: Path) -> None:
    """H8, G1, G2, G3, D14: kill -9 in mid-run; resumed, it equals the run that was never stopped."""
    killed, straight = tmp_path / "killed", tmp_path / "straight"
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), "TMPDIR": "/tmp"}
    program = script(tmp_path, model, killed, engine__deterministic=True)
    process = subprocess.Popen([sys.executable, str(program)], env=environment, stdout=subprocess.DEVNULL)
    deadline = time.time() + 240
    while time.time() < deadline:
        rows = (killed / "metrics.jsonl").read_text().splitlines() if (killed / "metrics.jsonl").exists() else []
        if len(rows) >= 4:
            break
        time.sleep(0.05)
    family = process_tree(process.pid)
    assert len(family) > 5  # Ray's own, an engine, a learner, a reward
    process.send_signal(signal.SIGKILL)
    process.wait()
    gone = time.time() + 15
    while any(alive(pid) for pid in family) and time.time() < gone:
        time.sleep(0.2)
    assert [pid for pid in family if alive(pid)] == []
    before = {(t, i): ids for t, i, ids, _ in recorded(killed)}
    program.write_text(program.read_text().replace("killed", "straight"))
    subprocess.run([sys.executable, str(program)], env=environment, check=True, stdout=subprocess.DEVNULL)
    resume = tmp_path / "resume.py"
    resume.write_text(
        program.read_text().split("if __name__")[0]
        + f'if __name__ == "__main__":\n    cauce.Trainer.resume({str(killed)!r}, data=rows, reward=score)\n'
    )
    subprocess.run([sys.executable, str(resume)], env=environment, check=True, stdout=subprocess.DEVNULL)
    assert checksums(killed) == checksums(straight)
    assert len(checksums(killed)) == 8
    after = {(t, i): ids for t, i, ids, _ in recorded(killed)}
    assert {key: after[key] for key in before} == before  # nothing acknowledged was made again
    with Journal.read_only(killed) as journal:
        assert journal.counts()["trained"] == 24
    result = rl.replay(killed, observer=NullObserver())
    assert (result.plans, result.divergent_plan) == (8, None)


@pytest.mark.slow
def test_two_runs_at_once_each_have_a_ray_of_their_own(model: str, tmp_path: Path) -> None:
    """H9, H10, H3: both end well, quietly, and neither joins the other, nor a stranger whom the environment names; the
    ports that Ray likes best are taken."""
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), "RAY_ADDRESS": "127.0.0.1:6379"}
    holders = [socket.socket() for _ in range(2)]
    for holder, port in zip(holders, (6379, 8265), strict=True):
        with contextlib.suppress(OSError):  # taken already, which serves as well
            holder.bind(("127.0.0.1", port))
            holder.listen()
    runs = [tmp_path / "first", tmp_path / "second"]
    programs = [script(tmp_path, model, run, run__plans=3, cluster__dashboard=True) for run in runs]
    started = [
        subprocess.Popen(
            [sys.executable, str(p)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for p in programs
    ]
    outputs = [process.communicate(timeout=400)[0] for process in started]
    for holder in holders:
        holder.close()
    for process, output in zip(started, outputs, strict=True):
        assert process.returncode == 0, output
        assert "ERROR" not in output
        assert "Traceback" not in output
        assert "ray a Ray of its own on this machine" in output
    assert checksums(runs[0]) == checksums(runs[1])
