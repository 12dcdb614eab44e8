"""The learner's feed: what its benchmark counts, and that it runs through real processes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from qfleet.bench.feed import Feeding, busy, covered, measure


def event(name: str, start: float, end: float) -> SimpleNamespace:
    span = SimpleNamespace(start=start, end=end)
    return SimpleNamespace(name=name, time_range=span, device_type=torch.autograd.DeviceType.CUDA)


def test_time_in_which_two_kernels_run_counts_once():
    assert covered([(0, 4), (1, 2), (3, 6), (8, 9)]) == 7
    assert covered([]) == 0


def test_shares_and_speed_come_from_a_profile():
    events = [event("Memcpy HtoD (Pinned -> Device)", 0, 5), event("conv", 4, 7), event("Memcpy DtoH", 9, 10)]
    on_host = SimpleNamespace(name="launch", device_type=torch.autograd.DeviceType.CPU)
    assert busy([*events, on_host], 10_000) == {"kernels_busy": 0.3, "device_busy": 0.8, "upload_gb_per_s": 2.0}


@pytest.mark.slow
def test_a_learner_is_fed_by_processes():
    found = measure(Feeding("cpu", batch=2, ahead=True, sources=2, warmup=1, timed=3, profiled=1))
    assert found["updates"] == 5
    assert found["updates_per_s"] > 0
