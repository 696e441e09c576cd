"""The doctor's readers, each on a small system of its own."""

from pathlib import Path

import pytest

from cauce.cli.doctor import GIB, Fact, cpu_quota, gather, memory, package_fact

MEMINFO = f"MemTotal: {16 * 2**20} kB\nMemFree: {2 * 2**20} kB\nMemAvailable: {10 * 2**20} kB\n"


def system(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def fact(root: Path, name: str) -> Fact:
    return next(found for found in gather(root, root) if found.name == name)


def test_memory_without_a_limit_is_the_machines(tmp_path: Path) -> None:
    assert memory(system(tmp_path, {"proc/meminfo": MEMINFO})) == (16 * GIB, 10 * GIB)


def test_memory_is_cut_by_the_tightest_control_group(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "0::/outer/inner\n",
        "sys/fs/cgroup/outer/memory.max": str(6 * GIB),
        "sys/fs/cgroup/outer/memory.current": str(2 * GIB),
        "sys/fs/cgroup/outer/inner/memory.max": "max",
    }
    assert memory(system(tmp_path, files)) == (6 * GIB, 4 * GIB)


def test_memory_knows_the_older_control_groups(tmp_path: Path) -> None:
    files = {"proc/meminfo": MEMINFO, "sys/fs/cgroup/memory/memory.limit_in_bytes": str(4 * GIB)}
    assert memory(system(tmp_path, files)) == (4 * GIB, 4 * GIB)


def test_little_memory_is_noted_with_what_the_quickstart_needs(tmp_path: Path) -> None:
    found = fact(system(tmp_path, {"proc/meminfo": "MemTotal: 4194304 kB\n"}), "memory")
    assert found.verdict == "note"
    assert "6 GiB" in found.remedy


@pytest.mark.parametrize(("text", "quota"), [("max 100000", None), ("150000 100000", 1.5)])
def test_cpu_quota(tmp_path: Path, text: str, quota: float | None) -> None:
    assert cpu_quota(system(tmp_path, {"sys/fs/cgroup/cpu.max": text})) == quota


def test_a_quota_below_the_affinity_mask_is_noted(tmp_path: Path) -> None:
    found = fact(system(tmp_path, {"sys/fs/cgroup/cpu.max": "50000 100000"}), "cores")
    assert found.verdict == "note"
    assert "limited to 0.5" in found.value


@pytest.mark.parametrize(("flags", "verdict"), [("fpu avx2 avx512_bf16", "ok"), ("fpu avx2", "note")])
def test_instructions_say_what_dtype_auto_means(tmp_path: Path, flags: str, verdict: str) -> None:
    found = fact(system(tmp_path, {"proc/cpuinfo": f"flags : {flags}\n"}), "instructions")
    assert found.verdict == verdict
    assert "avx2" in found.value
    assert ("fp32" in found.remedy) == (verdict == "note")


def test_gpus_are_counted_without_loading_a_driver(tmp_path: Path) -> None:
    assert "none" in fact(tmp_path, "gpus").value
    (tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0").mkdir(parents=True)
    assert fact(tmp_path, "gpus").value == "1 NVIDIA"


def test_no_shared_memory_means_the_disk(tmp_path: Path) -> None:
    found = fact(tmp_path, "shared memory")
    assert found.verdict == "note"
    assert "disk" in found.remedy


def test_packages_are_compared_with_what_is_asked() -> None:
    assert package_fact("numpy>=2").verdict == "ok"
    old = package_fact("numpy>=999.1")
    assert old.verdict == "problem"
    assert "999.1 or newer" in old.remedy
    missing = package_fact("no-such-package-at-all[extra]>=1")
    assert missing.verdict == "problem"
    assert missing.value == "missing"


def test_pulled_models_are_found_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAUCE_HOME", str(tmp_path / "home"))
    assert fact(tmp_path, "models").verdict == "note"
    (tmp_path / "home/models/Tiny").mkdir(parents=True)
    assert fact(tmp_path, "models").value == "Tiny"


def test_without_a_compiler_the_price_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = fact(tmp_path, "compiler")
    assert found.verdict == "note"
    assert "g++" in found.remedy
    compiler = tmp_path / "g++"
    compiler.touch(mode=0o755)
    assert fact(tmp_path, "compiler") == Fact(name="compiler", value=str(compiler))
