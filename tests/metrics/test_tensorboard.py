"""RUN/tensorboard, read back from its event files."""

import struct
from pathlib import Path

import pytest
from tensorboardX.proto.event_pb2 import Event

from cauce.metrics.tensorboard import TensorBoardWriter
from tests.metrics.run_info import run_info


def events(run_dir: Path) -> list[Event]:
    """The records of all event files: length (8 bytes), its CRC (4), the event, its CRC (4)."""
    found = []
    for path in sorted((run_dir / "tensorboard").iterdir()):
        content, at = path.read_bytes(), 0
        while at < len(content):
            (length,) = struct.unpack_from("<Q", content, at)
            found.append(Event.FromString(content[at + 12 : at + 12 + length]))
            at += length + 16
    return found


def scalars(run_dir: Path) -> dict[tuple[str, int], float]:
    return {(v.tag, event.step): v.simple_value for event in events(run_dir) for v in event.summary.value}


def test_scalars_have_our_names_and_the_plan_as_step(tmp_path: Path) -> None:
    writer = TensorBoardWriter(tmp_path)
    writer.on_start(run_info(tmp_path))
    writer.on_eval(0, "test", 0.25)
    writer.on_plan(1, {"reward/mean": 0.5, "loss/policy": float("nan")})
    writer.on_plan(2, {"reward/mean": 0.75})
    writer.on_end({})
    found = scalars(tmp_path)
    assert found["eval/test/accuracy", 0] == pytest.approx(0.25)
    assert found["reward/mean", 1] == pytest.approx(0.5)
    assert found["reward/mean", 2] == pytest.approx(0.75)
    assert ("loss/policy", 1) not in found


def test_a_resumed_run_tells_tensorboard_what_to_hide(tmp_path: Path) -> None:
    for plan in (12, 11):
        writer = TensorBoardWriter(tmp_path)
        writer.on_plan(plan, {"reward/mean": 0.5})
        writer.on_end({})
    # SessionLog.START at step 11: readers drop earlier events from there on.
    starts = [event.step for event in events(tmp_path) if event.session_log.status == 1]
    assert starts == [11]
