"""Lets the kernels run on the CPU, by Triton's interpreter, where there is no CUDA device."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is first imported


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the kernels run."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


# What kernels are compared with must not be rounded itself: by default cuDNN rounds float32 convolutions to 10 bits.
torch.backends.cudnn.allow_tf32 = False
torch.set_float32_matmul_precision("highest")
