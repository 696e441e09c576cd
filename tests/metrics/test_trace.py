"""The timeline's file by itself: format, clocks, crashes, and that nobody pays who does not listen."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cauce import spans
from cauce.metrics.trace import TraceWriter
from cauce.spans import Event, Keeper, Reply


@pytest.fixture(autouse=True)
def nobody_listens() -> Iterator[None]:
    yield
    spans.listen(None)


def events(path: Path, *, ended: bool = True) -> list[dict[str, Any]]:
    text = path.read_text()
    return json.loads(text if ended else text + "]")


def test_an_event_of_each_kind_by_hand(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path, number=3)
    assert writer.path == tmp_path / "trace-3.json"
    origin = writer._origin
    spans.record("collect", origin + 1.0, origin + 1.25, plan=7)
    spans.count("slots", live=3, waiting=1)
    spans.mark("plan 7", staleness=0)
    writer.on_end({"status": "finished"})
    found = events(writer.path)
    (span,) = [e for e in found if e["ph"] == "X"]
    assert (span["name"], span["ts"], span["dur"], span["args"]) == ("collect", 1e6, 0.25e6, {"plan": 7})
    (counter,) = [e for e in found if e["ph"] == "C"]
    assert (counter["name"], counter["args"]) == ("slots", {"live": 3, "waiting": 1})
    (mark,) = [e for e in found if e["ph"] == "i"]
    assert (mark["name"], mark["s"], mark["args"]) == ("plan 7", "p", {"staleness": 0})
    names = {(e["pid"], e.get("tid")): e["args"]["name"] for e in found if e["name"] in ("process_name", "thread_name")}
    assert names[span["pid"], None] == "driver"
    assert names[span["pid"], span["tid"]] == "collect"
    assert names[mark["pid"], mark["tid"]] == "events"
    assert found[-1]["args"]["status"] == "finished"


def test_a_worker_of_this_machine_shares_the_clock_and_one_elsewhere_is_shifted(tmp_path: Path) -> None:
    """A worker whose clock shows 500 s less: its call took from 1 to 3 s after the origin, sent at 0.9."""
    writer = TraceWriter(tmp_path, number=1)
    origin = writer._origin
    began, ended = origin + 1.0, origin + 3.0
    writer.reply(
        "rollout-0", Reply(0, began, ended, (Event("span", "work", began, ended, {}),)), sent=0.0, is_here=True
    )
    sent = spans.now()
    far = sent - 500.0
    reply = Reply(0, far, far + 1e-4, (Event("span", "work", far, far + 1e-4, {}),))
    while spans.now() < sent + 1e-4:
        pass
    writer.reply("rollout-1", reply, sent=sent, is_here=False)
    received = spans.now()
    writer.on_end({})
    found = events(writer.path)
    here, there = [e for e in found if e["ph"] == "X"]
    assert (here["ts"], here["dur"]) == (1e6, 2e6)
    shown = origin + there["ts"] / 1e6
    assert sent - 1e-6 <= shown <= received
    assert there["dur"] == pytest.approx(100, abs=0.2)
    (accuracy,) = found[-1]["args"]["clock_accuracy_s"].values()
    assert 0 <= accuracy <= received - sent


def test_every_call_narrows_the_offset(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path, number=1)
    for sent, began, ended, received in ((0.0, 100.4, 101.0, 1.2), (2.0, 102.1, 103.0, 3.5), (5.0, 105.2, 106.0, 6.1)):
        offset = writer._offset("rollout-0", Reply(0, began, ended, ()), sent=sent, received=received)
    assert writer._bounds["rollout-0"] == (pytest.approx(-100.1), pytest.approx(-99.8 - 0.1))
    assert offset == pytest.approx(-100.0)
    writer.on_end({})


def test_a_killed_driver_leaves_whole_lines(tmp_path: Path) -> None:
    """What has reached the file at any moment is JSON once "]" is added, and what is held stays bounded."""
    writer = TraceWriter(tmp_path, number=1)
    seen = 0
    for number in range(5000):
        spans.record("wait", float(number), number + 0.5, text="x" * 40)
        assert writer._size < 2 * (1 << 16)
        if number % 500 == 499:
            found = events(writer.path, ended=False)
            assert len(found) > seen
            seen = len(found)
    writer.on_end({})
    assert len([e for e in events(writer.path) if e["ph"] == "X"]) == 5000


def test_nothing_is_told_before_and_after(tmp_path: Path) -> None:
    spans.record("early", 0.0, 1.0)
    writer = TraceWriter(tmp_path, number=1)
    writer.on_end({})
    spans.record("late", 0.0, 1.0)
    writer.event(Event("span", "late", 0.0, 1.0, {}))
    writer.on_end({})
    assert {e["ph"] for e in events(writer.path)} == {"M"}
    assert spans.listener() is None


def test_a_span_that_raises_is_recorded_and_a_worker_keeps_a_bounded_number() -> None:
    keeper = Keeper()
    spans.listen(keeper)
    with pytest.raises(ValueError, match="no"), spans.span("work"):
        raise ValueError("no")
    (event,) = keeper.take()
    assert (event.name, event.kind) == ("work", "span")
    assert keeper.take() == ()
    for number in range(spans.MAX_KEPT + 10):
        spans.record("step", float(number), float(number))
    assert [len(kept := keeper.take()), kept[0].start] == [spans.MAX_KEPT, 10.0]
