"""`weights_vs_copy`: seconds from published weights to weights that 4 readers hold, against 4 plain copies at once.

Ours is `publish`, then `pull` by four processes at the same time, each of which checks the content; the other side is
what no store can do without, one memory copy per reader, by the same four processes at the same time. Weights are the
model's in fp32.
"""

import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.bench import START_TIMEOUT_S, STEP_TIMEOUT_S, Bench
from benchmarks.results import Result
from benchmarks.rounds import Facts, finish, spread
from benchmarks.trl_environment import ROOT
from benchmarks.turns import Player
from cauce.runtime.session import WORKER_ENV
from cauce.weights.store import WeightStore, choose_folder

NAME = "weights_vs_copy"
READERS = 4
WARM_UP = 3  # until the system has given the memory of files that come and go


def weights_vs_copy(bench: Bench) -> dict[str, Result]:
    """Both sides in turns, in this process and four readers."""
    from cauce.models.load import load_model

    model = load_model(bench.model, dtype=torch.float32, attention="sdpa").model
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    rounds = WARM_UP + bench.steps
    with tempfile.TemporaryDirectory() as run_dir, ExitStack() as stack:
        folder = choose_folder(Path(run_dir), run_id="bench", bytes_needed=3 * num_bytes)
        stack.callback(_remove, folder)
        folder.mkdir(parents=True)
        source = folder / "source"
        source.write_bytes(b"".join(tensor.numpy().tobytes() for tensor in tensors.values()))
        readers = [stack.enter_context(_start(bench, number, folder, source, rounds)) for number in range(READERS)]
        for reader in readers:
            reader.expect("ready", timeout_s=START_TIMEOUT_S)
        store = WeightStore(folder, keep=1)
        ours, copies = [], []
        for number in range(1, rounds + 1):
            began = time.perf_counter()
            digest = store.publish(tensors, version=number, lineage="bench")
            published = time.perf_counter() - began
            pulled = together(readers)
            if any(facts["checksum"] != digest for facts in pulled):
                raise RuntimeError(f"readers hold other weights than were published: {pulled}, {digest}")
            ours.append({"seconds": time.perf_counter() - began, "publish_s": published, "pull_s": _longest(pulled)})
            began = time.perf_counter()
            copied = together(readers)
            copies.append({"seconds": time.perf_counter() - began, "copy_s": _longest(copied)})
            began = time.perf_counter()
            together(readers)
            copies[-1]["fresh_s"] = time.perf_counter() - began
        for reader in readers:
            finish(reader)
    settings = {
        "model": bench.model_folder.name,
        "bytes": num_bytes,
        "readers": READERS,
        "shared_memory": folder.is_relative_to("/dev/shm"),
        "ours": "publish, then 4 pulls at once, each with a check of the content",
        "peer": "4 copies at once into memory that the readers have already",
    }
    return {NAME: as_result(ours[WARM_UP:], copies[WARM_UP:], settings=settings)}


def as_result(ours: list[Facts], copies: list[Facts], *, settings: dict[str, Any]) -> Result:
    own, theirs = ([facts["seconds"] for facts in side] for side in (ours, copies))
    return Result(
        ours=median(own),
        peer=median(theirs),
        unit="s",
        dtype="fp32",
        runs=len(own),
        peer_is="one memory copy per reader",
        spread={
            "ours": spread(own),
            "peer": spread(theirs),
            "ratio": spread([copy / mine for mine, copy in zip(own, theirs, strict=True)]),
        },
        settings=settings,
        detail={
            "publish_s": median(facts["publish_s"] for facts in ours),
            "pull_s": median(facts["pull_s"] for facts in ours),
            "copies_into_fresh_memory_s": median(facts["fresh_s"] for facts in copies),
        },
    )


def together(readers: Sequence[Player]) -> list[Facts]:
    """One round of all readers at the same time."""
    for reader in readers:
        reader.go()
    return [reader.expect("round", timeout_s=STEP_TIMEOUT_S) for reader in readers]


def _longest(facts: Sequence[Facts]) -> float:
    return max(float(each["seconds"]) for each in facts)


def _start(bench: Bench, number: int, folder: Path, source: Path, rounds: int) -> Player:
    module = "benchmarks.weights_reader"
    command = [sys.executable, "-m", module, str(folder), str(source), "1", str(rounds)]
    env = {**os.environ, **WORKER_ENV, "OMP_NUM_THREADS": "1"}
    return Player(f"reader {number}", command, env=env, cwd=ROOT, log=bench.log(f"weights-reader-{number}"))


def _remove(folder: Path) -> None:
    for path in folder.glob("*"):
        path.unlink()
    folder.rmdir()
