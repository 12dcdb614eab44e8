"""Keeps the global state that the one-file reference touches inside each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def own_global_state() -> Iterator[None]:
    """Seeds torch's global generator and one thread for the test, and puts both back after it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
    torch.set_num_threads(threads)
