"""The samples-per-insert limiter (trap 13), and capacities that are refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_replay import make_spec
from pydantic import ValidationError

from qfleet.core.errors import CheckpointError, ConfigError
from qfleet.core.spec import EnvSpec, LeafSpec
from qfleet.replay import Lz4Config, MappedConfig, RateLimiter, Replay, ReplayConfig, SequenceWindow, store

ATARI = EnvSpec(name="atari", observations={"frame": LeafSpec(shape=(4, 84, 84), dtype="uint8", stack=4)}, actions=6)


class Tally:
    def __init__(self, value: int = 0) -> None:
        self.value = value

    def add(self, amount: int) -> None:
        self.value += amount

    def total(self) -> int:
        return self.value


def limiter(
    period: float, starts: int, inserts: int = 0, updates: int = 0, tolerance: float = 1.0, together: int = 1
) -> RateLimiter:
    return RateLimiter(period, starts, Tally(inserts), Tally(updates), tolerance, together)


@settings(max_examples=100, deadline=None)
@given(
    period=st.floats(0.1, 20),
    starts=st.integers(0, 50),
    group=st.integers(1, 40),
    tolerance=st.floats(1, 8),
    together=st.integers(1, 16),
    choices=st.lists(st.booleans(), min_size=50, max_size=200),
)
def test_trap_13_the_limiter_never_deadlocks_and_keeps_the_ratio(
    period: float, starts: int, group: int, tolerance: float, together: int, choices: list[bool]
) -> None:
    limit = limiter(period, starts, tolerance=tolerance, together=together)
    for insert_first in choices:
        assert limit.may_insert() or limit.may_sample()
        insert = limit.may_insert() if insert_first else not limit.may_sample()
        (limit.inserts if insert else limit.updates).add(group if insert else together)
        due = max(limit.inserts.total() - starts, 0) / period
        assert limit.updates.total() <= due + 1e-9
        assert due - limit.updates.total() <= tolerance * together + max(group / period, together) + 1e-9


def test_nothing_is_sampled_before_learning_starts() -> None:
    assert not limiter(1, 100, inserts=99).may_sample()
    assert limiter(1, 100, inserts=101).may_sample()


@pytest.mark.parametrize(("inserts", "updates"), [(100_000, 0), (1_000, 5_000)])
def test_trap_13_after_a_restore_the_debt_is_forgiven_not_paid_in_one_burst(inserts: int, updates: int) -> None:
    limit = limiter(4, 0, inserts, updates)
    limit.forgive()
    burst = 0
    while limit.may_sample():
        limit.updates.add(1)
        burst += 1
    assert burst <= 1
    limit.inserts.add(40)  # and the ratio holds from here on, without waiting for what was lost
    while limit.may_sample():
        limit.updates.add(1)
        burst += 1
    assert 9 <= burst <= 11


@settings(max_examples=50, deadline=None)
@given(group=st.integers(1, 100), updates=st.integers(0, 10), period=st.floats(0.2, 10))
def test_an_exact_resume_forgives_nothing(group: int, updates: int, period: float) -> None:
    limit = limiter(period, 5, 5 + group, min(updates, int(group / period)))
    resumed = limiter(period, 5, limit.inserts.total(), limit.updates.total())
    resumed.load_state_dict(limit.state_dict())
    resumed.forgive()
    assert resumed.state_dict() == limit.state_dict()


def test_a_tolerance_that_could_deadlock_is_refused() -> None:
    with pytest.raises(ValueError, match="tolerance"):
        limiter(4, 0, tolerance=0.5)


def replay(config: ReplayConfig, spec: EnvSpec = ATARI, streams: int = 1, directory: Path | None = None) -> Replay:
    rng = np.random.default_rng(0)
    return Replay(config, spec, streams=streams, n_step=1, gamma=0.99, rng=rng, directory=directory)


def test_a_capacity_beyond_the_memory_is_refused_with_the_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "available_memory", lambda: 2 * 2**30)
    with pytest.raises(ConfigError) as refused:
        replay(ReplayConfig(capacity=1_000_000))
    text = str(refused.value)
    assert "replay.capacity" in text
    assert "observation 'frame': 999,424 rows x 7,056.0 B = 6.57 GiB" in text
    assert "only 2.00 GiB" in text
    assert "lz4" in text
    assert "mapped" in text
    fitting = int(text.split("at most ")[1].split(" rows")[0].replace(",", ""))
    assert 290_000 < fitting < 310_000
    assert replay(ReplayConfig(capacity=1_000_000, storage=Lz4Config())).capacity > 990_000


def test_a_mapped_file_beyond_the_disk_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(store, "available_disk", lambda directory: 10**6)
    with pytest.raises(ConfigError, match="disk"):
        replay(ReplayConfig(capacity=10_000, storage=MappedConfig()), directory=tmp_path)


def test_trap_19_the_mapped_tier_leaves_no_file_behind(tmp_path: Path) -> None:
    held = replay(ReplayConfig(capacity=1000, storage=MappedConfig()), directory=tmp_path)
    assert held.capacity
    assert not list(tmp_path.iterdir())
    with pytest.raises(ConfigError, match="directory"):
        replay(ReplayConfig(capacity=1000, storage=MappedConfig()))


def test_a_million_atari_rows_take_at_most_seven_and_a_half_gigabytes() -> None:
    held = replay(ReplayConfig(capacity=10_240))
    columns = [column.array.nbytes for column in held.store.columns.values()]
    frames = held.store.observations["frame"].array.nbytes  # type: ignore[attr-defined]
    assert (frames + sum(columns)) / held.capacity + 8.6 <= 7500  # bytes a row, a leaf of the sum tree among them


@pytest.mark.parametrize(
    ("config", "streams"), [(ReplayConfig(capacity=10), 8), (ReplayConfig(capacity=10, segment=10), 1)]
)
def test_a_capacity_too_small_for_the_streams_is_refused(config: ReplayConfig, streams: int) -> None:
    with pytest.raises(ConfigError, match=r"replay\.capacity"):
        replay(config, make_spec(), streams)


def test_a_segment_shorter_than_the_frame_stack_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"replay\.segment"):
        replay(ReplayConfig(capacity=100, segment=2))


def test_a_burn_in_of_the_whole_sequence_is_refused() -> None:
    with pytest.raises(ValidationError, match="burn_in"):
        SequenceWindow(length=10, burn_in=10)


def test_a_state_of_other_settings_is_refused() -> None:
    state = replay(ReplayConfig(capacity=1000)).state_dict()
    with pytest.raises(CheckpointError, match="segments"):
        replay(ReplayConfig(capacity=2000)).load_state_dict(state)
