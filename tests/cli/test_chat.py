"""`cauce chat`: which weights it finds, and that its answer is the model's own greedy one."""

import io
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cauce.cli.chat import find_policy
from cauce.cli.main import main
from cauce.errors import RecipeError
from cauce.recipe import Recipe, dump_toml
from tests.tiny import EOS_ID, tiny_model


def make_run(folder: Path) -> Path:
    recipe = Recipe()
    recipe = recipe.model_copy(
        update={
            "rollout": recipe.rollout.model_copy(update={"max_tokens": 6}),
            "data": recipe.data.model_copy(update={"system": "Be brief."}),
            "engine": recipe.engine.model_copy(update={"dtype": "fp32"}),
        }
    )
    folder.mkdir(parents=True)
    (folder / "recipe.toml").write_text(dump_toml(recipe), encoding="utf-8")
    return folder


def test_a_run_answers_with_its_final_model_else_with_its_newest_checkpoint(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    with pytest.raises(RecipeError, match="neither a final model nor a checkpoint"):
        find_policy(str(run))
    for name in ("checkpoints/plan_000002", "checkpoints/plan_000010"):
        (run / name).mkdir(parents=True)
        (run / name / "config.json").touch()
        (run / name / "complete.json").write_text('{"plan": 1, "files": {}}')
    (run / "checkpoints/plan_000011").mkdir()  # a save that was cut off
    (run / "checkpoints/plan_000011/config.json").touch()
    folder, recipe = find_policy(str(run))
    assert folder.name == "plan_000010"
    assert recipe.data.system == "Be brief."
    (run / "model").mkdir()
    (run / "model/config.json").touch()
    assert find_policy(str(run))[0] == run / "model"


def test_a_model_folder_needs_no_run(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "tiny")
    found, recipe = find_policy(str(folder))
    assert found == folder
    assert recipe == Recipe()


def test_the_answer_is_the_models_greedy_one_in_the_runs_format(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run")
    tiny_model(run / "model")
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        main(["chat", str(run), "What is 2 + 3?"])
    assert caught.value.code in (0, None)
    captured = capsys.readouterr()
    assert captured.out.rstrip("\n") == greedy(run / "model", max_tokens=6).rstrip("\n")
    assert captured.err == ""  # no progress bar


def test_without_a_prompt_every_line_is_answered_on_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run")
    tiny_model(run / "model")
    monkeypatch.setattr("sys.stdin", io.StringIO("What is 2 + 3?\n\nWhat is 2 + 3?\n"))
    with pytest.raises(SystemExit) as caught:
        main(["chat", str(run)])
    assert caught.value.code in (0, None)
    answer = greedy(run / "model", max_tokens=6)
    assert capsys.readouterr().out.count(answer) == 2


class NoSuchModel(BaseHTTPRequestHandler):
    """A hub that has no model, in its own words."""

    def do_GET(self) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("X-Error-Message", "Repository not found, says the hub")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_a_wrong_name_is_one_sentence_and_not_the_hubs(tmp_path: Path) -> None:
    hub = HTTPServer(("127.0.0.1", 0), NoSuchModel)
    threading.Thread(target=hub.serve_forever, daemon=True).start()
    address = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "no_proxy": "127.0.0.1", "NO_PROXY": "127.0.0.1"}
    environment = os.environ | address | {"HF_HOME": str(tmp_path), "CAUCE_HOME": str(tmp_path)}
    environment.pop("HF_HUB_OFFLINE", None)
    command = [sys.executable, "-m", "cauce", "chat", "nobody/no-such-model", "hi"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    hub.shutdown()
    hub.server_close()
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: model 'nobody/no-such-model': no folder of that name")
    assert "the hub has no public model of that name" in line
    assert "says the hub" not in line


def greedy(folder: Path, *, max_tokens: int) -> str:
    """Answer by plain forward passes, one token at a time."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 2 + 3?"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    answer: list[int] = []
    while len(answer) < max_tokens:
        with torch.no_grad():
            answer.append(int(model(torch.tensor([ids + answer])).logits[0, -1].argmax()))
        if answer[-1] == EOS_ID:
            answer.pop()
            break
    return tokenizer.decode(answer, skip_special_tokens=True, clean_up_tokenization_spaces=False)
