"""Error feedback: what a payload left out of one gradient is added to the next."""

from __future__ import annotations

import torch
from torch import Tensor

from qfleet.core.errors import CheckpointError
from qfleet.core.role import State
from qfleet.parallel.compression.codec import Codec, Payload
from qfleet.parallel.compression.topk import TopKCodec


class Compressor:
    """Turns one gradient after the other into payloads; this one trusts its codec to lose nothing."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec

    def encode(self, gradient: Tensor) -> Payload:
        """Return a finite gradient [P] as it is to be sent, and remember what that leaves out."""
        payload = self.codec.encode(self.corrected(gradient))
        self.sent(payload)
        return payload

    def corrected(self, gradient: Tensor) -> Tensor:
        """Return what is to be sent now [P]: the gradient and what is still owed. Nothing is remembered yet."""
        return gradient

    def sent(self, payload: Payload) -> None:
        """Take note of what was sent of the latest `corrected`."""

    def state_dict(self) -> State:
        """Return copies of all that later payloads depend on."""
        return {"codec": self.codec.state_dict()}

    def load_state_dict(self, state: State) -> None:
        """Continue from what `state_dict` returned."""
        if _form(state) != _form(self.state_dict()):
            raise CheckpointError(
                "a saved compression state does not fit the compression or the network of this run:"
                " resume with the settings of the saved run"
            )
        self.codec.load_state_dict(state["codec"])


class ErrorFeedback(Compressor):
    """Keeps what was not sent, so that over time all of it is."""

    def __init__(self, codec: Codec, size: int, device: torch.device) -> None:
        super().__init__(codec)
        self.residual = torch.zeros(size, device=device)
        """[P] what is owed."""
        self._corrected = torch.zeros(size, device=device)

    def corrected(self, gradient: Tensor) -> Tensor:
        """Return the gradient with the residual [P]."""
        return torch.add(self.residual, gradient, out=self._corrected)

    def sent(self, payload: Payload) -> None:
        """Keep the rest."""
        self.codec.add(payload, self._corrected, alpha=-1.0)
        self.residual, self._corrected = self._corrected, self.residual

    def state_dict(self) -> State:
        """Return residual and codec."""
        return {**super().state_dict(), "residual": self.residual.clone()}

    def load_state_dict(self, state: State) -> None:
        """Continue with the saved residual."""
        super().load_state_dict(state)
        self.residual.copy_(state["residual"])


class MomentumCorrection(ErrorFeedback):
    """Lets each value gather momentum while it waits, as it would have if all had been sent at once."""

    def __init__(self, codec: TopKCodec, momentum: float, size: int, device: torch.device) -> None:
        super().__init__(codec, size, device)
        self._topk, self._momentum = codec, momentum
        self._velocity = torch.zeros(size, device=device)
        self._faster = torch.zeros(size, device=device)

    def corrected(self, gradient: Tensor) -> Tensor:
        """Return the gradient with its momentum and the residual [P]."""
        return super().corrected(torch.add(gradient, self._velocity, alpha=self._momentum, out=self._faster))

    def sent(self, payload: Payload) -> None:
        """Keep the rest; a value that was sent starts again without momentum, which would be that of old gradients."""
        super().sent(payload)
        self._faster.index_fill_(0, self._topk.places(payload), 0.0)
        self._velocity, self._faster = self._faster, self._velocity

    def state_dict(self) -> State:
        """Return momentum, residual and codec."""
        return {**super().state_dict(), "velocity": self._velocity.clone()}

    def load_state_dict(self, state: State) -> None:
        """Continue with the saved momentum."""
        super().load_state_dict(state)
        self._velocity.copy_(state["velocity"])


def _form(state: State) -> State:
    """Return the names in a state, and the shape of each tensor."""
    return {
        name: _form(value) if isinstance(value, dict) else getattr(value, "shape", None)
        for name, value in state.items()
    }
