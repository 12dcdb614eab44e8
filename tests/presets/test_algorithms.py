"""Each algorithm is a change of settings that fits every preset and keeps what it does not decide."""

from __future__ import annotations

import pytest

from qfleet.core.errors import ConfigError
from qfleet.experiment import Experiment, with_changes
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
    experiment = with_changes(preset("cartpole"), {"env.reward_scale": 0.1, "agent.gamma": 0.99})
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


FORGOTTEN = {
    "noisy": ["exploration"],
    "rainbow": ["exploration"],
    "pqn": ["agent.target", "learner.evaluated", "optim.lr"],
    "tabular": ["agent.target", "learner.evaluated", "network"],
}
"""What an algorithm has no use for, so that a configuration cannot remember it for the next one."""


def without(experiment, names):
    tree = experiment.model_dump()
    for name in names:
        *path, last = name.split(".")
        section = tree
        for part in path:
            section = section[part]
        section.pop(last, None)
    return tree


@pytest.mark.parametrize("name", ["cartpole", "catch"])
def test_the_last_algorithm_decides_whatever_came_before(name):
    start = preset(name)
    for before in ALGORITHMS:
        for last in ALGORITHMS:
            chained, direct = apply(apply(start, before), last), apply(start, last)
            lost = FORGOTTEN.get(before, [])
            assert without(chained, lost) == without(direct, lost), (before, last)
            assert chained.agent.kind == direct.agent.kind
            assert (chained.exploration.kind == "none") == (direct.exploration.kind == "none")


@pytest.mark.parametrize("before", FORGOTTEN)
def test_what_an_algorithm_forgot_comes_back_with_its_defaults(before):
    after = apply(apply(preset("catch"), before), "dqn")
    plain = Experiment(env=after.env)
    if "exploration" in FORGOTTEN[before]:
        assert after.exploration == plain.exploration
    else:
        assert after.agent == plain.agent
        assert after.learner.evaluated == "online"
        assert after.network.layer_norm is False


def test_a_name_says_what_is_trained():
    parts = {algo: apply(preset("cartpole"), algo).agent for algo in ALGORITHMS if algo not in ("pqn", "tabular")}
    own = {
        algo: {name for name, value in agent if value != getattr(parts["dqn"], name)} for algo, agent in parts.items()
    }
    assert own == {
        "dqn": set(),
        "double": {"double"},
        "dueling": {"double", "dueling"},
        "nstep": {"double", "n_step"},
        "prioritised": {"double"},
        "noisy": {"noisy"},
        "c51": {"head"},
        "qr": {"head"},
        "iqn": {"head"},
        "munchausen": {"munchausen"},
        "rainbow": {"head", "double", "dueling", "noisy", "n_step"},
        "beyond": {"head", "munchausen", "dueling", "noisy", "n_step"},
        "r2d2": {"double", "dueling", "memory", "n_step"},
    }
    dqn = parts["dqn"]
    assert (dqn.double, dqn.dueling, dqn.noisy, dqn.munchausen, dqn.n_step) == (False, False, False, None, 1)
    assert dqn.target == preset("cartpole").agent.target
    prioritised = {algo for algo in ALGORITHMS if apply(preset("cartpole"), algo).replay.sampler.kind == "prioritised"}
    assert prioritised == {"prioritised", "rainbow", "beyond", "r2d2"}


@pytest.mark.parametrize("name", ["cartpole", "catch", "maze", "recall", "atari:pong"])
def test_a_presets_own_algorithm_changes_nothing(name):
    assert apply(preset(name), preset(name).algo) == preset(name)


def test_a_squared_error_stays_where_it_has_a_meaning():
    experiment = with_changes(preset("cartpole"), {"agent.loss": "mse", "agent.huber_threshold": 2.0})
    assert apply(experiment, "double").agent.loss == "mse"
    assert apply(experiment, "qr").agent.loss == "huber"
    assert apply(experiment, "qr").agent.huber_threshold == 2.0


def test_beyond_has_its_published_parts():
    experiment = apply(preset("atari:pong"), "beyond")
    head, network = experiment.agent.head, experiment.network
    assert (head.taus, head.target_taus, head.acting_taus, head.cosines) == (8, 8, 8, 64)
    assert (network.kind, network.width, network.pool, network.dense, network.spectral_norm) == (
        "impala", 2, 6, 512, True,
    )  # fmt: skip
    assert experiment.replay.sampler.alpha == 0.2
    assert experiment.exploration == preset("atari:pong").exploration


@pytest.mark.parametrize(("name", "length"), [("cartpole", 20), ("atari:pong", 80)])
def test_r2d2_learns_from_as_many_steps_as_before(name, length):
    before, after = preset(name), apply(preset(name), "r2d2")
    assert after.agent.memory.length == length
    steps = after.learner.batch_size * length / after.learner.train_period
    assert steps == before.learner.batch_size / before.learner.train_period
    assert (after.replay.sampler.alpha, after.replay.sampler.beta_start, after.agent.memory.eta) == (0.9, 0.6, 0.9)
    published = apply(preset("atari:pong"), "r2d2").agent.memory
    assert (published.hidden, published.burn_in, published.period) == (512, 40, 40)


def test_agents_with_memory_are_pipelines_with_room_for_sequences():
    experiment = apply(preset("cartpole"), "r2d2")
    assert not experiment.fused
    assert preset("cartpole").fused
    with pytest.raises(ConfigError, match=r"fused.*agent\.memory"):
        with_changes(experiment, {"topology": "fused"})
    with pytest.raises(ConfigError, match=r"replay\.capacity 900 is too small"):
        with_changes(experiment, {"replay.capacity": 900, "learner.learning_starts": 500})
    assert not with_changes(experiment, {"replay.sampler.initial": "actor"}).fused


def test_what_only_a_pipeline_can_do_makes_one_of_a_tensor_game():
    prioritised = apply(preset("cartpole"), "prioritised")
    for change, words in (
        ({"replay.sampler.initial": "actor"}, r"replay\.sampler\.initial 'actor' is for a pipeline"),
        ({"actor.groups": 2}, r"not in actor\.groups 2"),
    ):
        assert not with_changes(prioritised, change).fused
        with pytest.raises(ConfigError, match=words):
            with_changes(prioritised, {**change, "topology": "fused"})


def test_rollouts_need_all_environments_at_once():
    with pytest.raises(ConfigError, match=r"actor\.groups 2 needs agent\.kind 'replay', not 'rollout'"):
        with_changes(apply(preset("cartpole"), "pqn"), {"actor.groups": 2})


def test_an_unknown_algorithm_gets_a_suggestion():
    with pytest.raises(ConfigError, match="Did you mean 'rainbow'"):
        apply(preset("cartpole"), "rainbw")
