"""Each algorithm is a change of settings that fits every preset and keeps what it does not decide."""

from __future__ import annotations

import pytest

from qfleet.core.errors import ConfigError
from qfleet.experiment import with_changes
from qfleet.presets import preset
from qfleet.presets.algorithms import ALGORITHMS, apply
from qfleet.presets.registry import PRESETS


@pytest.mark.parametrize("algo", ALGORITHMS)
@pytest.mark.parametrize("name", [*PRESETS, "atari:pong"])
def test_every_algorithm_fits_every_preset(name, algo):
    before = preset(name)
    after = apply(before, algo)
    assert after.algo == algo
    assert (after.env, after.agent.gamma, after.evaluation) == (before.env, before.agent.gamma, before.evaluation)


def test_c51_covers_the_scaled_returns_of_the_preset():
    experiment = with_changes(preset("cartpole"), {"env.reward_scale": 0.1})
    head = apply(experiment, "c51").agent.head
    assert (head.v_min, head.v_max) == pytest.approx((0.0, 10.0))
    published = apply(preset("atari:pong"), "c51").agent.head
    assert (published.v_min, published.v_max) == (-10.0, 10.0)


def test_munchausen_is_measured_in_units_of_the_reward():
    experiment = with_changes(preset("cartpole"), {"env.reward_scale": 0.1})
    soft = apply(experiment, "munchausen").agent.munchausen
    assert (soft.temperature, soft.clip) == pytest.approx((0.003, -0.1))
    published = apply(preset("atari:pong"), "munchausen").agent.munchausen
    assert (published.temperature, published.clip) == (0.03, -1.0)


def test_iqn_keeps_its_published_fractions():
    head = apply(preset("cartpole"), "iqn").agent.head
    assert (head.taus, head.target_taus, head.acting_taus) == (64, 64, 32)


def test_an_unknown_algorithm_gets_a_suggestion():
    with pytest.raises(ConfigError, match="Did you mean 'rainbow'"):
        apply(preset("cartpole"), "rainbw")
