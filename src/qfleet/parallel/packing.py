"""Packs weights for those who act, and unpacks them: in fewer bits, or as what has changed since a keyframe.

A delta is the largest parts of the way since the last keyframe, never since another delta. So whoever missed some, or
has just joined, needs no more than the keyframe and the newest delta, and all readers of a version have the same bits.
It is the true way, not the difference to the keyframe: that would mostly mend what int8 rounded, which matters little.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from qfleet.algo.flat import checksum
from qfleet.core.errors import QfleetError
from qfleet.core.packed import PackedWeights
from qfleet.core.role import State
from qfleet.core.types import Floats, Version, Weights
from qfleet.parallel.compression.blocks import Int8Codec
from qfleet.parallel.compression.codec import Codec, Payload, payload_bytes
from qfleet.parallel.compression.config import TopKConfig
from qfleet.parallel.compression.floats import HalfCodec
from qfleet.parallel.compression.gaps import GapCodec
from qfleet.parallel.packing_config import Bf16Weights, DeltaWeights, Int8Weights

_CPU = torch.device("cpu")
"""Weights are packed where they are sent from, and unpacked where they arrive: in main memory."""


def _make_codec(form: str, size: int, density: float = 1.0) -> Codec:
    """Return what writes and reads a form; `density` matters to who writes."""
    match form:
        case "bf16":
            return HalfCodec(torch.bfloat16)
        case "int8":
            return Int8Codec(size, _CPU)
        case "gaps":
            return GapCodec(TopKConfig(fraction=density, warmup=0), size, _CPU)
    raise ValueError(f"no form of weights is called '{form}'")


def packed_bytes(message: PackedWeights) -> int:
    """Return how many bytes the values of a message take."""
    return payload_bytes(message.payload) + message.buffers.nbytes


class Unpacker:
    """A reader: makes flat weights of messages, with the help of the last keyframe where they need one."""

    def __init__(self, size: int) -> None:
        """Read the weights of a network of `size` parameters."""
        self._size = size
        self._codecs: dict[str, Codec] = {}
        self.keyframe: PackedWeights | None = None
        """The keyframe that deltas are added to."""
        self._base = torch.zeros(0)

    def can_read(self, message: PackedWeights) -> bool:
        """Return whether the message needs no other keyframe than the last one."""
        return message.base is None or (self.keyframe is not None and message.base == self.keyframe.checksum)

    def remember(self, keyframe: PackedWeights) -> None:
        """Add deltas to this one from now on."""
        self._base, self.keyframe = torch.from_numpy(self.verified(keyframe)[: self._size]), keyframe

    def verified(self, message: PackedWeights) -> Floats:
        """Return the weights [P + Q] that a message brings, or raise an error if they are not those that were sent."""
        try:
            values = self.unpack(message)
        except (RuntimeError, IndexError, ValueError) as error:
            raise QfleetError(
                f"weights {message.version} arrived damaged: they cannot be unpacked ({error})"
            ) from error
        if checksum(values) != message.checksum:
            raise QfleetError(
                f"weights {message.version} arrived damaged: unpacked from '{message.form}' their checksum differs from"
                " that of the sender's copy. If it happens again, set learner.weights.kind to 'none'"
            )
        return values

    def unpack(self, message: PackedWeights) -> Floats:
        """Return the weights [P + Q] that a message brings, unchecked."""
        if message.form not in self._codecs:
            self._codecs[message.form] = _make_codec(message.form, self._size)
        values = np.zeros(self._size + len(message.buffers), np.float32)
        parameters = torch.from_numpy(values)[: self._size]
        if message.base is not None:
            parameters.copy_(self._base)
        self._codecs[message.form].add(message.payload, parameters)
        values[self._size :] = message.buffers
        return values


class Packer:
    """The sender: also a reader of what it sends, so that it has what all readers have, and can tell its checksum."""

    def __init__(self, config: Bf16Weights | Int8Weights | DeltaWeights, size: int) -> None:
        """Pack the weights of a network of `size` parameters."""
        self._size, self._delta = size, config if isinstance(config, DeltaWeights) else None
        self._form = config.kind if self._delta is None else "gaps"
        self._codec = _make_codec(self._form, size, 1.0 if self._delta is None else self._delta.density)
        self._reader = Unpacker(size)
        self._left = torch.zeros(0)
        """The parameters [P] at the last keyframe, before they were rounded."""
        self._since_keyframe = 0

    def pack(self, weights: Weights) -> tuple[PackedWeights | None, PackedWeights]:
        """Return a keyframe if readers will need another one, to be sent first, and the message of these weights."""
        parameters = torch.from_numpy(weights.flat[: self._size])
        if self._delta is None:
            return None, self._message(weights, self._form, self._codec.encode(parameters))
        keyframe = None
        if self._keyframe_due(weights.version, self._delta.keyframe_period):
            keyframe = self._message(weights, "int8", Int8Codec(self._size, _CPU).encode(parameters))
            self._reader.remember(keyframe)
            self._left, self._since_keyframe = parameters.clone(), 0
        self._since_keyframe += 1
        last = self._reader.keyframe
        assert last is not None
        payload = self._codec.encode(parameters - self._left)
        return keyframe, self._message(weights, self._form, payload, last.checksum)

    def _keyframe_due(self, version: Version, period: int) -> bool:
        """Return whether there is none, or the last one is old or a former life's: readers may have had a later one."""
        last = self._reader.keyframe
        return last is None or last.version.epoch != version.epoch or self._since_keyframe >= period

    def _message(self, weights: Weights, form: str, payload: Payload, base: int | None = None) -> PackedWeights:
        """Return what a payload says with the checksum of what readers will make of it."""
        message = PackedWeights(weights.version, form, payload, weights.flat[self._size :].copy(), 0, base)
        return dataclasses.replace(message, checksum=checksum(self._reader.unpack(message)))

    def state_dict(self) -> State:
        """Return what later messages depend on."""
        return {"keyframe": self._reader.keyframe, "left": self._left, "since_keyframe": self._since_keyframe}

    def load_state_dict(self, state: State) -> None:
        """Continue; a run that sent no keyframes before begins with one."""
        if state.get("keyframe") is not None:
            self._reader.remember(state["keyframe"])
            self._left, self._since_keyframe = state["left"], state["since_keyframe"]
