"""The settings that a probe tries for a run on its device, and in which order it prefers them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from qfleet.accel.choose import as_config, explicit
from qfleet.accel.precision import PRECISIONS
from qfleet.accel.table import EAGER, Settings
from qfleet.algo.agent import ReplayAgent
from qfleet.algo.networks import build_network
from qfleet.roles.fused.choices import choose
from qfleet.roles.fused.setup import FusedSetup

GRAPH_LENGTHS = (64, 256)
"""Updates in one recording that are tried besides the loop's own."""


def candidates(setup: FusedSetup) -> list[Settings]:
    """Return the settings worth a try on this device, as they come down to here, eager float32 first and none twice.

    What is set explicitly stays as it is in all but the first.
    """
    device = torch.device(setup.device)
    tried: list[Settings] = [EAGER, EAGER.replace(kernels=True), EAGER.replace(channels_last=True)]
    if device.type != "cpu":
        fast = {"kernels": True, "graphs": True}
        # The likely winners early: a slow machine may not come to the end of the list.
        for compiled in (True, False):
            tried += [Settings(precision=name, compile=compiled, **fast) for name in ("bf16", "tf32", "fp32", "fp16")]
        tried += [
            Settings(precision="bf16", compile=compiled, channels_last=True, **fast) for compiled in (True, False)
        ]
        if isinstance(setup.agent, ReplayAgent):
            tried += [Settings(precision="tf32", graph_updates=length, **fast) for length in GRAPH_LENGTHS]
    given = explicit(setup.accel)
    found = [EAGER] + [settled(setup, settings.replace(**given)) for settings in tried]
    return list(dict.fromkeys(found))


def plainness(settings: Settings) -> tuple[int, bool, bool, bool, bool, int]:
    """Return what orders settings from the plainest on: full precision first, then what starts soonest."""
    rounded = PRECISIONS.index(settings.precision)
    return (
        rounded, settings.compile, settings.graphs, settings.kernels, settings.channels_last, settings.graph_updates
    )  # fmt: skip


def settled(setup: FusedSetup, settings: Settings) -> Settings:
    """Return what settings come down to for this run on this machine."""
    with format_put_back():
        network = build_network(setup.network, setup.agent, setup.spec, seed=setup.seed, custom=setup.code.network)
        found = choose(with_settings(setup, settings), network).settings
    same: Settings = found if found.graphs else found.replace(graph_updates=0)  # a length of nothing
    return same


def with_settings(setup: FusedSetup, settings: Settings) -> FusedSetup:
    """Return the setup of a run that is computed with these settings."""
    return replace(setup, accel=as_config(settings).replace(deterministic=setup.accel.deterministic))


@contextmanager
def format_put_back() -> Iterator[None]:
    """Put the process's format of float32 products back afterwards."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]
