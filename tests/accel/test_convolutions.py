from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from qfleet.accel.convolutions import MOST_INPUTS, compute_by_products


@pytest.mark.parametrize(("kernel", "stride", "padding"), [(3, 1, 1), (3, 1, 0), (4, 2, 0), (5, 2, 2), (1, 1, 0)])
def test_products_over_patches_equal_the_convolution_and_its_gradients(kernel, stride, padding):
    torch.manual_seed(0)
    conv = nn.Conv2d(4, 6, kernel, stride=stride, padding=padding)
    ours = copy.deepcopy(conv)
    compute_by_products(ours)
    results = []
    for layer in (conv, ours, copy.deepcopy(ours)):
        image = torch.randn(3, 4, 10, 9, generator=torch.Generator().manual_seed(1), requires_grad=True)
        output = layer(image)
        output.square().sum().backward()
        results.append((output, image.grad, layer.weight.grad, layer.bias.grad))
    for other in results[1:]:
        for value, expected in zip(other, results[0], strict=True):
            torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-4)


def test_a_copy_computes_with_its_own_weights():
    conv = nn.Conv2d(2, 2, 3)
    compute_by_products(conv)
    other = copy.deepcopy(conv)
    with torch.no_grad():
        other.weight.zero_()
        other.bias.zero_()
    assert other(torch.ones(1, 2, 5, 5)).abs().sum() == 0
    assert conv(torch.ones(1, 2, 5, 5)).abs().sum() > 0


def test_wide_convolutions_are_left_to_the_library():
    conv = nn.Conv2d(MOST_INPUTS + 1, 2, 3)
    compute_by_products(conv)
    assert "forward" not in vars(conv)
