"""`qfleet bench pipeline` measures what it says, in small."""

from __future__ import annotations

import pytest

from qfleet.bench import pipeline


def test_each_figure_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"_MESSAGES": 20, "_REFRESHES": 8, "_PACED_S": 0.3}.items():
        monkeypatch.setattr(pipeline, name, value)
    frames, refresh, messages = pipeline.measure()
    assert 0.01 < float(frames.ours.split()[0]) < 100
    assert 0.1 < float(refresh.ours.split()[0]) < 1000
    assert 0 < float(messages.ours.rstrip("%")) < 100
    assert all(row.goal for row in (frames, refresh, messages))
