"""Makes the gradient of a rank's minibatch its part of the gradient of the whole minibatch, which ranks share."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from qfleet.algo.agent import ReplayAgent
from qfleet.algo.flat import FlatParameters
from qfleet.algo.gradients import DeepAgent, Gradient, GradientFactory, Replayed
from qfleet.algo.networks import QNetwork
from qfleet.core.tensors import TensorBatch


def shared(factory: GradientFactory, agent: DeepAgent, whole: Callable[[Tensor], Tensor]) -> GradientFactory:
    """Return what makes gradients that are to be summed over ranks; `whole` sums a scalar over them.

    A batch of a replay is a part already: it says how large the whole one is.
    """

    def make(agent: DeepAgent, flat: FlatParameters, online: QNetwork, target: QNetwork | None) -> Gradient:
        return SharedGradient(factory(agent, flat, online, target), whole)

    return factory if isinstance(agent, ReplayAgent) else make


class SharedGradient:
    """The gradient of one rank's part of a minibatch; the sum over all ranks is that of the mean over all samples."""

    def __init__(self, own: Gradient, whole: Callable[[Tensor], Tensor]) -> None:
        self._own, self._whole = own, whole

    def replay(self, batch: TensorBatch) -> Replayed:
        """Take the loss of a batch of replayed transitions."""
        return self._own.replay(batch)

    def regression(
        self, observation: dict[str, Tensor], action: Tensor, goal: Tensor, weight: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Take this rank's part of the mean error against the goals [B]; return its own mean error and mean value."""
        assert weight is not None  # the samples of a rollout on a device all have one
        own = weight.sum()
        whole = self._whole(own).clamp(min=1)
        # Gradients divide by the sum of the weights only where it is above 1, which that of shares is not.
        error, value = self._own.regression(observation, action, goal, weight / whole)
        back = whole / own.clamp(min=1)
        return error * back, value * back
