"""What parameter servers and gradient workers are built from, and the network that all of them begin with."""

from __future__ import annotations

from dataclasses import dataclass

from qfleet.algo.model_io import read_tensors
from qfleet.algo.networks import QNetwork, build_network, foreign_randomness
from qfleet.algo.warmstart import warm_start
from qfleet.parallel.compression.config import CompressionConfig
from qfleet.parallel.serving import ServerConfig
from qfleet.roles.learner_setup import LearnerSetup


@dataclass(frozen=True)
class ServingSetup:
    """Everything a server or a worker is built from, besides its handles."""

    serving: ServerConfig
    learner: LearnerSetup
    """As for a learner that is alone; it names no group."""
    index: int
    """Which server, or which worker, this is."""
    workers: int
    compression: CompressionConfig
    """The form of gradients on their way."""


def first_network(setup: LearnerSetup) -> tuple[QNetwork, dict[str, str]]:
    """Return the network that a run begins with, on the CPU, and what a person should know of it, by kind."""
    network = build_network(setup.network, setup.agent, setup.spec, seed=setup.seed, custom=setup.code.network)
    notices = {}
    if setup.warm_start is not None:
        notices["warm_start"] = str(warm_start(network, read_tensors(setup.warm_start), setup.warm_start_part))
    if text := foreign_randomness(network):
        notices["inexact"] = text
    return network, notices
