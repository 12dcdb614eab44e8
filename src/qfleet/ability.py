"""Refuses a run whose device is missing or whose network cannot be divided as asked, before any of it is begun."""

from __future__ import annotations

import torch

from qfleet.algo.networks import build_network
from qfleet.core.errors import ConfigError
from qfleet.core.spec import EnvSpec
from qfleet.core.usercode import UserCode
from qfleet.experiment import Experiment
from qfleet.setups import learner_device


def require_able(experiment: Experiment, spec: EnvSpec, code: UserCode) -> None:
    """Raise ConfigError, with what would work, for what the learner ranks would find out only once they are there."""
    device, parallel = learner_device(experiment, spec), experiment.parallel
    if not parallel.in_pieces:
        return
    from qfleet.parallel.mesh import Degrees  # these load much of torch that few runs need
    from qfleet.parallel.splitting import check_split

    network = build_network(experiment.network, experiment.agent, spec, seed=0, custom=code.network)
    check_split(network, Degrees(1, parallel.pipeline, parallel.tensor), parallel.sharded)
    gpus, ranks = torch.cuda.device_count(), experiment.ranks
    if experiment.placement == "processes" and device == "cuda" and ranks > gpus:
        raise ConfigError(
            f"{ranks} ranks need {ranks} GPUs, and this machine has {gpus}: NCCL wants one for each rank of a divided"
            " network; use fewer ranks, or device 'cpu'"
        )
