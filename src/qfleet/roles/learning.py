"""Builds what a learner learns with: the network's update, how it is computed, and how messages become updates."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch

from qfleet.accel.choices import Choices, Job, choose
from qfleet.accel.choose import workload
from qfleet.accel.graphs import Recording
from qfleet.accel.mirror import ReplayMirror
from qfleet.accel.transfers import CudaLink, Link
from qfleet.algo.agent import ReplayAgent, RolloutAgent, TabularAgent
from qfleet.algo.model_io import read_tensors
from qfleet.algo.networks import QNetwork, build_network, foreign_randomness
from qfleet.algo.updates import ReplayUpdate, Update, build_update
from qfleet.algo.warmstart import warm_start
from qfleet.core import seeding
from qfleet.core.protocols import KeptRows
from qfleet.parallel.plan import ParallelConfig
from qfleet.roles.joining import Joining
from qfleet.roles.learner_setup import LearnerSetup
from qfleet.roles.updating import Ahead, OneByOne, Updating

if TYPE_CHECKING:
    from qfleet.parallel.mesh import Mesh


@dataclass
class Learning:
    """An update on its device, and how a person would describe it."""

    update: Update
    choices: Choices | None
    """How updates are computed; None for tables and sequences, for which there is one way only."""
    generator: torch.Generator
    notices: dict[str, str] = field(default_factory=dict)
    """What a person should know, by kind."""
    mirror: ReplayMirror | None = None
    """The learner's copy of the shard's observations, where it has one."""
    link: Link | None = None
    """To a GPU that is given the next batch while it learns; None where every update is waited for."""

    def look_at(self, rows: KeptRows, setup: LearnerSetup, whole: bool) -> None:
        """Keep a copy of the shard's observations from now on; of all of them at once with `whole`."""
        assert isinstance(self.update, ReplayUpdate)
        self.mirror = ReplayMirror(setup.spec.observations, rows, torch.device(setup.device), whole)
        self.update.seen = self.mirror.seen

    def updating(self, setup: LearnerSetup) -> Updating:
        """Return how messages become updates, with none under way."""
        if self.link is None:
            return OneByOne(self.update, self.mirror)
        assert isinstance(self.update, ReplayUpdate)
        assert self.choices is not None
        record = partial(Recording, generators=(self.generator,), enabled=self.choices.recorded)
        period = max(setup.learner.publish_period // setup.learner.updates_per_draw, 1)
        return Ahead(self.update, self.link, period, record, self.mirror)


def build_learning(setup: LearnerSetup, role: str, joining: Joining | None) -> Learning:
    """Build the network and its update on the learner's device; `joining` is what a rank does with its group."""
    device, notices = torch.device(setup.device), {}
    network = build_network(setup.network, setup.agent, setup.spec, seed=setup.seed, custom=setup.code.network)
    if setup.warm_start is not None:
        notices["warm_start"] = str(warm_start(network, read_tensors(setup.warm_start), setup.warm_start_part))
    if text := foreign_randomness(network):
        notices["inexact"] = text
    if setup.whole is not None:
        notices["no_effect"] = _whole(network, setup.whole)
    if joining is not None and joining.mesh is not None:
        return _split(setup, role, network, joining.mesh, notices)
    network = network.to(device)
    generator = seeding.torch_stream(setup.seed, role, purpose="update", device=device)
    choices = _choose(setup, network, device)
    hook, stepper = (None, None) if joining is None else (joining.sum_, joining.stepper)
    parts = (setup.agent, network, setup.optim, generator, setup.total_updates, hook)
    if choices is None:
        update = build_update(*parts, stepper=stepper)
    else:
        notices["accel"] = choices.description if joining is None else f"{choices.description}; {joining.description}"
        update = build_update(*parts, choices.gradient, stepper or choices.stepper)
    if joining is not None:
        joining.attach(update)
    return Learning(update, choices, generator, notices, link=link_for(setup))


def _split(setup: LearnerSetup, role: str, network: QNetwork, mesh: Mesh, notices: dict[str, str]) -> Learning:
    """Build the update of a network that ranks share; they all draw the same random numbers."""
    from qfleet.parallel.split_update import SplitUpdate, Staging  # which loads much of torch that few runs need

    generator = seeding.torch_stream(setup.seed, role, purpose="update", device=mesh.device)
    staging = Staging(setup.parallel.micro_batches, setup.parallel.schedule)
    parts = (setup.agent, network, setup.optim, generator, mesh, staging, setup.total_updates)
    sharded = setup.parallel.sharded
    notices["accel"] = f"{mesh.device.type}: eager, {mesh.degrees}{', sharded' if sharded else ''}"
    return Learning(SplitUpdate(*parts, sharded=sharded), None, generator, notices)


def _whole(network: QNetwork, plan: ParallelConfig) -> str:
    """Refuse a network that the plan could not split; return that it is not split here."""
    from qfleet.parallel.mesh import Degrees  # these load much of torch that few runs need
    from qfleet.parallel.splitting import check_split

    check_split(network, Degrees(1, plan.pipeline, plan.tensor))
    asked = (
        f"parallel.tensor {plan.tensor}, parallel.pipeline {plan.pipeline}, parallel.update.kind '{plan.update.kind}'"
    )
    return f"inline computes whole networks: {asked} change nothing but who would compute what"


def works_ahead(setup: LearnerSetup) -> bool:
    """Return whether a GPU is given the next batch while it learns; ranks of a group must stop at the same update."""
    transitions = isinstance(setup.agent, ReplayAgent) and setup.agent.memory is None
    return setup.ahead and transitions and setup.group is None and torch.device(setup.device).type == "cuda"


def link_for(setup: LearnerSetup) -> Link | None:
    """Return what joins a learner that works ahead with its GPU; None for the others."""
    return CudaLink(torch.device(setup.device)) if works_ahead(setup) else None


def _choose(setup: LearnerSetup, network: QNetwork, device: torch.device) -> Choices | None:
    if isinstance(setup.agent, TabularAgent) or network.recurrent:
        return None
    barred = {}
    if not works_ahead(setup):
        barred["graphs"] = "the learner waits for every update"
    elif setup.code.network is not None:
        barred["graphs"] = "a network of one's own may wait for the device"
    if isinstance(setup.agent, RolloutAgent):
        barred["compile"] = "a pipeline's minibatches differ in size"
    work = workload(setup.agent, setup.network, setup.optim, setup.spec, setup.code)
    return choose(Job(setup.accel, setup.agent, setup.optim, device, work, barred), network)
