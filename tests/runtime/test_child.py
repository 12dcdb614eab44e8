"""A role's process: what it does when its supervisor has no time for it."""

from __future__ import annotations

import multiprocessing

from qfleet.runtime.child import takes_more


def test_reports_are_dropped_before_the_pipe_to_a_supervisor_that_does_not_read_is_full() -> None:
    """After two minutes of a final test every role waited in the pipe, heard no command, and was killed."""
    ours, theirs = multiprocessing.Pipe()
    report = b"r" * 1000
    sent = 0
    while takes_more(theirs):
        theirs.send_bytes(report)
        sent += 1
        assert sent < 10_000
    theirs.send_bytes(report)  # there is room for an answer all the same
    for _ in range(sent + 1):
        assert ours.recv_bytes() == report
    assert takes_more(theirs)
