"""Repairs Triton's interpreter, which multiplies the bit patterns of bfloat16 matrices and rounds towards zero."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch


@pytest.fixture(autouse=True)
def _bfloat16_products(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        return
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    plain_dot, plain_cast = InterpreterBuilder.create_dot, InterpreterBuilder.create_fp_trunc

    def widened(handle: Any) -> Any:
        if handle.dtype != tl.bfloat16:
            return handle
        return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return plain_dot(self, widened(a), widened(b), *rest)

    def create_fp_trunc(self: Any, source: Any, kind: Any) -> Any:
        if kind.scalar != tl.bfloat16:
            return plain_cast(self, source, kind)
        rounded = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16()
        return TensorHandle(rounded.view(torch.uint16).numpy(), tl.bfloat16)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
    monkeypatch.setattr(InterpreterBuilder, "create_fp_trunc", create_fp_trunc)
