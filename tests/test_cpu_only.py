"""H5: everything works where no GPU is visible, and nothing of ours imports a package that only GPUs need."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import cauce
from tests.tiny import tiny_model

GPU_ONLY = {"apex", "bitsandbytes", "cupy", "deepspeed", "flash_attn", "pynvml", "triton", "vllm", "xformers"}
PACKAGE = Path(cauce.__file__).parent

PROGRAM = """
import importlib, pkgutil, sys
import cauce
names = [m.name for m in pkgutil.walk_packages(cauce.__path__, "cauce.") if not m.name.endswith("__main__")]
for name in names:
    importlib.import_module(name)
import torch
assert not torch.cuda.is_available()
actor = cauce.Actor(sys.argv[1])
learner = cauce.Learner(sys.argv[1])
(rollout,) = actor.generate(["hi"], num=4, max_tokens=4)
assert learner.update([rollout.score([0.0, 1.0, 0.0, 2.0])])["optim/skipped"] == 0
actor.load_state(learner.state(), version=1)
assert actor.generate(["hi"], max_tokens=4)[0].completions[0].versions[0] == 1
print(len(names), "modules")
"""


def imported(path: Path) -> set[str]:
    """The packages that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found


def test_no_module_imports_a_package_that_only_gpus_need() -> None:
    """H5; vLLM in the files of its engine alone, and there inside functions, since every module is imported below."""
    files = list(PACKAGE.rglob("*.py"))
    assert len(files) > 60
    found = {path.relative_to(PACKAGE).as_posix(): imported(path) & GPU_ONLY for path in files}
    of_vllm = {f"engine/vllm_{name}.py": {"vllm"} for name in ("engine", "transfer")}
    assert {path: names for path, names in found.items() if names} == of_vllm


def test_every_module_and_a_training_step_without_a_gpu(tmp_path: Path) -> None:
    """H5."""
    model = tiny_model(tmp_path / "model")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(model)],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout.split()[0]) > 60
