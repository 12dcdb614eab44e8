"""Small convolutions as matrix products over patches: what libraries do badly for few channels, a compiler can fuse."""

from __future__ import annotations

from types import MethodType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MOST_INPUTS = 16
"""Input channels above which the library's own kernels are the faster ones."""


def compute_by_products(network: nn.Module) -> None:
    """Let every plain convolution with few input channels be one matrix product; its weights stay where they are."""
    for module in network.modules():
        if type(module) is nn.Conv2d and module.in_channels <= MOST_INPUTS and module.groups == 1:
            module.forward = MethodType(_by_product, module)  # type: ignore[method-assign]


def _by_product(conv: nn.Conv2d, image: Tensor) -> Tensor:
    """Map [B, C, H, W] to [B, O, H', W'] as `conv` does."""
    if not torch.compiler.is_compiling():  # eager patches are one launch for each image
        return nn.Conv2d.forward(conv, image)
    patches = F.unfold(image, conv.kernel_size, conv.dilation, conv.padding, conv.stride)  # type: ignore[arg-type]
    rows = patches.transpose(1, 2)  # [B, positions, C * kernel area]
    outputs = F.linear(rows, conv.weight.flatten(1), conv.bias).transpose(1, 2)
    height = (image.shape[2] + 2 * int(conv.padding[0]) - conv.kernel_size[0]) // conv.stride[0] + 1
    return outputs.unflatten(2, (height, -1))  # type: ignore[no-untyped-call,no-any-return]
