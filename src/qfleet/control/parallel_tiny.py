"""A network too small to compute for any time, split over two ranks: what its updates take is the handling of parts."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from qfleet.algo.agent import ReplayAgent
from qfleet.algo.networks import build_network
from qfleet.algo.optim import AdamConfig
from qfleet.algo.torsos import MlpConfig
from qfleet.algo.updates import ReplayUpdate, build_update
from qfleet.control.parallel_parts import Handling, Link
from qfleet.control.parallel_samples import sample
from qfleet.core.spec import PLAIN, EnvSpec, LeafSpec
from qfleet.parallel.mesh import Degrees, Mesh
from qfleet.parallel.split_update import SplitUpdate, Staging

ROWS, MICRO = 16, 2
LAYERS, PASSES = 2, 4
"""Layers that are shared; passes of an update: online, backward, and two without a gradient."""
SUMS = 3
"""Sums between tensor ranks in an update: one forward in each pass, none back into the input."""
CALLS = 25
_SPEC = EnvSpec(name="tiny", observations={PLAIN: LeafSpec(shape=(8,), dtype="float32")}, actions=3)
_NETWORK, _AGENT = MlpConfig(hidden=(32, 32)), ReplayAgent(double=True)


def update_seconds(rank: int, meet: Callable[[str], str], timeout_s: float) -> dict[str, list[float]]:
    """Return the seconds of each of some updates: whole, with two tensor ranks, and with two stages.

    Both ranks call this; `meet` returns where they meet for what is named.
    """
    found = {"whole": _timed(_whole())}
    for name, degrees in (("tensor", Degrees(tensor=2)), ("pipeline", Degrees(pipeline=2))):
        mesh = Mesh(degrees, rank, 2, meet(name), "cpu", timeout_s)
        network = build_network(_NETWORK, _AGENT, _SPEC, seed=0)
        staging = Staging(micro_batches=MICRO)
        found[name] = _timed(SplitUpdate(_AGENT, network, AdamConfig(), torch.Generator(), mesh, staging))
        mesh.close()
    return found


def handling_of(whole: float, tensor: float, pipeline: float, link: Link) -> Handling:
    """Return what handling parts costs, from the seconds of an update in each way; messages are counted elsewhere."""
    return Handling(
        layer=max(0.0, tensor - whole - 2 * SUMS * link.latency) / (LAYERS * PASSES),
        micro_batch=max(0.0, pipeline - whole - PASSES * link.latency) / ((MICRO + 1) * PASSES),
    )


def _whole() -> ReplayUpdate:
    update = build_update(_AGENT, build_network(_NETWORK, _AGENT, _SPEC, seed=0), AdamConfig(), torch.Generator())
    assert isinstance(update, ReplayUpdate)
    return update


def _timed(update: ReplayUpdate) -> list[float]:
    batch, spent = sample(_SPEC, ROWS, torch.device("cpu")), []
    for _ in range(CALLS):
        began = time.perf_counter()
        update.learn(batch)
        spent.append(time.perf_counter() - began)
    return spent
