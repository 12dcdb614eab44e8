"""The algorithms by name: each is a change of settings that fits any preset, and leaves nothing of the one before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from qfleet.algo.agent import MunchausenConfig, ReplayAgent, RolloutAgent, TabularAgent
from qfleet.algo.exploration import EpsilonGreedyConfig, NoneConfig
from qfleet.algo.heads import CategoricalConfig, ImplicitQuantileConfig, QuantileConfig
from qfleet.algo.recurrent import MemoryConfig
from qfleet.algo.torsos import ImpalaConfig, MlpConfig, NatureConfig, TabularConfig
from qfleet.core.errors import ConfigError, did_you_mean
from qfleet.envs import GymConfig, TensorConfig
from qfleet.experiment import Experiment, with_changes
from qfleet.replay import PrioritisedConfig, UniformConfig

Changes = dict[str, Any]

STEP_REWARDS = {
    "CartPole-v1": (0.0, 1.0),
    "cartpole": (0.0, 1.0),
    "Acrobot-v1": (-1.0, 0.0),
    "acrobot": (-1.0, 0.0),
    "MountainCar-v0": (-1.0, 0.0),
}
"""The smallest and largest reward of a step where every step has the same: returns reach them over the horizon."""
RETURNS = {
    "LunarLander-v3": (-200.0, 300.0),
    "qfleet/Catch-v0": (-1.0, 1.0),
    "catch": (-1.0, 1.0),
    "qfleet/Maze-v0": (-10.0, 10.0),
    "maze": (-10.0, 10.0),
}
"""The smallest and largest discounted return of the presets' environments, before their reward scale."""
PUBLISHED_RETURNS = (-10.0, 10.0)
"""C51's range for clipped Atari rewards; it also suits rewards that are normalised."""
SEQUENCES = 4
"""How many transitions of a batch one sequence takes the place of: each has many, but they are alike."""


def _dqn(experiment: Experiment) -> Changes:
    """DQN (Mnih et al., 2015)."""
    return _replay(experiment)


def _double(experiment: Experiment) -> Changes:
    """Double DQN (van Hasselt et al., 2016): the online network chooses, the target network values."""
    return _replay(experiment, double=True)


def _dueling(experiment: Experiment) -> Changes:
    """Dueling DQN (Wang et al., 2016): value and advantages apart; with Double targets, as in the paper."""
    return _replay(experiment, double=True, dueling=True)


def _nstep(experiment: Experiment) -> Changes:
    """Three-step returns with Double targets."""
    return _replay(experiment, double=True, n_step=3)


def _prioritised(experiment: Experiment) -> Changes:
    """Prioritised replay (Schaul et al., 2016) with Double targets."""
    return {**_replay(experiment, double=True), "replay.sampler": PrioritisedConfig()}


def _noisy(experiment: Experiment) -> Changes:
    """Noisy networks (Fortunato et al., 2018): learned noise explores in place of epsilon."""
    return {**_replay(experiment, noisy=True), "exploration": NoneConfig()}


def _c51(experiment: Experiment) -> Changes:
    """C51 (Bellemare et al., 2017): a categorical distribution of returns, over the range that the task has."""
    return _replay(experiment, head=_categorical(experiment), loss="huber")


def _qr(experiment: Experiment) -> Changes:
    """QR-DQN (Dabney et al., 2018): quantiles of the return."""
    return _replay(experiment, head=QuantileConfig(), loss="huber")


def _iqn(experiment: Experiment) -> Changes:
    """IQN (Dabney et al., 2018): quantiles at random fractions."""
    return _replay(experiment, head=ImplicitQuantileConfig(), loss="huber")


def _munchausen(experiment: Experiment) -> Changes:
    """Munchausen DQN (Vieillard et al., 2020): soft targets with the policy's log-probability as a bonus."""
    return _replay(experiment, munchausen=_scaled_munchausen(experiment))


def _rainbow(experiment: Experiment) -> Changes:
    """Rainbow (Hessel et al., 2018): double, dueling, three-step, prioritised, noisy and C51 together."""
    head = _categorical(experiment)
    return {
        **_replay(experiment, head=head, loss="huber", double=True, dueling=True, noisy=True, n_step=3),
        "replay.sampler": PrioritisedConfig(alpha=0.5),
        "exploration": NoneConfig(),
    }


def _beyond(experiment: Experiment) -> Changes:
    """Beyond the Rainbow (Clark et al., 2024): IQN, Munchausen, prioritised, noisy; for pixels a wide IMPALA.

    Explores by noise and by the preset's epsilon together, as published.
    """
    head = ImplicitQuantileConfig(taus=8, target_taus=8, acting_taus=8)
    soft = _scaled_munchausen(experiment)
    changes = {
        **_replay(experiment, head=head, loss="huber", munchausen=soft, dueling=True, noisy=True, n_step=3),
        "replay.sampler": PrioritisedConfig(alpha=0.2),
    }
    if isinstance(experiment.network, NatureConfig | ImpalaConfig):
        wide = ImpalaConfig(input=experiment.network.input, width=2, spectral_norm=True, pool=6, dense=512)
        changes["network"] = wide
    return changes


