"""Lets the kernels run on the CPU, by Triton's interpreter, where there is no CUDA device; else on that device."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from qfleet.control.candidates import format_put_back

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


@pytest.fixture
def switches_put_back() -> Iterator[None]:
    """Put back what `accel.deterministic` changes for the whole process."""
    cudnn, filled = torch.backends.cudnn, torch.utils.deterministic.fill_uninitialized_memory
    before = torch.are_deterministic_algorithms_enabled(), cudnn.deterministic, cudnn.benchmark
    with format_put_back():
        yield
    torch.use_deterministic_algorithms(before[0])
    cudnn.deterministic, cudnn.benchmark = before[1:]
    torch.utils.deterministic.fill_uninitialized_memory = filled
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


# What kernels are compared with must not be rounded itself: by default cuDNN rounds float32 convolutions to 10 bits.
torch.backends.cudnn.allow_tf32 = False
torch.set_float32_matmul_precision("highest")
