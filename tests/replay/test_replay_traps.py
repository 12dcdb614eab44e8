"""Traps that have bitten well-known replays (DESIGN section 9), each on the smallest history that shows it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from qfleet.core.spec import PLAIN, EnvSpec, LeafSpec
from qfleet.core.types import Experience, Priorities, Version
from qfleet.replay import PrioritisedConfig, Replay, ReplayConfig, SequenceWindow, UniformConfig
from qfleet.replay.samplers import PrioritisedSampler

SPEC = EnvSpec(name="line", observations={PLAIN: LeafSpec(shape=(1,), dtype="float32")}, actions=300)
GAMMA = 0.5


class Line:
    """One stream whose observations count 0, 1, 2, ...; every transition's reward is its observation."""

    def __init__(self, spec: EnvSpec = SPEC, **settings: Any) -> None:
        config = ReplayConfig(**{"capacity": 100, "segment": 10, **settings.pop("config", {})})
        defaults = {"streams": 1, "n_step": 1, "gamma": GAMMA, "rng": np.random.default_rng(0)}
        self.spec = spec
        self.replay = Replay(config, spec, **{**defaults, **settings})
        self.time = self.sequence = 0

    def row(
        self, terminated: bool = False, truncated: bool = False, final: bool = False, cut: bool = False
    ) -> Experience:
        frame = np.full((1, *self.spec.observations[PLAIN].frame_shape), self.time)
        message = Experience(
            source="a", sequence=self.sequence, version=Version(), offsets=np.array([0, 1]), stream=np.array([0]),
            observation={PLAIN: frame.astype(self.spec.observations[PLAIN].dtype)}, action=np.array([self.time % 300]),
            reward=np.array([self.time], np.float32), terminated=np.array([terminated]),
            truncated=np.array([truncated]), final=np.array([final]), cut=np.zeros(int(cut), np.int64),
        )  # fmt: skip
        self.time += 1
        self.sequence += 1
        self.replay.append(message)
        return message

    def episode(self, length: int, terminated: bool = True) -> None:
        for _ in range(length - 1):
            self.row()
        self.row(terminated=terminated, truncated=not terminated)
        self.row(final=True)

    def items(self) -> dict[int, tuple[float, float, float]]:
        """(return, discount, next observation) by observation."""
        rows = self.replay.sampler.items()
        batch = self.replay.transitions(rows, np.ones(len(rows), np.float32))
        columns = (batch.observation[PLAIN], batch.reward, batch.discount, batch.next_observation[PLAIN])
        return {int(o[0]): (float(r), float(d), float(n[0])) for o, r, d, n in zip(*columns, strict=True)}


def test_trap_1_truncation_is_not_termination() -> None:
    line = Line()
    line.episode(2, terminated=False)
    line.episode(2, terminated=True)
    assert line.items() == {0: (0, GAMMA, 1), 1: (1, GAMMA, 2), 3: (3, GAMMA, 4), 4: (4, 0, 5)}


def test_trap_1_an_end_by_both_rule_and_limit_is_a_termination() -> None:
    line = Line()
    line.row(terminated=True, truncated=True)
    line.row(final=True)
    assert line.items() == {0: (0, 0, 1)}


def test_trap_2_the_next_observation_of_an_ending_is_not_the_next_episodes_first() -> None:
    line = Line()
    line.episode(1, terminated=False)
    line.episode(1, terminated=False)
    assert {o: item[2] for o, item in line.items().items()} == {0: 1, 2: 3}


def test_trap_3_the_ring_seam_pairs_no_two_times() -> None:
    line = Line(config={"capacity": 9, "segment": 3}, n_step=2)
    for _ in range(200):
        line.row()
        for observation, (_, _, following) in line.items().items():
            assert following == observation + 2
    assert line.replay.chains.handed_out > 60


def test_trap_3_a_stack_needs_no_evicted_frame() -> None:
    spec = EnvSpec(name="s", observations={PLAIN: LeafSpec(shape=(3, 1), dtype="float32", stack=3)}, actions=300)
    line = Line(spec, config={"capacity": 12, "segment": 4})
    for _ in range(100):
        line.row()
    rows = line.replay.sampler.items()
    stacks = line.replay.transitions(rows, np.ones(len(rows), np.float32)).observation[PLAIN][..., 0]
    assert (np.diff(stacks, axis=1) == 1).all()
    # 100 rows: the newest segment holds 96..99, the oldest kept one 88..91, whose first two lost their frames
    assert sorted(stacks[:, -1].tolist()) == list(range(90, 99))


def test_trap_4_n_step_tails_are_kept_with_their_own_discount() -> None:
    line = Line(n_step=3)
    line.episode(4, terminated=False)
    assert line.items() == {
        0: (0 + 0.5 * 1 + 0.25 * 2, GAMMA**3, 3),
        1: (1 + 0.5 * 2 + 0.25 * 3, GAMMA**3, 4),
        2: (2 + 0.5 * 3, GAMMA**2, 4),
        3: (3, GAMMA, 4),
    }


