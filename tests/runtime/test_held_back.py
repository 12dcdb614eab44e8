"""Signals that come at a bad moment do what they would have done, a little later."""

from __future__ import annotations

import signal
import threading
from contextlib import suppress

import pytest

from qfleet.runtime.held_back import ENDINGS, held_back


@pytest.mark.parametrize("number", ENDINGS)
def test_a_signal_is_held_back_until_it_is_delivered_to_the_usual_handler(number: signal.Signals) -> None:
    came: list[int] = []
    before = signal.signal(number, lambda number, frame: came.append(number))
    try:
        with held_back() as held:
            signal.raise_signal(number)
            signal.raise_signal(number)
            assert came == []
        assert came == []
        held.deliver()
        assert came == [number], "twice in one moment is once"
        held.deliver()
        assert came == [number]
    finally:
        signal.signal(number, before)


def test_an_interrupt_is_raised_where_it_is_delivered() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with held_back() as held:
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            held.deliver()
    finally:
        signal.signal(signal.SIGINT, before)


def test_handlers_that_are_set_meanwhile_are_gone_and_what_is_ignored_stays_so() -> None:
    """Ray's SIGTERM handler replaced that of the run, which then failed without a checkpoint."""
    hang_up = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    ours = signal.getsignal(signal.SIGTERM)
    try:
        with held_back() as held:
            signal.signal(signal.SIGTERM, lambda number, frame: None)
            signal.raise_signal(signal.SIGHUP)
        held.deliver()
        assert signal.getsignal(signal.SIGTERM) is ours
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, hang_up)


def test_what_takes_too_long_is_cut_short_by_all_signals_that_came(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forkserver that hangs would keep a run from ever ending."""
    came: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)
    now = 100.0
    monkeypatch.setattr("qfleet.runtime.held_back.time.monotonic", lambda: now)
    try:
        with held_back(limit_s=0.5) as held:
            now = 100.4
            signal.raise_signal(signal.SIGTERM)
            assert came == []
            now = 100.6
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
            assert came == [signal.SIGTERM]
        held.deliver()
        assert came == [signal.SIGTERM], "none comes twice"
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGINT, interrupt)


def test_where_the_moment_ends_with_an_error_the_signals_are_heeded_all_the_same() -> None:
    """Ctrl-C on a machine that had no room for another process was as if it had never been pressed."""
    came: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    try:
        with suppress(EOFError), held_back():
            signal.raise_signal(signal.SIGTERM)
            raise EOFError
        assert came == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_other_threads_change_nothing() -> None:
    before = {number: signal.getsignal(number) for number in ENDINGS}
    seen: list[bool] = []

    def elsewhere() -> None:
        with held_back():
            seen.append({number: signal.getsignal(number) for number in ENDINGS} == before)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == [True]
