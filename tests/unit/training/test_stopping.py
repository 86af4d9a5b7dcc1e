"""Signals become a flag; a second one ends the process as ever."""

import signal
import threading

import pytest

from snugfit._training.stopping import StopFlag

both = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])


@pytest.fixture
def caught():
    """Signals that reach the handlers that were there before."""
    numbers = []
    before = {n: signal.signal(n, lambda n, _: numbers.append(n)) for n in (signal.SIGINT, signal.SIGTERM)}
    yield numbers
    for number, handler in before.items():
        signal.signal(number, handler)


@both
def test_the_first_signal_asks_to_stop_and_the_second_is_not_caught(caught, number):
    with StopFlag() as stop:
        assert not stop.requested
        signal.raise_signal(number)
        assert stop.requested and caught == []
        signal.raise_signal(number)
        assert caught == [number]


@both
def test_handlers_are_put_back(caught, number):
    with StopFlag():
        pass
    signal.raise_signal(number)
    assert caught == [number]


def test_handlers_are_put_back_after_an_error(caught):
    with pytest.raises(KeyError), StopFlag():
        raise KeyError
    signal.raise_signal(signal.SIGINT)
    assert caught == [signal.SIGINT]


def test_a_request_from_the_program():
    stop = StopFlag()
    stop.request()
    assert stop.requested


def test_outside_the_main_thread_signals_are_left_alone(caught):
    seen = []

    def work():
        with StopFlag() as stop:
            stop.request()
            seen.append(stop.requested)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    signal.raise_signal(signal.SIGTERM)
    assert seen == [True] and caught == [signal.SIGTERM]
