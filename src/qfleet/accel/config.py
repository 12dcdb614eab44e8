"""The settings of how an update is computed; what it computes is the same for all of them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from qfleet.core.config import Config


class AccelConfig(Config):
    """How updates are made fast. "auto" takes what was measured best on this kind of hardware; see `qfleet probe`."""

    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16"] = "auto"
    """Number format of the network's matrix products; weights, losses and optimiser are always float32.
    fp16 comes with a loss scale that adapts."""
    graphs: Literal["auto", "off", "on"] = "auto"
    """Record the loop once as a CUDA graph and replay it, so that the device never waits for Python."""
    graph_updates: int = Field(default=0, ge=0, le=4096)
    """Updates in one recording; 0 chooses."""
    compile: Literal["auto", "off", "on"] = "auto"
    """Let torch.compile fuse operations: long to start, shorter afterwards."""
    kernels: Literal["auto", "off", "on"] = "auto"
    """Use qfleet's own kernels where they fit: Triton's on a GPU, on a CPU hand-written small networks; and oneDNN for
    the large dense layers of other networks there."""
    channels_last: Literal["auto", "off", "on"] = "auto"
    """Keep images with their channels last, as the fastest convolutions want them."""
    deterministic: bool = False
    """On a GPU use only operations that give the same bits every time, for exact resume there: slower, not compiled."""
