"""Fixtures and settings that several test folders share."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator

import pytest
from hypothesis import settings

# `make test` repeats the same examples; `make test-all` looks for new ones.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("searching", deadline=None)
settings.load_profile(os.environ.get("QFLEET_EXAMPLES", "repeatable"))

# What a developer's own `qfleet probe` found must not change the tests.
os.environ["QFLEET_CACHE"] = tempfile.mkdtemp()


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """One local Ray for the whole test run: starting it costs seconds."""
    pytest.importorskip("ray")
    from qfleet.runtime.ray import start_local, stop_local

    start_local()
    yield
    stop_local()
