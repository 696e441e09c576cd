"""What the command line says around a run: which folder, how to go on, and when the report is written."""

from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from cauce.cli.main import main
from cauce.cli.train import run_folder, watch
from cauce.command import command
from cauce.errors import RecipeError
from cauce.metrics.observer import Observer, RunInfo


def info(run_dir: Path) -> RunInfo:
    return RunInfo(
        run_dir=run_dir,
        recipe_name="tiny",
        model="tiny",
        num_plans=2,
        algorithm="grpo",
        cluster="none",
        dashboard=None,
        eval_tasks=0,
    )


def test_a_run_folder_needs_a_journal(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"holds no journal\.db"):
        run_folder(str(tmp_path))
    with pytest.raises(RecipeError, match="no such folder"):
        run_folder(str(tmp_path / "nothing"))
    with pytest.raises(RecipeError, match="RUN comes first"):
        run_folder("run.plans=3")
    (tmp_path / "journal.db").touch()
    assert run_folder(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("command", ["resume", "replay", "report"])
def test_commands_on_a_missing_run_are_user_errors(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command, "runs/never-was"])
    assert caught.value.code == 2
    assert "no run 'runs/never-was'" in capsys.readouterr().err


def interrupted(run_dir: Path) -> Callable[[Observer], None]:
    def work(observer: Observer) -> None:
        observer.on_start(info(run_dir))
        raise KeyboardInterrupt

    return work


@pytest.mark.parametrize("again", ["", "cauce replay RUN"])
def test_ctrl_c_says_how_to_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str], again: str) -> None:
    with pytest.raises(typer.Exit) as caught:
        watch(interrupted(tmp_path), live=False, again=again)
    assert caught.value.exit_code == 130
    assert (again or f"{command()} resume {tmp_path}") in capsys.readouterr().err


def test_ctrl_c_before_the_run_began_names_no_run(capsys: pytest.CaptureFixture[str]) -> None:
    def work(observer: Observer) -> None:
        raise KeyboardInterrupt

    with pytest.raises(typer.Exit) as caught:
        watch(work, live=False)
    assert caught.value.exit_code == 130
    assert "before the run began" in capsys.readouterr().err


def test_the_result_of_the_work_is_returned(tmp_path: Path) -> None:
    assert watch(lambda observer: 7, live=False) == 7
