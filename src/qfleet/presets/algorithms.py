"""The algorithms by name: each is a change of settings that fits any preset."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from qfleet.algo.agent import MunchausenConfig
from qfleet.algo.torsos import ImpalaConfig, NatureConfig
from qfleet.core.errors import ConfigError, did_you_mean
from qfleet.envs import GymConfig
from qfleet.experiment import Experiment, with_changes

Changes = dict[str, Any]

RETURNS = {
    "CartPole-v1": (0.0, 100.0),
    "Acrobot-v1": (-100.0, 0.0),
    "MountainCar-v0": (-100.0, 0.0),
    "LunarLander-v3": (-200.0, 300.0),
    "qfleet/Catch-v0": (-1.0, 1.0),
    "qfleet/Maze-v0": (-10.0, 10.0),
}
"""The smallest and largest discounted return of the presets' environments, before their reward scale."""
PUBLISHED_RETURNS = (-10.0, 10.0)
"""C51's range for clipped Atari rewards; it also suits rewards that are normalised."""


def _dqn(experiment: Experiment) -> Changes:
    """DQN (Mnih et al., 2015)."""
    return {"agent.double": False, "agent.n_step": 1}


def _double(experiment: Experiment) -> Changes:
    """Double DQN (van Hasselt et al., 2016): the online network chooses, the target network values."""
    return {"agent.double": True}


def _dueling(experiment: Experiment) -> Changes:
    """Dueling DQN (Wang et al., 2016): value and advantages apart; with Double targets, as in the paper."""
    return {"agent.double": True, "agent.dueling": True}


def _nstep(experiment: Experiment) -> Changes:
    """Three-step returns with Double targets."""
    return {"agent.double": True, "agent.n_step": 3}


def _prioritised(experiment: Experiment) -> Changes:
    """Prioritised replay (Schaul et al., 2016) with Double targets."""
    return {"agent.double": True, "replay.sampler.kind": "prioritised"}


def _noisy(experiment: Experiment) -> Changes:
    """Noisy networks (Fortunato et al., 2018): learned noise explores in place of epsilon."""
    return {"agent.double": True, "agent.noisy": True, "exploration.kind": "none"}


def _c51(experiment: Experiment) -> Changes:
    """C51 (Bellemare et al., 2017): a categorical distribution of returns, over the range that the task has."""
    env = experiment.env
    low, high = PUBLISHED_RETURNS
    if isinstance(env, GymConfig) and env.id in RETURNS:
        low, high = (bound * env.reward_scale for bound in RETURNS[env.id])
    return {"agent.head": {"kind": "categorical", "v_min": low, "v_max": high}}


def _qr(experiment: Experiment) -> Changes:
    """QR-DQN (Dabney et al., 2018): quantiles of the return."""
    return {"agent.head.kind": "quantile"}


def _iqn(experiment: Experiment) -> Changes:
    """IQN (Dabney et al., 2018): quantiles at random fractions."""
    return {"agent.head.kind": "implicit_quantile"}


def _munchausen(experiment: Experiment) -> Changes:
    """Munchausen DQN (Vieillard et al., 2020): soft targets with the policy's log-probability as a bonus."""
    # What is published fits rewards of about 1; both numbers are in units of the reward.
    unit = experiment.env.reward_scale if isinstance(experiment.env, GymConfig) else 1.0
    published = MunchausenConfig()
    scaled = published.replace(temperature=published.temperature * unit, clip=published.clip * unit)
    return {"agent.double": False, "agent.munchausen": scaled}


def _rainbow(experiment: Experiment) -> Changes:
    """Rainbow (Hessel et al., 2018): double, dueling, three-step, prioritised, noisy and C51 together."""
    return {
        **_noisy(experiment),
        **_prioritised(experiment),
        **_c51(experiment),
        "agent.dueling": True,
        "agent.n_step": 3,
        "replay.sampler.alpha": 0.5,
    }


def _beyond(experiment: Experiment) -> Changes:
    """Beyond the Rainbow (Clark et al., 2024): IQN, Munchausen, prioritised, noisy; for pixels a wide IMPALA."""
    changes: Changes = {
        **_noisy(experiment),
        **_prioritised(experiment),
        **_iqn(experiment),
        **_munchausen(experiment),
        "agent.dueling": True,
        "agent.n_step": 3,
        "replay.sampler.alpha": 0.2,
    }
    if isinstance(experiment.network, NatureConfig | ImpalaConfig):
        wide = ImpalaConfig(input=experiment.network.input, width=2, spectral_norm=True, pool=6)
        changes["network"] = wide
    return changes


def _pqn(experiment: Experiment) -> Changes:
    """PQN (Gallici et al., 2024): Q(lambda) on fresh rollouts with LayerNorm; no replay, no target network."""
    return {
        **_without_replay(experiment, "rollout"),
        "agent.epochs": 4,
        "agent.minibatches": 4,
        "network.layer_norm": True,
        "optim.lr": 1e-3,
    }


def _tabular(experiment: Experiment) -> Changes:
    """Watkins' Q-learning on a table; for environments whose observation is one Discrete value."""
    return {**_without_replay(experiment, "tabular"), "network.kind": "tabular"}


def _without_replay(experiment: Experiment, kind: str) -> Changes:
    return {
        "agent.kind": kind,
        "agent.gamma": experiment.agent.gamma,
        "learner.evaluated": "online",
        "replay.sampler.kind": "uniform",
        "normalise_rewards": False,
    }


def _deep(experiment: Experiment) -> Changes:
    """Return what turns a table into a network with replay, so that other algorithms apply."""
    if experiment.network.kind != "tabular":
        return {}
    return {"network.kind": "mlp", "agent.kind": "replay", "agent.gamma": experiment.agent.gamma}


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
    "pqn": _pqn,
    "tabular": _tabular,
}


def apply(experiment: Experiment, name: str) -> Experiment:
    """Return the experiment with another algorithm; settings that the algorithm does not decide stay."""
    if name not in ALGORITHMS:
        raise ConfigError(f"algo '{name}' is unknown: one of {', '.join(ALGORITHMS)}.{did_you_mean(name, ALGORITHMS)}")
    experiment = with_changes(experiment, _deep(experiment))
    return with_changes(experiment, {**ALGORITHMS[name](experiment), "algo": name})
