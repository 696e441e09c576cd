"""`cauce runs`, `show` and `samples` on a real tiny run: what they say, how fast, and what they load."""

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from cauce.cli.main import main
from cauce.journal import Journal
from tests.cli.test_main import PROBE
from tests.local_session import ROWS, Killed, Watcher, train_locally, use_local_session
from tests.tiny import tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that ended and one that was killed after its first plan."""
    folder = tmp_path_factory.mktemp("runs")
    model = tiny_model(tmp_path_factory.mktemp("model"))
    with pytest.MonkeyPatch.context() as patch:
        use_local_session(patch)
        train_locally(model, folder / "whole", test_rows=ROWS[:4])
        with pytest.raises(Killed):
            train_locally(model, folder / "cut", observer=Watcher(kill_after=1))
    return folder


def said(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    with pytest.raises(SystemExit) as caught:
        main([*map(str, arguments)])
    assert int(caught.value.code or 0) == code
    captured = capsys.readouterr()
    return captured.out if code == 0 else captured.err


def test_runs_lists_what_the_journals_say(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = {line.split()[0]: line.split() for line in said(capsys, "runs", folder).splitlines() if line.strip()}
    assert lines["whole"][1:7] == ["rl", "grpo", "finished", "3", "of", "3"]
    assert lines["cut"][1:7] == ["rl", "grpo", "killed", "1", "of", "3"]
    with Journal.read_only(folder / "whole") as journal:
        reward = journal.plans()[-1].metrics["reward/mean"]
    assert lines["whole"][7] == f"{reward:.3f}"
    assert lines["whole"][9:11] == ["(plan", "3)"]  # the accuracy
    assert lines["cut"][8] == "-"
    (folder / "odd").mkdir(exist_ok=True)
    (folder / "odd" / "journal.db").write_bytes(b"x" * 5000)
    assert "whole" in said(capsys, "runs", folder)
    (folder / "odd" / "journal.db").unlink()
    (folder / "odd").rmdir()
    assert said(capsys, "runs", folder / "whole" / "payloads").startswith("no runs in")
    assert "no folder" in said(capsys, "runs", folder / "nowhere", code=2)


def test_show_says_how_a_run_stands(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "show", folder / "whole")
    for part in (
        "finished",
        "6 trained",
        "24 scored",
        "3 of 3 decided: 3 applied",
        "plan_000003",
        "torch",
        "evaluated",
    ):
        assert part in text
    cut = said(capsys, "show", folder / "cut")
    assert "killed" in cut
    assert "Leases" not in cut.split("Plans")[1]
    with Journal.read_only(folder / "whole") as journal:
        assert all(record.checksum in text for record in journal.plans() if record.checksum)


def test_samples_as_lines_of_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = folder / "whole"
    lines = said(capsys, "samples", run, "--format", "jsonl", "--limit", 0).splitlines()
    records = [json.loads(line) for line in lines]
    assert len(records) == 24
    with Journal.read_only(run) as journal:
        group = journal.group(records[0]["task"])
    first = records[0]
    assert first["reward"] == group.samples[0].outcome.value
    assert first["logp_mean"] == pytest.approx(float(group.samples[0].completion.logps.mean()))
    assert first["prompt"].startswith("say ")
    assert isinstance(first["answer"], str)
    assert (first["plans"], first["versions"], first["status"]) == ([1], [0, 0], "scored")
    ids = json.loads(said(capsys, "samples", run, "--format", "jsonl", "--limit", "1", "--ids"))
    assert ids["token_ids"] == group.samples[0].completion.token_ids.tolist()
    high = said(capsys, "samples", run, "--format", "jsonl", "--limit", 0, "--reward", ">=0.5", "--plan", "2-3")
    wanted = [r for r in records if r["reward"] >= 0.5 and r["plans"][0] in (2, 3)]
    assert [json.loads(line) for line in high.splitlines()] == wanted
    assert 0 < len(wanted) < 16


def test_samples_as_a_table(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "samples", folder / "whole", "--task", "2", "--limit", "2")
    assert all(word in text for word in ("plan", "reward", "logp", "say ", "the first 2; --limit 0"))
    assert "no sample matches" in said(capsys, "samples", folder / "whole", "--reward", ">9")
    assert "--reward 'high'" in said(capsys, "samples", folder / "whole", "--reward", "high", code=2)


@pytest.mark.parametrize("command", [["runs", "."], ["show", "whole"], ["samples", "whole"]])
def test_they_are_quick_and_load_nothing_heavy(folder: Path, command: list[str]) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *command], cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert "LOADED []" in done.stderr, done.stderr
    assert done.stdout.strip()
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2.0
