"""The eager gradient with other number formats, and with its forward and backward passes fused by torch.compile."""

from __future__ import annotations

from torch import Tensor

from qfleet.accel.fusing import fused
from qfleet.accel.precision import LossScale, Precision, autocast
from qfleet.algo.agent import ReplayAgent
from qfleet.algo.flat import FlatParameters
from qfleet.algo.gradients import DeepAgent, EagerGradient, Replayed
from qfleet.algo.heads import ImplicitQuantileHead
from qfleet.algo.networks import QNetwork
from qfleet.core.tensors import TensorBatch


class WrappedGradient(EagerGradient):
    """Automatic differentiation in a number format, compiled or not; with a scale, of the loss multiplied by it."""

    def __init__(
        self,
        agent: DeepAgent,
        flat: FlatParameters,
        online: QNetwork,
        target: QNetwork | None,
        precision: Precision,
        compiled: bool = False,
        scale: LossScale | None = None,
    ) -> None:
        super().__init__(agent, flat, online, target)
        self._precision, self._device, self._scale = precision, flat.parameters.device, scale
        self._of_replay = fused(self._replay_loss, whole=True) if compiled else self._replay_loss
        self._of_regression = fused(self._regression_loss, whole=True) if compiled else self._regression_loss

    def replay(self, batch: TensorBatch) -> Replayed:
        """Take the loss of a batch of replayed transitions."""
        with autocast(self._precision, self._device):
            found = self._of_replay(batch)
        self._backward(found.total)
        return Replayed(found.total.detach(), found.priority, found.metrics)

    def regression(
        self, observation: dict[str, Tensor], action: Tensor, goal: Tensor, weight: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Take the mean error of the values of the actions [B] against the goals [B]; return it and the mean value."""
        with autocast(self._precision, self._device):
            total, mean = self._of_regression(observation, action, goal, weight)
        self._backward(total)
        return total.detach(), mean

    def _backward(self, total: Tensor) -> None:
        super()._backward(total if self._scale is None else total * self._scale.value)


def can_compile(network: QNetwork, agent: DeepAgent) -> bool:
    """Return whether torch.compile can take the whole loss: one that draws no random numbers of its own."""
    noisy = isinstance(agent, ReplayAgent) and agent.noisy
    return not noisy and not isinstance(network.head, ImplicitQuantileHead) and not network.has_dropout
