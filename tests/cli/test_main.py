"""The command line as a person meets it: quick answers, clean errors, exit codes."""

import resource
import subprocess
import sys

import pytest

from cauce import __version__
from cauce.cli.main import app, main

HEAVY = ("torch", "ray", "transformers")
# Runs one command line and reports on stderr which heavy packages it loaded.
PROBE = f"""
import sys
from cauce.cli.main import main
try:
    main(sys.argv[1:])
finally:
    print("LOADED", [name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)
"""


def exit_code(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    return int(caught.value.code or 0)


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["doctor"], ["recipes"], ["train", "--help"]])
def test_quick_answers_are_quick_and_load_nothing_heavy(arguments: list[str]) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert "LOADED []" in done.stderr, done.stderr
    assert done.stdout.strip()
    # CPU time, which does not depend on what else the machine is doing; there is nothing to wait for.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2.0


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = f"import sys, cauce; print([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("--version") == 0
    assert capsys.readouterr().out.strip() == f"cauce {__version__}"


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("--help") == 0
    out = capsys.readouterr().out
    names = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    assert names == {
        *("train", "resume", "replay", "fork", "plan", "check", "recipes", "doctor"),
        *("runs", "show", "samples", "report", "chat", "chaos", "simulate"),
    }
    assert all(name in out for name in [*names, "model"])


def test_a_recipe_error_is_one_message_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("train", "grpo", "model.path=nowhere", "learner.learning_rat=3") == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert "learner.learning_rat" in captured.err
    assert "Traceback" not in captured.err


def test_an_unknown_recipe_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("train", "grpoo") == 2
    assert "'grpo'" in capsys.readouterr().err


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAUCE_DEBUG", "1")
    with pytest.raises(ValueError, match="learning_rat"):
        main(["train", "grpo", "learner.learning_rat=3"])


@pytest.mark.parametrize("written", [["--learner.lrr=3"], ["--learner.lrr", "3"], ["learner.lrr=3"]])
def test_all_three_ways_of_writing_a_setting_reach_the_recipe(
    written: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code("train", "grpo", *written) == 2
    assert "learner.lr?" in capsys.readouterr().err


def test_a_setting_in_the_place_of_the_recipe_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("train", "--learner.lr", "3", "grpo") == 2
    assert "RECIPE comes first" in capsys.readouterr().err


def test_a_misspelt_option_is_not_swallowed(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("train", "grpo", "--takover") == 2
    assert "takover" in capsys.readouterr().err


def test_recipes_are_listed_with_what_they_say_of_themselves(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("recipes") == 0
    lines = capsys.readouterr().out.splitlines()
    described = dict(line.split(maxsplit=1) for line in lines)
    assert {"grpo", "quickstart"} <= set(described)
    assert all(text.strip() for text in described.values())


def test_python_dash_m_is_the_same_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "cauce", "--version"], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == f"cauce {__version__}"
