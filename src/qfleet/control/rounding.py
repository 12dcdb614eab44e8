"""Whether actors that compute on a CPU do so in fewer bits: where that was measured to pay on this machine."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from qfleet.algo.agent import ReplayAgent
from qfleet.control.measurements import Curve, Measurements, at
from qfleet.core.usercode import UserCode
from qfleet.experiment import Experiment

PRECISION = "inference.precision"
PAYS = 0.9
"""Values in bf16 that take a larger part of the time than this are not worth their lost digits."""


def may_round(experiment: Experiment, code: UserCode) -> bool:
    """Return whether actors of this experiment can compute in bf16; who has a network of one's own says so oneself."""
    agent = experiment.agent
    remembers = isinstance(agent, ReplayAgent) and agent.memory is not None
    return agent.kind != "tabular" and not remembers and code.network is None


def acting_precision(experiment: Experiment, measured: Measurements, fixed: Collection[str]) -> Literal["fp32", "bf16"]:
    """Return the number format of acting: the experiment's own if it is fixed, or has to be inline's to the byte."""
    if PRECISION in fixed or experiment.lockstep or not measured.act_bf16:
        return experiment.inference.precision
    envs = experiment.actor.envs
    return "bf16" if at(measured.act_bf16, envs) <= PAYS * at(measured.act, envs) else "fp32"


def in_bf16(measured: Measurements) -> Measurements:
    """Return what an experiment costs whose actors compute in bf16, from what it costs in fp32; the same if unknown."""
    if not measured.act_bf16:
        return measured

    def changed(curve: Curve) -> Curve:
        more = [(size, at(measured.act_bf16, size) - at(measured.act, size)) for size, _ in curve]
        return tuple((size, max(seconds + add, 0.0)) for (size, seconds), (_, add) in zip(curve, more, strict=True))

    made: Measurements = measured.replace(
        act=measured.act_bf16, actor_tick=changed(measured.actor_tick), actor_cpu=changed(measured.actor_cpu)
    )
    return made
