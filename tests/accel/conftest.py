"""Lets the kernels run on the CPU, by Triton's interpreter, where there is no CUDA device; else on that device."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is first imported


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Count the tests of this folder to those of a GPU where there is one: they run on it."""
    if torch.cuda.is_available():
        for item in items:
            if item.path.parent == Path(__file__).parent:
                item.add_marker("gpu")


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the kernels run."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


# What kernels are compared with must not be rounded itself: by default cuDNN rounds float32 convolutions to 10 bits.
torch.backends.cudnn.allow_tf32 = False
torch.set_float32_matmul_precision("highest")
