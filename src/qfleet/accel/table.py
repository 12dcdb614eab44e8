"""The shipped table: settings that are good on a kind of hardware, for runs that were never probed."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from qfleet.accel.hardware import ROUNDED, Hardware
from qfleet.accel.precision import Precision
from qfleet.core.config import Config

Inputs = Literal["vectors", "images", "frames"]
"""What a network sees; frames are images of at least `LARGE` rows and columns."""
LARGE = 32


class Settings(Config):
    """How updates are computed, with nothing left open."""

    precision: Precision = "fp32"
    """Number format of the network's matrix products."""
    compile: bool = False
    """Whether torch.compile fuses the loss and its gradient."""
    graphs: bool = False
    """Whether the loop is recorded as CUDA graphs."""
    graph_updates: int = Field(default=0, ge=0, le=4096)
    """Updates in one recording; 0 leaves it to the loop."""
    kernels: bool = False
    """Whether our own kernels are used: Triton's on a GPU, hand-written small networks on a CPU."""
    channels_last: bool = False
    """Whether images lie with their channels last."""

    def words(self, kind: str) -> str:
        """Return the settings on a kind of device, for a person."""
        said = {
            "compiled": self.compile,
            "hand-written small network" if kind == "cpu" else "own kernels": self.kernels,
            "recorded": self.graphs,
            f"{self.graph_updates} updates each": self.graphs and self.graph_updates > 0,
            "channels last": self.channels_last,
        }
        used = [word for word, true in said.items() if true]
        return ", ".join([self.precision, *(used or ["eager"])])


EAGER = Settings()
"""What works everywhere."""
_RECORDED = {"kernels": True, "graphs": True}
# Channels last, one core learns from 32 frames in 15 ms in place of 18 (Nature network), and in 390 in place of 560
# (IMPALA's; `benchmarks/cpu_frames.py`); from smaller images no faster. Others' networks may not expect such images.
_ON_CPU: dict[Inputs, Settings] = {
    "vectors": Settings(kernels=True),
    "images": Settings(kernels=True),
    "frames": Settings(kernels=True, channels_last=True),
}
_ON_CUDA: dict[Literal["rollout", "replay"], dict[Inputs, Settings]] = {
    # PQN on an H200, learned steps a second: 13.9 M (CartPole) against 9.6 M recorded in fp32 without compile,
    # 2.48 M (MinAtar) against 1.19 M. bf16 without compile gains nothing over tf32. Compiling takes 3 to 8 s.
    "rollout": {
        "vectors": Settings(precision="tf32", compile=True, **_RECORDED),
        "images": Settings(precision="bf16", compile=True, **_RECORDED),
        "frames": Settings(precision="bf16", compile=True, **_RECORDED),
    },
    # In bf16 the Nature network's own kernels take 0.5 ms for an update of 1,024, where torch takes 4.3 ms in tf32.
    "replay": {
        "vectors": Settings(precision="tf32", **_RECORDED),
        "images": Settings(precision="bf16", **_RECORDED),
        "frames": Settings(precision="bf16", **_RECORDED),
    },
}


def shipped(hardware: Hardware, agent: Literal["rollout", "replay"], inputs: Inputs) -> tuple[Settings, str]:
    """Return the settings for a kind of agent and of observation on this hardware, and where they come from."""
    if hardware.kind == "cpu":
        return _ON_CPU[inputs], "shipped table for CPUs"
    if hardware.kind == "cuda" and hardware.capability >= ROUNDED:
        major, minor = hardware.capability
        return _ON_CUDA[agent][inputs], f"shipped table for NVIDIA compute capability {major}.{minor}"
    return EAGER, "no shipped settings for this device: plain eager"
