"""Local and served acting are measured by the same actors, and both act."""

from __future__ import annotations

import pytest

from qfleet.bench import inference


def test_each_figure_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference, "ACTORS", (2,))
    monkeypatch.setattr(inference, "ENVS", (2,))
    monkeypatch.setattr(inference, "PIXELS", inference.VECTORS)
    monkeypatch.setattr(inference.torch.cuda, "is_available", lambda: False)
    rows = inference.measure(seconds=0.1)
    assert len(rows) == 4
    for row in rows:
        assert row.ratio is not None
        assert 0.001 < row.ratio < 1000
        assert 0 < float(row.ours.split()[0].replace(",", "")) < 1e6
