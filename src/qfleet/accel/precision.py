"""Number formats of the network's matrix products; weights, losses and optimiser stay float32."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch

Precision = Literal["fp32", "tf32", "bf16"]


def set_matrix_format(precision: Precision) -> None:
    """Let float32 products on this process's GPU be rounded to 10 bits (tf32), or not (fp32)."""
    torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")
    torch.backends.cudnn.allow_tf32 = precision != "fp32"


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """Return the context in which a network's products are computed in this format."""
    if precision == "bf16":
        return torch.autocast(device.type, torch.bfloat16)
    return nullcontext()
