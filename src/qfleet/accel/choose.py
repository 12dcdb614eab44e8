"""Decides how a run's updates are computed: explicit settings win, then what a probe found, then the shipped table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from qfleet.accel import cache
from qfleet.accel.config import AccelConfig
from qfleet.accel.hardware import Hardware
from qfleet.accel.table import LARGE, Inputs, Settings, shipped
from qfleet.algo.gradients import DeepAgent
from qfleet.algo.networks import NetworkConfig
from qfleet.algo.optim import OptimConfig
from qfleet.core.spec import EnvSpec
from qfleet.core.usercode import UserCode
from qfleet.version import __version__

_SWITCHES = ("compile", "graphs", "kernels", "channels_last")
_SAME_WORK = {"gamma", "q_lambda", "huber_threshold", "target"}
"""Settings of agents that change what is learned and not how long it takes."""


@dataclass(frozen=True)
class Workload:
    """What is computed, as far as it decides which settings are fast: plain values only."""

    agent: Mapping[str, Any]
    """Its settings but for those that change numbers and not the work."""
    network: Mapping[str, Any]
    optim: str
    sampler: str
    """How a replay is drawn from; empty without one."""
    observations: Mapping[str, Any]
    """Shape and type of each leaf."""
    actions: int
    envs: int
    batch: int
    """Samples of one update."""

    @property
    def foreign(self) -> bool:
        """Whether the network is a user's own."""
        return "class" in self.network

    @property
    def inputs(self) -> Inputs:
        """Images where any leaf has height and width; frames where it is large, and the network one of our own."""
        shapes = [leaf["shape"] for leaf in self.observations.values() if len(leaf["shape"]) == 3]
        if any(min(shape[1:]) >= LARGE for shape in shapes) and not self.foreign:
            return "frames"
        return "images" if shapes else "vectors"


def workload(
    agent: DeepAgent,
    network: NetworkConfig,
    optim: OptimConfig,
    spec: EnvSpec,
    code: UserCode,
    sampler: str = "",
    envs: int = 0,
    batch: int = 0,
) -> Workload:
    """Return what is computed for these settings; without environments, what no probe has timed."""
    layers = network.model_dump(mode="json")
    if code.network is not None:
        layers["class"] = f"{code.network.__module__}:{getattr(code.network, '__qualname__', '')}"
    return Workload(
        agent=agent.model_dump(mode="json", exclude=_SAME_WORK),
        network=layers,
        optim=optim.kind,
        sampler=sampler,
        observations={name: leaf.model_dump(mode="json") for name, leaf in spec.observations.items()},
        actions=spec.actions,
        envs=envs,
        batch=batch,
    )


@dataclass(frozen=True)
class Choice:
    """How this run is computed, and why so."""

    settings: Settings
    why: str
    """Where the settings come from."""
    notes: tuple[str, ...] = ()
    """What was wanted and cannot be used, each with the reason."""

    def line(self, hardware: Hardware) -> str:
        """Return the choice in one line, for a person."""
        return "; ".join([f"{hardware.kind}: {self.settings.words(hardware.kind)} ({self.why})", *self.notes])


def key_of(hardware: Hardware, workload: Workload) -> cache.Key:
    """Return what a cached choice is found by."""
    return {
        "hardware": [hardware.kind, hardware.name, *hardware.capability],
        "workload": asdict(workload),
        "versions": {"qfleet": __version__, "torch": torch.__version__, "triton": _triton()},
    }


def resolve(
    config: AccelConfig,
    hardware: Hardware,
    workload: Workload,
    obstacles: Mapping[str, str],
    former: Settings | None = None,
) -> Choice:
    """Return the settings to use. `obstacles` are those of the model: settings it cannot use, with the reason.

    A run that goes on keeps its `former` settings, whatever probes found since.
    """
    base, why, complaint = _base(hardware, workload, former)
    given = explicit(config)
    wanted: Settings = base.replace(**given)
    if given:
        names = ", ".join(f"accel.{name}" for name in given)
        if wanted != base:
            why = why.partition(": ")[0]  # the speed that a probe found is that of its own settings
        why = f"{names} set" if len(given) == len(Settings.model_fields) else f"{why}; {names} set"
    settings, notes = restrict(wanted, {**obstacles, **hardware.obstacles}, hardware.kind)
    if hardware.kind == "cpu" and config.graph_updates:
        notes = (*notes, "accel.graph_updates has no effect: nothing is recorded on a CPU")
    return Choice(settings, why, (*notes, complaint) if complaint else notes)


def _base(hardware: Hardware, workload: Workload, former: Settings | None) -> tuple[Settings, str, str]:
    """Return the settings that explicit ones change, where they come from, and a complaint about the cache."""
    if former is not None:
        return former, "as before the run was cut", ""
    entry, complaint = cache.find(key_of(hardware, workload))
    if entry is not None:
        return entry.settings, entry.why, complaint
    return *shipped(hardware, workload.agent["kind"], workload.inputs), complaint


def explicit(config: AccelConfig) -> dict[str, Any]:
    """Return the settings of speed that are not left to us, by name."""
    given: dict[str, Any] = {
        name: getattr(config, name) == "on" for name in _SWITCHES if getattr(config, name) != "auto"
    }
    if config.precision != "auto":
        given["precision"] = config.precision
    if config.graph_updates:
        given["graph_updates"] = config.graph_updates
    return given


def as_config(settings: Settings) -> AccelConfig:
    """Return the explicit settings that ask for exactly these."""
    switches = {name: "on" if getattr(settings, name) else "off" for name in _SWITCHES}
    return AccelConfig.model_validate(
        {"precision": settings.precision, "graph_updates": settings.graph_updates, **switches}
    )


def restrict(wanted: Settings, obstacles: Mapping[str, str], kind: str) -> tuple[Settings, tuple[str, ...]]:
    """Return the settings without what cannot be used on a kind of device, and a note for each thing left out."""
    changes: dict[str, Any] = {}
    notes = []
    if "precision" in obstacles and (reason := _why_not_in(wanted, obstacles, kind)):
        changes["precision"] = "fp32"
        notes.append(f"fp32 in place of {wanted.precision}: {reason}")
    for name in _SWITCHES:
        if getattr(wanted, name) and name in obstacles:
            changes[name] = False
            notes.append(f"{name} off: {obstacles[name]}")
    settings: Settings = wanted.replace(**changes)
    if settings.graphs and not settings.kernels:
        # Only our own optimiser step decides on the device what is finite, which a recording needs.
        settings = settings.replace(graphs=False)
        notes.append("graphs off: they need our kernels")
    if settings.compile and settings.kernels and kind == "cpu":
        settings = settings.replace(compile=False)
        notes.append("compile off: the hand-written network needs none")
    return settings, tuple(notes)


def _why_not_in(wanted: Settings, obstacles: Mapping[str, str], kind: str) -> str:
    """Return why the wanted number format cannot be used on a device that has not all of them; empty if it can."""
    if wanted.precision == "fp32" or (wanted.precision == "fp16" and kind == "cuda"):
        return ""  # GPUs too old for tf32 and bf16 have float16
    if wanted.precision == "bf16" and kind == "cpu":
        by_hand = wanted.kernels and "kernels" not in obstacles
        return "the hand-written network has no other format" if by_hand else ""
    return obstacles["precision"]


def _triton() -> str:
    try:
        return version("triton")
    except PackageNotFoundError:
        return ""
