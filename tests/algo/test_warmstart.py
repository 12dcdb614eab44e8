"""A warm start copies what fits, says what did not, and never pretends."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from qfleet.algo.flat import FlatParameters, checksum
from qfleet.algo.warmstart import warm_start
from qfleet.core.errors import ConfigError


class Net(nn.Module):
    def __init__(self, actions: int = 2, width: int = 4, extra: bool = False) -> None:
        super().__init__()
        self.torso = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width))
        self.head = nn.Linear(width, actions)
        if extra:
            self.value = nn.Linear(width, 1)


def test_everything_is_copied_from_an_equal_network() -> None:
    source, target = Net(), Net()
    source.torso[1].num_batches_tracked.fill_(7)
    report = warm_start(target, source.state_dict(), "all")
    assert all(torch.equal(a, target.state_dict()[name]) for name, a in source.state_dict().items())
    assert set(report.matched) == set(source.state_dict())
    assert report.missing == report.wrong_shape == report.unused == ()
    assert str(report) == "warm start: 9 of 9 tensors copied"


def test_the_report_names_what_did_not_fit() -> None:
    source, target = Net(actions=2), Net(actions=3, extra=True)
    tensors = {**source.state_dict(), "old.weight": torch.zeros(1)}
    head = target.head.weight.detach().clone()
    report = warm_start(target, tensors, "all")
    assert report.missing == ("value.weight", "value.bias")
    assert report.wrong_shape == (
        "head.weight: [2, 4] in the model, [3, 4] in the network",
        "head.bias: [2] in the model, [3] in the network",
    )
    assert report.unused == ("old.weight",)
    assert torch.equal(target.head.weight, head)
    assert torch.equal(target.torso[0].weight, source.torso[0].weight)
    text = str(report)
    assert text.startswith("warm start: 7 of 11 tensors copied")
    for name in ("value.weight", "head.bias: [2]", "old.weight"):
        assert name in text


def test_the_torso_alone_leaves_the_head() -> None:
    source, target = Net(), Net()
    head = target.head.weight.detach().clone()
    report = warm_start(target, source.state_dict(), "torso")
    assert all(name.startswith("torso.") for name in report.matched)
    assert report.missing == report.unused == ()
    assert torch.equal(target.head.weight, head)
    assert torch.equal(target.torso[0].weight, source.torso[0].weight)


@pytest.mark.parametrize("part", ["all", "torso"])
def test_nothing_that_fits_is_an_error_and_changes_nothing(part: str) -> None:
    target = Net(width=4)
    before = checksum(FlatParameters(target).to_numpy())
    with pytest.raises(ConfigError, match=rf"(?s)part '{part}'.*wrong shape: torso\.0\.weight"):
        warm_start(target, {"torso.0.weight": torch.zeros(8, 3), "unrelated": torch.zeros(1)}, part)
    assert checksum(FlatParameters(target).to_numpy()) == before


def test_a_warm_start_writes_into_the_flat_buffer() -> None:
    source, target = Net(), Net()
    flat = FlatParameters(target)
    warm_start(target, source.state_dict(), "all")
    assert checksum(flat.to_numpy()) == checksum(FlatParameters(source).to_numpy())
