"""Number formats of the network's matrix products; weights, losses and optimiser stay float32."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, get_args

import torch
from torch import Tensor

Precision = Literal["fp32", "tf32", "bf16", "fp16"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
"""All formats, the plainest first."""
ROUNDED: dict[Precision, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Formats in which a network's outputs between layers are kept too."""
SMALLEST, LARGEST = 1.0, 2.0**24
"""Bounds of a loss scale."""

_before: list[tuple[bool, bool, bool, bool]] = []
"""The process's switches before it was made deterministic, once it is."""


def set_matrix_format(precision: Precision) -> None:
    """Let float32 products on this process's GPU be rounded to 10 bits (tf32), or not (fp32)."""
    torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")
    torch.backends.cudnn.allow_tf32 = precision != "fp32"


def set_deterministic(wanted: bool) -> None:
    """Let this process's GPU use only operations that give the same bits every time, or again what it used before."""
    cudnn, memory = torch.backends.cudnn, torch.utils.deterministic
    if wanted:
        if not _before:
            enabled = torch.are_deterministic_algorithms_enabled()
            filled: bool = memory.fill_uninitialized_memory  # type: ignore[attr-defined]
            _before.append((enabled, cudnn.deterministic, cudnn.benchmark, filled))
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS has no other switch
        torch.use_deterministic_algorithms(True)
        # Nobody here reads what was never written, so it need not be filled.
        memory.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        cudnn.deterministic, cudnn.benchmark = True, False
    elif _before:
        enabled, cudnn.deterministic, cudnn.benchmark, filled = _before.pop()
        torch.use_deterministic_algorithms(enabled)
        memory.fill_uninitialized_memory = filled  # type: ignore[attr-defined]


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """Return the context in which a network's products are computed in this format."""
    if precision in ROUNDED:
        return torch.autocast(device.type, ROUNDED[precision])
    return nullcontext()


class LossScale:
    """What float16 losses are multiplied by, so that small gradients do not become 0; all of it is on the device.

    It is halved when a gradient is not finite though its loss is, and doubled after many good steps.
    """

    value: Tensor
    """The scale, a scalar."""
    good: Tensor
    """Good steps since it last changed or a step was left out, a scalar int32."""
    overflows: Tensor
    """Steps left out since `take_overflows` for which the scale is to blame, a scalar int64."""

    def __init__(self, device: torch.device, initial: float = 2.0**16, interval: int = 2000) -> None:
        """Begin with the scale `initial`; it is doubled after `interval` good steps."""
        self.interval = interval
        self.value = torch.full((), initial, device=device)
        self.good = torch.zeros((), dtype=torch.int32, device=device)
        self.overflows = torch.zeros((), dtype=torch.int64, device=device)

    def adapt(self, made: bool, loss: Tensor) -> None:
        """Take in whether the step of a scalar loss was made."""
        if made:
            self.good.add_(1)
            due = self.good == self.interval
            self.value.copy_(torch.where(due, (self.value * 2).clamp_(max=LARGEST), self.value))
            self.good.mul_(~due)
            return
        finite = loss.isfinite()
        self.overflows.add_(finite & (self.value > SMALLEST))
        self.value.copy_(torch.where(finite, (self.value / 2).clamp_(min=SMALLEST), self.value))
        self.good.zero_()

    def take_overflows(self) -> int:
        """Return how many steps since the last call were left out because of the scale alone. Waits for the device.

        Where the scale can fall no further it is not to blame.
        """
        count = int(self.overflows.item())
        self.overflows.zero_()
        return count

    def state_dict(self) -> dict[str, Any]:
        """Return the scale and its count of good steps. Waits for the device."""
        return {"value": float(self.value.item()), "good": int(self.good.item())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        self.value.fill_(state["value"])
        self.good.fill_(state["good"])
