"""One learning step of a replay agent whose networks are split over a mesh of ranks."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from qfleet.algo.agent import AgentConfig, ReplayAgent
from qfleet.algo.flat import FlatParameters
from qfleet.algo.gradients import EagerGradient
from qfleet.algo.networks import QNetwork
from qfleet.algo.optim import OptimConfig, each_vector
from qfleet.algo.steps import GradientHook, GradientStep
from qfleet.algo.updates import DeepUpdate, Learned, ReplayUpdate
from qfleet.core.errors import CheckpointError, ConfigError
from qfleet.core.tensors import TensorBatch
from qfleet.core.types import Floats
from qfleet.parallel.clipping import SplitClip
from qfleet.parallel.mesh import Mesh
from qfleet.parallel.pipeline import Pipeline, ScheduleName
from qfleet.parallel.splitting import check_split, inputs_of, running_statistics, split_network
from qfleet.parallel.staged_gradient import ONLINE, TARGET, StagedGradient
from qfleet.parallel.whole import Whole


@dataclass(frozen=True)
class Staging:
    """How a pipeline runs."""

    micro_batches: int = 4
    """Equal parts of a replica's batch that are in the pipeline at once."""
    schedule: ScheduleName = "1f1b"
    """In which order they go forward and backward."""


class SplitUpdate(ReplayUpdate):
    """Learns like its base; each rank has, optimises and remembers its share of the networks.

    All ranks must call every method together. The ranks of a replica get the same batch; replicas get theirs, and
    `Batch.global_size` tells the size of all together. `online`, `flat`, `target` and `target_flat` are the whole
    networks, on the host, as they were at the last `assemble`; `state_dict` is that of an unsplit update.
    """

    def __init__(
        self,
        agent: AgentConfig,
        online: QNetwork,
        optim: OptimConfig,
        generator: torch.Generator,
        mesh: Mesh,
        staging: Staging | None = None,
        total_updates: int | None = None,
        hook: GradientHook | None = None,
        sharded: bool = False,
    ) -> None:
        """Take the whole network, the same on every rank; `hook` sums over replicas in place of the mesh.

        Of a `sharded` one each replica keeps its part only.
        """
        self._agent, self._mesh = _checked(agent, online, mesh, sharded), mesh
        whole, whole_target, target = (copy.deepcopy(online) for _ in range(3))
        if not sharded:  # which moves to the device layer by layer
            online, target = online.to(mesh.device), target.to(mesh.device)
        self._part = split_network(online, mesh, ONLINE, sharded)
        self._target_part = split_network(target, mesh, TARGET, sharded)
        # The clipping hook needs places in the flat vector, which the step is about to make.
        self._clip = SplitClip(mesh, optim.max_grad_norm, hook, sharded)
        unclipped = optim.model_copy(update={"max_grad_norm": None})
        step = GradientStep(cast(Any, self._part.share), unclipped, total_updates, self._clip)
        # Not the base's own, which would flatten whole networks.
        DeepUpdate.__init__(self, self._part.network, step, generator)
        self.seen = None
        self._target_local = FlatParameters(self._target_part.share)
        for part in (self._part, self._target_part):
            part.share.tie()
        step.watch(self._target_local, self._agent.target)
        self.online, self.target = whole.cpu().train(), whole_target.cpu().explore()
        self.flat, self.target_flat = FlatParameters(self.online), FlatParameters(self.target)
        self._whole = Whole(mesh, self._part, step.flat, self.online, self.flat)
        self._clip.counted = self._whole.counted(step.flat.gradients)
        self._inputs = inputs_of(self._part)
        self._share_gradient = self._build_gradient(staging or Staging())

    def _build_gradient(self, staging: Staging) -> EagerGradient | StagedGradient:
        online, target = self._part, self._target_part
        target.network.explore()
        if online.stage is None or target.stage is None:
            return EagerGradient(self._agent, self._step.flat, online.network, target.network)
        online.stage.train()
        target.stage.eval()
        pipelines = (
            Pipeline(online.stage, online.cut, self._mesh, staging.micro_batches, staging.schedule),
            Pipeline(target.stage, target.cut, self._mesh, staging.micro_batches, staging.schedule),
        )
        return StagedGradient(self._agent, self._step.flat, (online.network, target.network), pipelines, self._mesh)

    def _learn_once(self, batch: TensorBatch) -> Learned:
        if self.seen is not None:
            batch = self.seen(batch)
        if self._agent.noisy:
            self._part.network.resample_noise(self._generator)
            self._target_part.network.resample_noise(self._generator)
        with self._mesh.explained("an update"):
            found = self._share_gradient.replay(batch)
            made, _ = self._step(found.total)
        if made is not False:
            if self._inputs is not None:
                self._inputs.observe(batch.observation)
            self._step.follow()
        return Learned(made, found.priority, {"loss": found.total, "grad_norm": self._clip.norm, **found.metrics})

    def assemble(self) -> None:
        """Bring `flat` and `target_flat` up to date with what the ranks have learned."""
        for local, whole in ((self._step.flat, self.flat), (self._target_local, self.target_flat)):
            with self._mesh.explained("gathering the weights"):
                values = self._whole.gather(torch.cat([local.parameters, local.buffers]), buffers=True)
            whole.parameters.copy_(values[: whole.parameters.numel()])
            whole.buffers.copy_(values[whole.parameters.numel() :])

    def state_dict(self) -> dict[str, Any]:
        """Return what an unsplit update in this state would, so that it can be continued under any plan."""
        self.assemble()
        step = self._step.state_dict()
        moments = each_vector(step["optim"]["moments"], self._whole.gather)
        step |= {"weights": self.flat.to_numpy(), "optim": {**step["optim"], "moments": moments}}
        return {"step": step, "generator": self._generator_state(), "target": self.target_flat.to_numpy()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` of this or of an unsplit update returned; every rank takes its share."""
        self.flat.load_numpy(state["step"]["weights"])
        self.target_flat.load_numpy(state["target"])
        optim = state["step"]["optim"]
        optim = {**optim, "moments": each_vector(optim["moments"], self._own_moment)}
        own = {"weights": self._own_values(self.flat), "optim": optim}
        DeepUpdate.load_state_dict(self, {**state, "step": {**state["step"], **own}})
        self._target_local.load_numpy(self._own_values(self.target_flat))

    def _own_values(self, whole: FlatParameters) -> Floats:
        """Return this rank's share [p + q] of a whole network's parameters and buffers."""
        local = self._step.flat
        size = local.parameters.numel() + local.buffers.numel()
        return self._whole.scatter(torch.from_numpy(whole.to_numpy()), torch.zeros(size)).numpy()

    def _own_moment(self, whole: Tensor) -> Tensor:
        if whole.numel() != self.flat.parameters.numel():
            raise CheckpointError(
                f"a saved optimiser of size {whole.numel()} does not fit a network of {self.flat.parameters.numel()}:"
                " resume with the settings of the saved run"
            )
        return self._whole.scatter(whole, torch.zeros(self._step.flat.parameters.numel()))

    def _generator_state(self) -> Tensor:
        """Return the random state of the last stage, which alone draws the fractions of implicit quantiles."""
        state = self._generator.get_state().to(self._mesh.device)
        return self._mesh.share_(state, "pipeline", self._mesh.degrees.pipeline - 1).cpu()


def _checked(agent: AgentConfig, online: QNetwork, mesh: Mesh, sharded: bool) -> ReplayAgent:
    """Refuse what only one rank, or replicas of whole networks, can learn."""
    if not isinstance(agent, ReplayAgent) or agent.memory is not None:
        raise ConfigError(
            f"a mesh of {mesh.degrees} learns from replayed transitions only, not with an agent '{agent.kind}'"
            f"{' with memory' if isinstance(agent, ReplayAgent) else ''}: use data parallelism for it"
        )
    check_split(online, mesh.degrees, sharded)
    if mesh.degrees.data > 1 and running_statistics(online):
        raise ConfigError(
            "network.input.normalize learns its statistics from one replica's observations, and a mesh of"
            f" {mesh.degrees} has {mesh.degrees.data}: set network.input.scale in its place, or use data 1"
        )
    return agent
