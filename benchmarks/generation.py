"""`generate_vs_transformers` and `generate_vs_vllm`: generated tokens a second, medians of rounds in turns.

Each side runs at the best of the settings that are listed here; what each of them gave is in results.json.
"""

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from statistics import median
from typing import Any

from benchmarks.bench import Bench
from benchmarks.generation_work import CHAT, SUMS, SYSTEM, GenerationWork
from benchmarks.machine import describe, num_cpus
from benchmarks.results import Result
from benchmarks.rounds import Facts, alone, alternate, best_of, spread
from benchmarks.trl_environment import ROOT
from benchmarks.turns import Player
from benchmarks.vllm_environment import ensure
from cauce.runtime.session import WORKER_ENV

WARM_UP = 1
MALLOC = {"GLIBC_TUNABLES": WORKER_ENV["GLIBC_TUNABLES"]}

OURS: dict[str, dict[str, Any]] = {f"{slots} slots": {"slots": slots} for slots in (64, 128)}
TRANSFORMERS: dict[str, dict[str, Any]] = {
    "dynamic cache, batch 128, malloc tuned": {"cache": "dynamic", "batch": 128, "malloc": True},
    "dynamic cache, batch 128": {"cache": "dynamic", "batch": 128, "malloc": False},
    "dynamic cache, batch 64, malloc tuned": {"cache": "dynamic", "batch": 64, "malloc": True},
    "dynamic cache, batch 32, malloc tuned": {"cache": "dynamic", "batch": 32, "malloc": True},
    "static cache, batch 128, malloc tuned": {"cache": "static", "batch": 128, "malloc": True},
}
_VLLM = {"eager": False, "bind": "", "max_num_seqs": 128, "malloc": True, "own_process": True, "omp": True}
VLLM: dict[str, dict[str, Any]] = {
    "compiled, 128 sequences, malloc tuned": _VLLM,
    "compiled, 128 sequences": {**_VLLM, "malloc": False},
    "compiled, 128 sequences, malloc tuned, in one process": {**_VLLM, "own_process": False},
    "compiled, 64 sequences, malloc tuned": {**_VLLM, "max_num_seqs": 64},
    "compiled, 128 sequences, malloc tuned, threads left unbound": {**_VLLM, "bind": "nobind"},
    "compiled, 128 sequences, malloc tuned, no OMP_NUM_THREADS": {**_VLLM, "omp": False},
    "eager, 128 sequences, malloc tuned": {**_VLLM, "eager": True},
}
KV_CACHE_GB = 4  # more than this work fills


def against_transformers(bench: Bench) -> dict[str, Result]:
    """Against `generate` of transformers as this environment has it."""
    version = describe()["transformers"]
    name = "generate_vs_transformers"
    return {name: measure(bench, name, peer="transformers", python=sys.executable, title=f"transformers {version}")}


def against_vllm(bench: Bench) -> dict[str, Result]:
    """Against vLLM for CPUs in an environment of its own."""
    environment = ensure()
    name = "generate_vs_vllm"
    return {name: measure(bench, name, peer="vllm", python=str(environment.python), title=environment.title)}


def measure(bench: Bench, name: str, *, peer: str, python: str, title: str) -> Result:
    work = work_of(bench, num_rounds=WARM_UP + bench.steps)
    trial = replace(work, num_rounds=WARM_UP + 1)
    dtype = bench.dtype
    candidates = {"ours": OURS, "transformers": TRANSFORMERS, "vllm": VLLM}

    def rate_of(side: str, settings: Mapping[str, Any]) -> float:
        with start(bench, trial, side=side, settings={**settings, "dtype": dtype}, python=python) as player:
            return float(alone(player, num_rounds=trial.num_rounds, warm_up=WARM_UP)[0]["rate"])

    key = {"work": json.loads(trial.to_json()), "machine": describe(), "peer": title, "dtype": dtype}
    # Ours changes from commit to commit, so its trials are never taken from an earlier call.
    own, own_tried = best_of(OURS, lambda settings: rate_of("ours", settings), key=key, cache=None)
    best, tried = best_of(
        candidates[peer], lambda settings: rate_of(peer, settings), key=key, cache=bench.cache / "rounds.json"
    )
    with (
        start(bench, work, side="ours", settings={**OURS[own], "dtype": dtype}, python=python) as player,
        start(bench, work, side=peer, settings={**candidates[peer][best], "dtype": dtype}, python=python) as other,
    ):
        played = alternate(player, other, num_rounds=work.num_rounds, warm_up=WARM_UP)
    return as_result(
        *played,
        dtype=dtype,
        title=title,
        settings={
            "work": {"model": bench.model_folder.name, **work.settings(), "warm_up_rounds": WARM_UP},
            "ours": {"chosen": own, "log_probs": "of each token", "threads": num_cpus()},
            "peer": {
                "chosen": best,
                "log_probs": "of each token" if peer == "vllm" else "none: generate returns none",
                "threads": num_cpus(),
            },
            "ours_tried_tokens_per_s": own_tried,
            "peer_tried_tokens_per_s": tried,
        },
    )


def as_result(
    ours: list[Facts], peer: list[Facts], *, dtype: str, title: str, settings: Mapping[str, Any], unit: str = "tokens/s"
) -> Result:
    """The figure of rounds that report a `rate`."""
    own, theirs = [[float(facts["rate"]) for facts in side] for side in (ours, peer)]
    return Result(
        ours=median(own),
        peer=median(theirs),
        unit=unit,
        dtype=dtype,
        runs=len(own),
        better="higher",
        peer_is=title,
        spread={
            "ours": spread(own),
            "peer": spread(theirs),
            "ratio": spread([mine / other for mine, other in zip(own, theirs, strict=True)]),
        },
        settings=settings,
        detail={"ours": ours, "peer": peer},
    )


def work_of(bench: Bench, *, num_rounds: int) -> GenerationWork:
    """The prompts as the model's own chat template renders them."""
    from cauce.models.load import load_tokenizer

    folder = bench.model_folder.resolve()
    tokenizer = load_tokenizer(str(folder))
    chats = [[{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}] for text in SUMS]
    chats += [[{"role": "user", "content": text}] for text in CHAT]
    prompts = []
    for chat in chats:
        ids: Any = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        prompts.append(tuple(int(token) for token in ids))
    end = tokenizer.eos_token_id
    return GenerationWork(model=str(folder), prompts=tuple(prompts), end_ids=(int(end),), num_rounds=num_rounds)


def start(bench: Bench, work: GenerationWork, *, side: str, settings: Mapping[str, Any], python: str) -> Player:
    """The process of one side."""
    name = {"ours": "cauce"}.get(side, side)
    program = sys.executable if side == "ours" else python
    command = [program, "-m", f"benchmarks.generate_{side}", work.to_json(), json.dumps(dict(settings))]
    return Player(name, command, env=env_of(side, settings), cwd=ROOT, log=bench.log(f"generate-{side}"))


def env_of(side: str, settings: Mapping[str, Any]) -> dict[str, str]:
    """All CPUs for each side, no network; ours as a worker of a run has it."""
    env = {**os.environ, "OMP_NUM_THREADS": str(num_cpus()), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if side == "ours":
        return env | WORKER_ENV
    env |= MALLOC if settings["malloc"] else {}
    if side == "vllm":
        env |= {
            "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GB),
            "VLLM_CPU_OMP_THREADS_BIND": settings["bind"] or f"0-{num_cpus() - 1}",
            "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(settings["own_process"])),
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
        }
        if not settings["omp"]:  # vLLM then chooses how many threads work between steps
            del env["OMP_NUM_THREADS"]
    return env
