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
    "huge reward": r"the reward is 1e\+308",
    "sys.exit": r"step\(\) raised SystemExit: 0",
    "speechless": r"raised RuntimeError: \(it cannot be told\)",
    "talkative": r"xxx\.\.\. \(50,000 characters\)",
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


@pytest.mark.parametrize(
    ("wrong", "autoreset"),
    [
        *(
            (wrong, "auto")
            for wrong in ("nan reward", "nan observation", "broadcastable shape", "empty mask", "no mask")
        ),
        *((wrong, "same_step") for wrong in ("exception", "nan reward", "wrong dtype")),
    ],
)
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
        (
            GymConfig(id="CartPol-v1"),
            r"'CartPol-v1': Environment `CartPol` doesn't exist\. Did you mean 'CartPole-v1'\?$",
        ),
        (
            GymConfig(id="nowhere/Env-v0"),
            r"^no environment 'nowhere/Env-v0': [^?]*\?( Did you mean '[^']*'\?| A class of your own.*)$",
        ),
        (GymConfig(id="no_such_module_here:Env-v0"), "no_such_module_here"),
        (
            GymConfig(id="CartPole-v1", kwargs={"colour": "red"}),
            "cannot be made with kwargs.*unexpected keyword argument.*colour",
        ),
        (GymConfig(id="Pendulum-v1"), "continuous actions.*Stable-Baselines3, CleanRL, TorchRL"),
        (GymConfig(id="CartPole-v77"), "CartPole-v77"),
        (GymConfig(id="LunarLander-v2"), r"use `LunarLander-v3` instead\. Did you mean 'LunarLander-v3'\?$"),
    ],
)
def test_what_cannot_be_made_is_refused_with_a_way_out(config, says):
    with pytest.raises(ConfigError, match=says):
        env_spec(config)


def broken_constructor(**kwargs):
    raise OSError("the robot is switched off")


class BrokenVector(gymnasium.vector.VectorEnv):
    """A user's own vector whose first reset fails."""

    single_observation_space, single_action_space = Healthy().observation_space, Healthy().action_space
    metadata = {"autoreset_mode": gymnasium.vector.AutoresetMode.NEXT_STEP}  # noqa: RUF012
    num_envs = 2

    def reset(self, *, seed=None, options=None):
        raise OSError("the robot is switched off")


@pytest.mark.parametrize("kwargs", [{}, {"speed": 3}])
@pytest.mark.parametrize("vectorisation", ["sync", "async", "native"])
def test_a_constructor_that_raises_is_one_error_with_environment_and_cause(vectorisation, kwargs, monkeypatch):
    spec = gymnasium.envs.registration.EnvSpec(
        "Robot-v0", entry_point=broken_constructor, vector_entry_point=broken_constructor
    )
    monkeypatch.setitem(gymnasium.registry, "Robot-v0", spec)
    with pytest.raises(ConfigError, match=r"Robot-v0 cannot be made.*OSError: the robot is switched off") as caught:
        make_env(GymConfig(id="Robot-v0", vectorisation=vectorisation, kwargs=kwargs), 2)
    assert isinstance(caught.value.__cause__, OSError)
    assert ("speed" in str(caught.value)) == bool(kwargs)


@pytest.mark.parametrize("vectorisation", ["sync", "async", "native"])
def test_a_factory_that_raises_is_one_error_with_its_name_and_cause(vectorisation):
    with pytest.raises(ConfigError, match=r"mine cannot be made: OSError: the robot is switched off"):
        make_env(GymConfig(id="mine", vectorisation=vectorisation), 2, factory=broken_constructor)


def test_a_factory_that_raises_for_a_later_environment_closes_the_earlier_ones():
    made = []

    def factory():
        if made:
            raise OSError("only one robot")
        made.append(Healthy())
        made[0].close = lambda: made.append("closed")
        return made[0]

    with pytest.raises(ConfigError, match=r"mine cannot be made: OSError: only one robot"):
        make_env(GymConfig(id="mine"), 2, factory=factory)
    assert made[1:] == ["closed"]


def test_the_module_of_an_id_that_cannot_be_imported_is_one_error(tmp_path, monkeypatch):
    (tmp_path / "my_broken_module.py").write_text("raise RuntimeError('no licence')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"my_broken_module:Env-v0 cannot be made: RuntimeError: no licence"):
        env_spec(GymConfig(id="my_broken_module:Env-v0"))


@pytest.mark.parametrize("space", ["observation_space", "action_space"])
def test_an_environment_without_one_of_its_spaces_is_one_error(space):
    def factory():
        env = Healthy()
        delattr(env, space)
        return env

    with pytest.raises(ConfigError, match=f"mine has no {space}"):
        make_env(GymConfig(id="mine"), 1, factory=factory)


def test_kwargs_that_name_what_qfleet_sets_are_one_error():
    with pytest.raises(ConfigError, match=r"CartPole-v1 cannot be made with kwargs.*env_id"):
        env_spec(GymConfig(id="CartPole-v1", kwargs={"env_id": "x"}))


def test_a_vector_whose_first_reset_raises_is_one_error():
    with pytest.raises(ConfigError, match=r"mine: reset\(seed=0\) raised OSError: the robot is switched off"):
        make_env(GymConfig(id="mine", vectorisation="native"), 2, factory=BrokenVector)


def test_a_factory_that_returns_something_else_is_refused():
    with pytest.raises(ConfigError, match=r"returned a str, not a gymnasium.Env"):
        make_env(GymConfig(id="mine"), 1, factory=lambda: "environment")


def test_an_environment_whose_close_raises_can_be_used():
    for vectorisation in ("sync", "async"):
        with closing(make_env(GymConfig(id="mine", vectorisation=vectorisation), 2, factory=Clinging)) as env:
            env.reset([1, 2])
            assert env.step(np.zeros(2, np.int64)).valid.all()


class Clinging(Faulty):
    def __init__(self) -> None:
        super().__init__("nothing")

    def close(self) -> None:
        raise RuntimeError("it does not want to go")
