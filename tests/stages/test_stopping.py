"""Ctrl-C and SIGTERM: the first is a wish, the second an end, and handlers that were there come back."""

import signal
import threading

import pytest

from cauce.stages.stopping import StopSwitch


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_a_wish_and_the_second_ends_at_once(number: signal.Signals) -> None:
    told: list[str] = []
    with StopSwitch(told.append) as switch:
        assert not switch.is_set
        signal.raise_signal(number)
        assert switch.is_set
        assert ["after the current plan" in text for text in told] == [True]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    assert len(told) == 1


def test_the_handlers_of_before_come_back_also_after_an_error() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    def fail() -> None:
        with StopSwitch(print):
            assert signal.getsignal(signal.SIGTERM) != before[1]
            raise ValueError("x")

    with pytest.raises(ValueError, match="x"):
        fail()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_outside_the_main_thread_signals_are_left_alone() -> None:
    before, seen = signal.getsignal(signal.SIGINT), []

    def work() -> None:
        with StopSwitch(print) as switch:
            seen.append((signal.getsignal(signal.SIGINT), switch.is_set))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(before, False)]
