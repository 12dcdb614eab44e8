"""What a message between processes costs besides its content: of rounds that are known, and of real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from qfleet import planning
from qfleet.control import waking
from qfleet.control.rig import Round
from qfleet.control.waking import LIGHT, wake_of
from qfleet.envs import env_spec

WAKE = 100e-6
STEPS, UPDATES = 10_000, 160


@pytest.mark.parametrize("more", [0, 40], ids=["as many updates", "more updates"])
def test_what_processes_take_more_is_shared_by_the_ends_of_all_messages(
    more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack, pack_batch = 30e-6, 90e-6
    monkeypatch.setattr(waking, "experience_seconds", lambda spec, rows: pack)
    monkeypatch.setattr(waking, "batch_seconds", lambda spec, batch: pack_batch)
    spec = env_spec(LIGHT.env)
    step, update = 50e-6, 300e-6
    alone = Round(STEPS * step, 0.0, UPDATES * update, STEPS * step + UPDATES * update, STEPS, UPDATES)
    messages, batches = STEPS / LIGHT.actor.envs, UPDATES + more
    packing = messages * pack + batches * pack_batch
    cpu = STEPS * step + batches * update + packing + 2 * WAKE * (messages + batches)
    assert wake_of(alone, Round(0.0, 0.0, 0.0, cpu, STEPS, batches), spec) == pytest.approx(WAKE)


def test_processes_that_take_no_more_have_messages_that_cost_nothing() -> None:
    alone = Round(0.5, 0.0, 0.1, 0.6, STEPS, UPDATES)
    assert wake_of(alone, Round(0.0, 0.0, 0.0, 0.6, STEPS, UPDATES), env_spec(LIGHT.env)) == 0.0


def test_messages_are_timed_in_real_processes_whatever_is_planned(tmp_path: Path) -> None:
    """Beside an emulator and a large network, what these took more passed for the cost of messages, tenfold."""
    assert 1e-6 < planning._wake(tmp_path) < 5e-3
