"""`accel.deterministic`: what it switches on for a GPU, and that a CPU needs none of it."""

from __future__ import annotations

import os

import pytest
import torch

from qfleet.accel import choices
from qfleet.accel.choices import Job
from qfleet.accel.choose import workload
from qfleet.accel.config import AccelConfig
from qfleet.accel.hardware import Hardware
from qfleet.algo.agent import RolloutAgent
from qfleet.algo.networks import build_network
from qfleet.algo.optim import AdamConfig
from qfleet.algo.torsos import MlpConfig
from qfleet.core.spec import PLAIN, EnvSpec, LeafSpec
from qfleet.core.usercode import UserCode

SPEC = EnvSpec(name="vector", observations={PLAIN: LeafSpec(shape=(4,), dtype="float32")}, actions=3)
AGENT, OPTIM = RolloutAgent(), AdamConfig()


@pytest.fixture(autouse=True)
def _as_if_on_a_gpu(monkeypatch, switches_put_back):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(choices.steps, "supports", lambda optim, device: True)


def chosen(device: str, wanted: bool) -> choices.Choices:
    """Choose for a device of this kind; nothing is computed on it."""
    network = build_network(MlpConfig(hidden=(8,)), AGENT, SPEC, 0)
    work = workload(AGENT, MlpConfig(), OPTIM, SPEC, UserCode())
    return choices.choose(Job(AccelConfig(deterministic=wanted), AGENT, OPTIM, torch.device(device), work), network)


@pytest.mark.parametrize("wanted", [False, True])
def test_on_a_gpu_it_excludes_what_may_give_other_bits(monkeypatch, wanted):
    monkeypatch.setattr(choices, "look", lambda device: Hardware("cuda", "some GPU", (9, 0)))
    found = chosen("cuda", wanted)
    assert torch.are_deterministic_algorithms_enabled() == wanted
    assert torch.backends.cudnn.deterministic == wanted
    assert ("CUBLAS_WORKSPACE_CONFIG" in os.environ) == wanted
    assert found.settings.compile != wanted
    assert ("compile off: accel.deterministic is set" in found.description) == wanted
    assert found.recorded


def test_a_cpu_gives_the_same_bits_anyway():
    assert chosen("cpu", True).settings == chosen("cpu", False).settings
    assert not torch.are_deterministic_algorithms_enabled()
