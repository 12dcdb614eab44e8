"""Repairs Triton's interpreter, which multiplies the bit patterns of bfloat16 matrices and rounds towards zero.

It also does what tensor cores do to float32 in the form "tf32", and the interpreter does not: drop all but 10 bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch


@pytest.fixture(autouse=True)
def _rounded_products(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        return
    import triton.language as tl
    from triton._C.libtriton import ir
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    plain_dot, plain_cast = InterpreterBuilder.create_dot, InterpreterBuilder.create_fp_trunc

    def multiplied(handle: Any, form: Any) -> Any:
        """Return the numbers that are multiplied, as float32."""
        if handle.dtype == tl.bfloat16:
            return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)
        if form == ir.INPUT_PRECISION.TF32:
            kept = np.ascontiguousarray(handle.data).view(np.uint32) & np.uint32(0xFFFFE000)
            return TensorHandle(kept.view(np.float32), tl.float32)
        return handle

    def create_dot(self: Any, a: Any, b: Any, d: Any, form: Any, *rest: Any) -> Any:
        return plain_dot(self, multiplied(a, form), multiplied(b, form), d, form, *rest)

    def create_fp_trunc(self: Any, source: Any, kind: Any) -> Any:
        if kind.scalar != tl.bfloat16:
            return plain_cast(self, source, kind)
        rounded = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16()
        return TensorHandle(rounded.view(torch.uint16).numpy(), tl.bfloat16)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
    monkeypatch.setattr(InterpreterBuilder, "create_fp_trunc", create_fp_trunc)