def _r2d2(experiment: Experiment) -> Changes:
    """R2D2 (Kapturowski et al., 2019): an LSTM, sequences with stored states and burn-in, double, dueling, five-step.

    As many steps are learned from as before, in fewer updates; an experiment's own memory stays.
    """
    learner, memory = experiment.learner, _memory(experiment)
    size, period = learner.batch_size, learner.train_period
    if memory is None:
        pixels = isinstance(experiment.network, NatureConfig | ImpalaConfig)
        memory = MemoryConfig() if pixels else MemoryConfig(hidden=128, length=20, burn_in=10, period=10)
        size, period = max(size // SEQUENCES, 1), period * memory.length / SEQUENCES
    return {
        **_replay(experiment, double=True, dueling=True, n_step=5, memory=memory),
        "replay.sampler": PrioritisedConfig(alpha=0.9, beta_start=0.6, beta_end=0.6),
        "learner.batch_size": size,
        "learner.train_period": period,
    }


def _pqn(experiment: Experiment) -> Changes:
    """PQN (Gallici et al., 2024): Q(lambda) on fresh rollouts with LayerNorm; no replay, no target network."""
    return {
        **_deep_network(experiment),
        **_without_replay(experiment),
        "agent": RolloutAgent(gamma=experiment.agent.gamma, epochs=4, minibatches=4),
        "network.layer_norm": True,
        "optim.lr": 1e-3,
    }


def _tabular(experiment: Experiment) -> Changes:
    """Watkins' Q-learning on a table; for environments whose observation is one Discrete value."""
    agent = TabularAgent(gamma=experiment.agent.gamma)
    return {**_without_replay(experiment), "agent": agent, "network.kind": "tabular"}


def _replay(experiment: Experiment, **parts: Any) -> Changes:
    """Return what makes a DQN with these parts and no others; how its target moves and errors count stays."""
    before, kept = experiment.agent, {}
    if isinstance(before, ReplayAgent):
        kept = {"target": before.target, "loss": before.loss, "huber_threshold": before.huber_threshold}
    agent = ReplayAgent(gamma=before.gamma, **{**kept, **parts})
    return {**_deep_network(experiment), **_plain(experiment), "agent": agent}


def _without_replay(experiment: Experiment) -> Changes:
    return {**_plain(experiment), "learner.evaluated": "online", "normalise_rewards": False}


def _plain(experiment: Experiment) -> Changes:
    """Return what undoes an algorithm's choice of samples and of exploration."""
    silent = isinstance(experiment.exploration, NoneConfig)
    exploration = EpsilonGreedyConfig() if silent else experiment.exploration
    changes: Changes = {"replay.sampler": UniformConfig(), "exploration": exploration}
    if (memory := _memory(experiment)) is not None:
        changes["learner.batch_size"] = experiment.learner.batch_size * SEQUENCES
        changes["learner.train_period"] = experiment.learner.train_period * SEQUENCES / memory.length
    return changes


def _memory(experiment: Experiment) -> MemoryConfig | None:
    return experiment.agent.memory if isinstance(experiment.agent, ReplayAgent) else None


def _deep_network(experiment: Experiment) -> Changes:
    """Return what undoes an algorithm's choice of the network: a table, and the LayerNorm of PQN."""
    if isinstance(experiment.network, TabularConfig):
        return {"network": MlpConfig()}
    return {"network.layer_norm": False} if isinstance(experiment.agent, RolloutAgent) else {}


def _categorical(experiment: Experiment) -> CategoricalConfig:
    env, unit = experiment.env, _reward_scale(experiment)
    name = env.game if isinstance(env, TensorConfig) else env.id if isinstance(env, GymConfig) else ""
    low, high = PUBLISHED_RETURNS
    if name in STEP_REWARDS:
        horizon = 1 / max(1 - experiment.agent.gamma, 1e-3)
        low, high = (reward * horizon * unit for reward in STEP_REWARDS[name])
    elif name in RETURNS:
        low, high = (bound * unit for bound in RETURNS[name])
    return CategoricalConfig(v_min=low, v_max=high)


def _reward_scale(experiment: Experiment) -> float:
    """Return what rewards are multiplied by for learning."""
    return experiment.env.reward_scale if isinstance(experiment.env, GymConfig | TensorConfig) else 1.0


def _scaled_munchausen(experiment: Experiment) -> MunchausenConfig:
    """What is published fits rewards of about 1; both numbers are in units of the reward."""
    unit = _reward_scale(experiment)
    published = MunchausenConfig()
    return MunchausenConfig(temperature=published.temperature * unit, clip=published.clip * unit)


ALGORITHMS: dict[str, Callable[[Experiment], Changes]] = {
    "dqn": _dqn,
    "double": _double,
    "dueling": _dueling,
    "nstep": _nstep,
    "prioritised": _prioritised,
    "noisy": _noisy,
    "c51": _c51,
    "qr": _qr,
    "iqn": _iqn,
    "munchausen": _munchausen,
    "rainbow": _rainbow,
    "beyond": _beyond,
    "r2d2": _r2d2,
    "pqn": _pqn,
    "tabular": _tabular,
}


def apply(experiment: Experiment, name: str) -> Experiment:
    """Return the experiment with another algorithm in place of its own; settings that no algorithm decides stay.

    What an algorithm has no use for is gone when another one follows: the epsilon of noisy networks, the target rule
    and the evaluated network of agents without replay, the network of a table. Those come back with their defaults.
    """
    if name not in ALGORITHMS:
        raise ConfigError(f"algo '{name}' is unknown: one of {', '.join(ALGORITHMS)}.{did_you_mean(name, ALGORITHMS)}")
    return with_changes(experiment, {**ALGORITHMS[name](experiment), "algo": name})
