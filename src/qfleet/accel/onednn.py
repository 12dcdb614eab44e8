"""Large dense layers on a CPU by oneDNN, which may be twice as fast there as the BLAS that torch takes for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from qfleet.accel.config import AccelConfig

LEAST = 1 << 22
"""Multiplications of a product below which calling oneDNN costs more than it saves.

Seen on one core of an AMD EPYC (Zen 5) in float32: 1.3 times as fast as MKL at 2M, 1.8 at 8M, 2.1 at 50M.
"""
ROWS = 512
"""Layers whose products are smaller even for so many rows stay as they are."""


def compute_by_onednn(network: nn.Module, accel: AccelConfig, foreign: bool) -> bool:
    """Let plain dense layers compute large float32 products by oneDNN, where torch has it; their weights stay put.

    Returns whether there is any layer that may have such products. `foreign` networks are left as they are: nobody
    knows what else is done with their layers.
    """
    there = torch._C._has_mkldnn and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    if foreign or not there or accel.kernels == "off":
        return False
    layers = [module for module in network.modules() if type(module) is nn.Linear]
    large = [layer for layer in layers if ROWS * layer.weight.numel() >= LEAST]
    for layer in large:
        layer.__class__ = OneDnnLinear
    return bool(large)


class OneDnnLinear(nn.Linear):
    """A dense layer whose large products are oneDNN's."""

    def forward(self, input: Tensor) -> Tensor:
        """Map [..., I] to [..., O]."""
        small = input.dim() != 2 or len(input) * self.weight.numel() < LEAST
        elsewhere = input.dtype != torch.float32 or input.device.type != "cpu"
        if small or elsewhere or torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling():
            return super().forward(input)
        return _Dense.apply(input, self.weight, self.bias)  # type: ignore[no-untyped-call,no-any-return]


class _Dense(torch.autograd.Function):
    """A dense layer and its gradient, each of the three products by oneDNN."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return _product(rows, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        (outputs,), (rows, weight) = gradients, ctx.saved_tensors
        of_rows, of_weight, of_bias = ctx.needs_input_grad
        # Grad mode is on where somebody wants to differentiate the gradient, which torch cannot through oneDNN's.
        product = nn.functional.linear if torch.is_grad_enabled() else _product
        return (
            product(outputs, weight.t()) if of_rows else None,
            product(outputs.t(), rows.t()) if of_weight else None,
            outputs.sum(0) if of_bias else None,
        )


def _product(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return rows [B, I] times the transposed weight [O, I], and the bias [O]."""
    return torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")  # type: ignore[no-any-return]
