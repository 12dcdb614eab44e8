"""Whether the Triton kernels of this package can run here, and what they ask of tensors."""

from __future__ import annotations

import importlib.util
import os

import torch
from torch import Tensor


def available() -> bool:
    """Return whether Triton is installed and has a CUDA device, or runs by its interpreter (TRITON_INTERPRET=1)."""
    if importlib.util.find_spec("triton") is None:
        return False
    return torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"


def require_dense(*tensors: Tensor) -> None:
    """Raise ValueError for a tensor with gaps: a kernel is told only where a tensor begins."""
    for tensor in tensors:
        if not tensor.is_contiguous():
            raise ValueError(f"kernels need contiguous tensors, not strides {tensor.stride()} of {tuple(tensor.shape)}")
