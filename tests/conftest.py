"""Fixtures that several test folders share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """One local Ray for the whole test run: starting it costs seconds."""
    pytest.importorskip("ray")
    from qfleet.runtime.ray import start_local, stop_local

    start_local()
    yield
    stop_local()
