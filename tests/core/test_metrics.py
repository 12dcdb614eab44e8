"""The counters behind the reported numbers."""

from __future__ import annotations

import math

import pytest
import torch

from qfleet.core.codec import roundtrip
from qfleet.core.metrics import Rate, RunningMean, Window


def test_running_mean_takes_numbers_and_tensors_and_begins_anew() -> None:
    mean = RunningMean()
    assert math.isnan(mean.take())
    mean.add(1.0)
    mean.add(torch.tensor(3.0, requires_grad=True) * 2)
    assert mean.take() == 3.5
    assert math.isnan(mean.take())
    mean.add(2)
    assert mean.take() == 2.0


def test_running_mean_keeps_no_graph_alive() -> None:
    mean = RunningMean()
    mean.add(torch.ones((), requires_grad=True) * 2)
    assert isinstance(mean._total, torch.Tensor)
    assert not mean._total.requires_grad


def test_window_forgets_the_oldest_and_resumes() -> None:
    window = Window(3)
    assert math.isnan(window.mean())
    for value in (100, 1, 2, 3):
        window.add(value)
    assert (window.mean(), len(window)) == (2.0, 3)
    resumed = Window(3)
    resumed.load_state_dict(roundtrip(window.state_dict()))
    for w in (window, resumed):
        w.add(7)
    assert resumed.mean() == window.mean() == 4.0


def test_rate_is_of_the_last_interval() -> None:
    now = [10.0]
    rate = Rate(lambda: now[0])
    rate.add(5)
    assert rate.take() == 0.0  # no time has passed: the amount is kept for the next reading
    rate.add(5)
    now[0] += 2
    assert rate.take() == 5.0
    now[0] += 4
    rate.add(1.0)
    assert rate.take() == pytest.approx(0.25)
