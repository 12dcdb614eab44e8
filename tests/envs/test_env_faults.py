"""Whatever an environment does wrong is one clear error that names it, the environment, the episode and the step."""

from __future__ import annotations

from contextlib import closing
from functools import partial

import gymnasium
import numpy as np
import pytest
from env_cases import Faulty

from qfleet.core.errors import ConfigError, EnvironmentFault
from qfleet.envs import GymConfig, env_spec, make_env

WRONGS = {
    "nan observation": "NaN or infinity",
    "inf observation": "NaN or infinity",
    "nan reward": "the reward is nan",
    "inf reward": "the reward is -inf",
    "wrong shape": r"shape \(3,\), its space says \(2,\)",
    "broadcastable shape": r"shape \(1,\), its space says \(2,\)",
    "wrong dtype": "dtype <U1, its space says float32",
    "complex dtype": "dtype complex64, its space says float32",
    "exception": "ZeroDivisionError: broken step",
    "empty mask": "allows no action",
    "no mask": "no 'action_mask'",
}


class Healthy(Faulty):
    def __init__(self) -> None:
        super().__init__("nothing")


class OneFaulty:
    """A factory whose second environment is faulty."""

    def __init__(self, wrong: str) -> None:
        self.wrong, self.made = wrong, 0

    def __call__(self) -> gymnasium.Env:
        self.made += 1
        return Faulty(self.wrong) if self.made % 3 == 2 else Healthy()


@pytest.mark.parametrize("wrong", WRONGS)
def test_a_fault_names_environment_index_episode_and_step(wrong):
    env = make_env(GymConfig(id="mine"), 3, factory=OneFaulty(wrong))
    env.reset([1, 2, 3])
    env.step(np.zeros(3, np.int64))
    env.step(np.zeros(3, np.int64))
    with pytest.raises(EnvironmentFault, match=WRONGS[wrong]) as caught:
        env.step(np.zeros(3, np.int64))
    assert "mine, environment 1:" in str(caught.value)
    assert "episode 0, step 2" in str(caught.value)
    if wrong == "exception":
        assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("wrong", ["exception", "nan reward", "nan observation", "broadcastable shape", "wrong dtype"])
@pytest.mark.parametrize("autoreset", ["auto", "same_step"])
def test_a_fault_in_another_process_names_the_environment_too(wrong, autoreset):
    config = GymConfig(id="mine", vectorisation="async", autoreset=autoreset)
    with closing(make_env(config, 2, factory=partial(Faulty, wrong))) as env:
        env.reset([1, 2])
        env.step(np.zeros(2, np.int64))
        env.step(np.zeros(2, np.int64))
        with pytest.raises(EnvironmentFault, match=WRONGS[wrong].replace("<U1", ".U1")) as caught:
            env.step(np.zeros(2, np.int64))
        assert "mine, environment " in str(caught.value)
        assert "step 2" in str(caught.value)


def test_an_exception_in_reset_is_a_fault_with_its_cause():
    env = make_env(GymConfig(id="mine"), 1, factory=partial(Faulty, "reset exception"))
    with pytest.raises(EnvironmentFault, match=r"reset.*KeyError: 'broken reset'") as caught:
        env.reset([1])
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (GymConfig(id="CartPol-v1"), "Did you mean 'CartPole-v1'"),
        (GymConfig(id="no_such_module_here:Env-v0"), "no_such_module_here"),
        (GymConfig(id="CartPole-v1", kwargs={"colour": "red"}), "does not accept kwargs.*colour"),
        (GymConfig(id="Pendulum-v1"), "continuous actions.*Stable-Baselines3, CleanRL, TorchRL"),
        (GymConfig(id="CartPole-v77"), "CartPole-v77"),
    ],
)
def test_what_cannot_be_made_is_refused_with_a_way_out(config, says):
    with pytest.raises(ConfigError, match=says):
        env_spec(config)


def test_a_factory_that_returns_something_else_is_refused():
    with pytest.raises(ConfigError, match=r"returned a str, not a gymnasium.Env"):
        make_env(GymConfig(id="mine"), 1, factory=lambda: "environment")
