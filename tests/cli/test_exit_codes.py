"""Exit codes as scripts meet them: 2 for what was given wrong, with one message and no traceback; 1 for a run that
failed; 130 for a stop."""

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import ray
from safetensors.torch import load_file, save_file

from cauce import errors
from cauce.cli.exit_codes import exit_code
from cauce.cli.main import main
from tests.tiny import tiny_model

ROWS = '{"question": "1 + 1?", "answer": "2"}\n' * 16


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, rows and rewards, right ones and wrong ones."""
    folder = tmp_path_factory.mktemp("given")
    tiny_model(folder / "model")
    shutil.copytree(folder / "model", folder / "torn")
    (folder / "torn" / "model.safetensors").write_bytes(b"torn")
    (folder / "nothing").mkdir()
    shutil.copytree(folder / "model", folder / "alien")
    (folder / "alien" / "config.json").write_text('{"model_type": "alien"}')
    (folder / "rows.jsonl").write_text(ROWS)
    (folder / "latin.jsonl").write_bytes(b'{"prompt": "caf\xe9"}\n')
    (folder / "latin.csv").write_bytes(b"prompt,answer\ncaf\xe9,1\n")
    (folder / "latin.py").write_bytes(b"x = 'caf\xe9'\ndef score(completions):\n    return [0.0]\n")
    (folder / "syntax.py").write_text("def score(:\n")
    (folder / "leaves.py").write_text("raise SystemExit(3)\n")
    (folder / "ctrl_c.py").write_text("raise KeyboardInterrupt\n")
    (folder / "score.py").write_text(
        "class Needy:\n    def __init__(self, model):\n        self.model = model\n"
        "    def __call__(self, completions, **_):\n        return [0.0]\n"
        "def raises(completions, **_):\n    raise KeyError('oops')\n"
    )
    return folder


@pytest.fixture
def run(given: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command in the folder, and returns its error output once the exit code is the expected one."""
    monkeypatch.chdir(given)

    def run_command(*arguments: str, code: int) -> str:
        with pytest.raises(SystemExit) as caught:
            main(list(arguments))
        error = capsys.readouterr().err
        assert caught.value.code == code, error
        return error

    return run_command


def settings(**changes: str) -> list[str]:
    """A recipe's settings that are right, but for the changes."""
    right = {"model.path": "model", "data.train": "rows.jsonl", "reward.fn": "last_number", "rollout.max_tokens": "8"}
    return [f"{key}={value}" for key, value in {**right, **changes}.items()]


WRONG: dict[str, tuple[list[str], str]] = {
    "recipe": (["check", "no_such_recipe"], "neither a file nor one of the packaged recipes"),
    "setting": (["check", "grpo", *settings(**{"learner.lr": "fast"})], "learner.lr = 'fast'"),
    "rows": (["check", "grpo", *settings(**{"data.train": "none.jsonl"})], "no such file"),
    "encoding of rows": (["check", "grpo", *settings(**{"data.train": "latin.jsonl"})], "latin.jsonl: not UTF-8"),
    "encoding of a csv": (["check", "grpo", *settings(**{"data.train": "latin.csv"})], "latin.csv: not UTF-8"),
    "model": (
        ["check", "grpo", *settings(**{"model.path": "nothing"})],
        "holds no model, neither config.json nor a GGUF",
    ),
    "architecture": (["train", "grpo", *settings(**{"model.path": "alien"})], "model 'alien': no usable"),
    "weights": (["chat", "torn", "hi"], "model 'torn' cannot be loaded"),
    "folder to talk to": (["chat", "nothing", "hi"], "holds no model, neither config.json nor a GGUF"),
    "reward file": (["check", "grpo", *settings(**{"reward.fn": "none.py:score"})], "there is no file none.py"),
    "reward's encoding": (["check", "grpo", *settings(**{"reward.fn": "latin.py:score"})], "as UTF-8"),
    "reward's syntax": (["check", "grpo", *settings(**{"reward.fn": "syntax.py:score"})], "SyntaxError"),
    "reward that leaves": (["check", "grpo", *settings(**{"reward.fn": "leaves.py:score"})], "SystemExit: 3"),
    "reward's class": (["check", "grpo", *settings(**{"reward.fn": "score.py:Needy"})], "without arguments"),
    "reward's name": (["check", "grpo", *settings(**{"reward.fn": "score.py:missing"})], "has no 'missing'"),
    "reward that always raises": (["check", "grpo", *settings(**{"reward.fn": "score.py:raises"})], "KeyError: 'oops'"),
    "folder of runs": (["train", "grpo", *settings(**{"run.dir": "rows.jsonl"})], "run.dir='rows.jsonl': cannot make"),
    "run": (["resume", "runs/none"], "no run 'runs/none'"),
    "option": (["train", "grpo", "--takover"], "takover"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_was_given_wrong_is_one_message_and_exit_code_2(what: str, run: Callable[..., str]) -> None:
    arguments, words = WRONG[what]
    error = run(*arguments, code=2)
    assert words in error
    assert "Traceback" not in error


def test_more_than_this_machine_has_is_refused_before_ray_starts(run: Callable[..., str]) -> None:
    """H4: each role's request, what there is, and what to write; in seconds, and nothing is left behind."""
    assert not ray.is_initialized()
    began = time.process_time()
    asked = settings(**{"cluster.cpus": "2", "rollout.cpus": "4", "run.name": "too-large"})
    error = run("train", "grpo", *asked, code=2)
    assert time.process_time() - began < 5.0
    assert "no room for a rollout worker. Asked: rollout 1 x (4 CPUs, 0 GPUs); learner 1 x (1 CPUs" in error
    assert "There is: this machine 2 CPUs" in error
    assert 'rollout.cpus="auto"' in error
    assert not ray.is_initialized()


def test_a_failed_run_is_exit_code_1(run: Callable[..., str], given: Path) -> None:
    (given / "damaged").mkdir()
    (given / "damaged" / "journal.db").write_bytes(b"not a database" * 100)
    error = run("replay", "damaged", code=1)
    assert "damaged" in error
    assert "Traceback" not in error


def test_ctrl_c_is_exit_code_130(run: Callable[..., str]) -> None:
    run("check", "grpo", *settings(**{"reward.fn": "ctrl_c.py:score"}), code=130)


def test_every_error_has_a_code() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and kind is not errors.CauceError]
    codes = {kind.__name__: exit_code(kind("text")) for kind in kinds}
    assert codes == {
        "RecipeError": 2,
        "DataError": 2,
        "RewardError": 2,
        "ModelError": 2,
        "ResourceError": 2,
        "CheckpointError": 1,
        "WeightsError": 1,
        "VersionGoneError": 1,
        "JournalError": 1,
        "FencedError": 3,
        "WorkerError": 1,
        "TrainingStopped": 1,
    }


def test_a_model_without_a_tensor_is_said_when_it_is_loaded(run: Callable[..., str], given: Path) -> None:
    shutil.copytree(given / "model", given / "incomplete")
    file = given / "incomplete" / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    assert "model.layers.1.mlp.up_proj.weight" in run("chat", "incomplete", "hi", code=2)