def test_trap_4_returns_do_not_cross_an_episodes_end() -> None:
    line = Line(n_step=5)
    line.episode(2)
    line.episode(1)
    assert line.items() == {0: (0.5, 0, 2), 1: (1, 0, 2), 3: (3, 0, 4)}


def test_a_crash_leaves_non_starts_and_the_next_row_begins_an_episode() -> None:
    line = Line(n_step=2)
    for _ in range(4):
        line.row()
    line.row(cut=True)
    line.episode(1)
    assert sorted(line.items()) == [0, 1, 4, 5]
    assert line.items()[4] == (4 + 0.5 * 5, 0, 6)


def test_a_message_sent_twice_is_stored_once() -> None:
    line = Line()
    message = line.row()
    line.row()
    assert line.replay.append(message) == 0
    assert line.replay.append(replace(message, source="b", stream=np.array([1]))) == 1
    assert line.replay.metrics()["replay_duplicates"] == 1
    assert line.replay.metrics()["replay_inserted"] == 3


def test_a_final_row_out_of_place_is_refused() -> None:
    line = Line()
    line.row()
    with pytest.raises(ValueError, match="final"):
        line.row(final=True)
    line = Line()
    line.row(terminated=True)
    with pytest.raises(ValueError, match="final"):
        line.row()


def prioritised(**settings: Any) -> tuple[Line, PrioritisedSampler]:
    sampler = PrioritisedConfig(**{"alpha": 0.5, "epsilon": 1e-9, "max_decay": 1.0, **settings})
    line = Line(config={"sampler": sampler, "capacity": 30})
    assert isinstance(line.replay.sampler, PrioritisedSampler)
    return line, line.replay.sampler


def write(line: Line, row: int, priority: float, generation: int = 1) -> int:
    arrays = np.array([row]), np.array([generation]), np.array([priority], np.float32)
    return line.replay.update_priorities(Priorities(*arrays))


def test_trap_7_new_items_get_the_run_wide_maximum_and_not_one() -> None:
    line, sampler = prioritised()
    for _ in range(4):
        line.row()
    write(line, 0, 400.0)
    # what came before the first priority had no meaningful one either
    np.testing.assert_allclose(sampler.tree.leaves[:3], 20.0)
    write(line, 0, 100.0)
    write(line, 1, 900.0)
    line.row()
    np.testing.assert_allclose(sampler.tree.leaves[:4], [10.0, 30.0, 20.0, 30.0])


def test_trap_7_the_maximum_decays() -> None:
    line, sampler = prioritised(max_decay=0.5)
    for _ in range(3):
        line.row()
    write(line, 0, 400.0)
    write(line, 0, 1.0)
    write(line, 0, 1.0)
    line.row()
    np.testing.assert_allclose(sampler.tree.leaves[2], 10.0)


def test_trap_7_a_priority_for_a_recycled_slot_is_dropped() -> None:
    line, sampler = prioritised()
    for _ in range(11):
        line.row()
    batch = line.replay.sample(8)
    for _ in range(30):
        line.row()
    before = sampler.tree.leaves.copy()
    assert (sampler.tree.get(batch.index) > 0).any()
    assert line.replay.update_priorities(Priorities(batch.index, batch.generation, np.ones(8, np.float32))) == 0
    np.testing.assert_array_equal(sampler.tree.leaves, before)
    assert line.replay.metrics()["replay_stale_priorities"] == 8


def test_a_priority_that_is_not_finite_is_not_written() -> None:
    line, sampler = prioritised()
    for _ in range(4):
        line.row()
    assert write(line, 0, float("nan")) == write(line, 1, float("inf")) == 0
    assert np.isfinite(sampler.tree.total)
    assert sampler.max_priority is None


@pytest.mark.parametrize("sampler", [UniformConfig(), PrioritisedConfig()])
def test_sampling_an_empty_replay_is_refused(sampler: Any) -> None:
    with pytest.raises(ValueError, match="nothing to sample"):
        Line(config={"sampler": sampler}).replay.sample(1)


def test_sampling_the_other_kind_of_item_is_refused() -> None:
    with pytest.raises(ValueError, match=r"call sample\(\)"):
        Line().replay.sample_sequences(1)
    with pytest.raises(ValueError, match=r"call sample_sequences\(\)"):
        Line(sequence=SequenceWindow(length=2, period=1)).replay.sample(1)


def test_normalised_rewards_are_divided_by_the_deviation_of_the_discounted_return() -> None:
    line = Line(normalise_rewards=True)
    line.episode(3)
    line.episode(2)
    returns = [0, 1, 2.5, 4, 7]  # rewards 0, 1, 2 and 4, 5 at gamma 0.5; rows 3 and 6 are final
    rows = line.replay.sampler.items()
    batch = line.replay.transitions(rows, np.ones(len(rows), np.float32))
    assert batch.reward_scale == pytest.approx(np.std(returns))
    np.testing.assert_allclose(batch.reward * batch.reward_scale, [0, 1, 2, 4, 5], rtol=1e-6)
