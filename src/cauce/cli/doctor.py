"""`cauce doctor`: what this machine has, and what of it will hurt, in under two seconds.

Local facts only: nothing is imported that is not light, nothing is started, no network is touched. Memory and
cores are what this process may use (cgroup limit, CPU quota, affinity mask), not what the machine is sold
with. Readers take the root of the file system, so that tests hand them a small one of their own.
"""

import os
import platform
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

import typer

from cauce.engine.compilers import find_compiler
from cauce.engine.vllm_python import MADE, VARIABLE, find_vllm_python
from cauce.errors import ResourceError
from cauce.runtime.machine import cpu_quota, memory, read_text

GIB = 2**30
QUICKSTART_MEMORY = 6 * GIB
QUICKSTART_DISK = 6 * GIB
QUICKSTART_WEIGHTS = 0.6 * GIB
_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16")
_BF16_FLAGS = {"avx512_bf16", "amx_bf16"}

Verdict = Literal["ok", "note", "problem"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One line of the answer. `remedy` says what a note means, or what to do about a problem."""

    name: str
    value: str
    verdict: Verdict = "ok"
    remedy: str = ""


def doctor() -> None:
    """Check this machine: versions, cores, memory, shared memory, disk."""
    facts = list(gather(Path("/"), Path.cwd()))
    width = max(len(fact.name) for fact in facts)
    marks = {"ok": "  ", "note": "- ", "problem": "! "}
    colors = {"ok": None, "note": typer.colors.YELLOW, "problem": typer.colors.RED}
    for fact in facts:
        remedy = f"   ({fact.remedy})" if fact.remedy else ""
        typer.secho(f"{marks[fact.verdict]}{fact.name:{width}}  {fact.value}{remedy}", fg=colors[fact.verdict])
    problems = sum(fact.verdict == "problem" for fact in facts)
    if problems:
        typer.secho(f"{problems} to mend before a run", fg=typer.colors.RED)
        raise typer.Exit(1)
    typer.echo("ready")


def gather(root: Path, folder: Path) -> Iterator[Fact]:
    """Yield every fact, of the system under `root` and for runs in `folder`."""
    yield Fact(name="system", value=f"{platform.system()} {platform.release()} {platform.machine()}")
    yield from _software()
    yield _cores(root)
    yield _instructions(root)
    yield _compiler()
    yield _vllm(folder)
    yield _gpus(root)
    yield _memory(root)
    yield _shared_memory(root)
    yield _disk(folder)
    yield _models()


def _software() -> Iterator[Fact]:
    """Yield the versions of Python, Cauce and its direct dependencies, read from their metadata alone."""
    yield Fact(name="python", value=platform.python_version())
    try:
        requirements = metadata.requires("cauce") or []
        yield Fact(name="cauce", value=metadata.version("cauce"))
    except metadata.PackageNotFoundError:
        yield Fact(name="cauce", value="not installed", verdict="problem", remedy="make setup")
        return
    for requirement in requirements:
        if "extra ==" not in requirement:
            yield package_fact(requirement)


def package_fact(requirement: str) -> Fact:
    """Compare one requirement, such as `torch>=2.8`, with what is installed."""
    found = re.match(r"[\w.-]+", requirement)
    name = found.group() if found else requirement
    floor = re.search(r">=\s*([\d.]+)", requirement)
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Fact(name=name, value="missing", verdict="problem", remedy=f"pip install '{requirement}'")
    if floor and _release(version) < _release(floor.group(1)):
        remedy = f"{floor.group(1)} or newer is needed: pip install '{requirement}'"
        return Fact(name=name, value=version, verdict="problem", remedy=remedy)
    return Fact(name=name, value=version)


def _release(version: str) -> tuple[int, ...]:
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found.group().split(".")) if found else ()


def _cores(root: Path) -> Fact:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota(root)
    if quota is not None and quota < usable:
        remedy = "more threads than that would be throttled: set learner.threads and engine.threads"
        return Fact(name="cores", value=f"{usable}, limited to {quota:g}", verdict="note", remedy=remedy)
    return Fact(name="cores", value=str(usable))


def _instructions(root: Path) -> Fact:
    flags = set(read_text(root / "proc/cpuinfo").split())
    present = [flag for flag in _FLAGS if flag in flags]
    value = " ".join(present) or "unknown"
    if _BF16_FLAGS & flags:
        return Fact(name="instructions", value=value)
    remedy = "no fast bf16 on this CPU: dtype auto means fp32, about half the speed"
    return Fact(name="instructions", value=value, verdict="note", remedy=remedy)


def _compiler() -> Fact:
    found = find_compiler()
    if found:
        return Fact(name="compiler", value=found)
    remedy = (
        "generation and training are compiled for this CPU at first use, and take twice as long without; install g++"
    )
    return Fact(name="compiler", value="no C++ compiler", verdict="note", remedy=remedy)


def _vllm(folder: Path) -> Fact:
    """vLLM is optional, so that without it nothing is wrong; one that was named or made must fit."""
    if not os.environ.get(VARIABLE) and not (folder / MADE).exists():
        return Fact(name="vllm", value="none; the native engine needs none (docs/vllm.md)")
    try:
        found = find_vllm_python("" if os.environ.get(VARIABLE) else str(folder / MADE))
    except ResourceError as error:
        return Fact(name="vllm", value="does not fit", verdict="problem", remedy=str(error))
    return Fact(name="vllm", value=f"{found.vllm} in {found.python}")


def _gpus(root: Path) -> Fact:
    folder = root / "proc/driver/nvidia/gpus"
    count = len(list(folder.iterdir())) if folder.is_dir() else 0
    return Fact(name="gpus", value=f"{count} NVIDIA" if count else "none; the CPU is enough for the quickstart")


def _memory(root: Path) -> Fact:
    total, available = memory(root)
    value = f"{available / GIB:.1f} GiB available of {total / GIB:.1f}"
    if total < QUICKSTART_MEMORY:
        remedy = f"the quickstart is made for {QUICKSTART_MEMORY / GIB:.0f} GiB"
        return Fact(name="memory", value=value, verdict="note", remedy=remedy)
    return Fact(name="memory", value=value)


def _shared_memory(root: Path) -> Fact:
    folder = root / "dev/shm"
    if not folder.is_dir():
        return Fact(name="shared memory", value="none", verdict="note", remedy="weights travel through the disk")
    usage = shutil.disk_usage(folder)
    value = f"{usage.free / GIB:.1f} GiB free of {usage.total / GIB:.1f}"
    if usage.free < 3 * QUICKSTART_WEIGHTS:
        remedy = "too small for the weights of the quickstart, which then travel through the disk"
        return Fact(name="shared memory", value=value, verdict="note", remedy=remedy)
    return Fact(name="shared memory", value=value)


def _disk(folder: Path) -> Fact:
    usage = shutil.disk_usage(folder)
    value = f"{usage.free / GIB:.0f} GiB free here"
    if usage.free < QUICKSTART_DISK:
        remedy = f"two checkpoints of the quickstart and its model want {QUICKSTART_DISK / GIB:.0f} GiB"
        return Fact(name="disk", value=value, verdict="problem", remedy=remedy)
    return Fact(name="disk", value=value)


def _models() -> Fact:
    home = Path(os.environ.get("CAUCE_HOME") or Path.home() / ".cache" / "cauce") / "models"
    names = sorted(entry.name for entry in home.iterdir() if entry.is_dir()) if home.is_dir() else []
    if names:
        return Fact(name="models", value=", ".join(names))
    remedy = "cauce model pull SmolLM2-135M-Instruct"
    return Fact(name="models", value="none pulled", verdict="note", remedy=remedy)
