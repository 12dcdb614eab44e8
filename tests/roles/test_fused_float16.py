"""A fused run in float16: a loss scale that does not fit yet does not end it, what is not a number does."""

from __future__ import annotations

import pytest
import torch
from role_cases import Edge

from qfleet.accel import choices
from qfleet.accel.hardware import Hardware
from qfleet.control.candidates import format_put_back
from qfleet.core.errors import QfleetError
from qfleet.core.usercode import UserCode
from qfleet.envs import env_spec
from qfleet.experiment import with_changes
from qfleet.presets import preset
from qfleet.presets.algorithms import apply
from qfleet.roles.fused import Fused, FusedHandles
from qfleet.setups import fused_setup


@pytest.fixture(params=["dqn", "pqn"])
def fused(request, monkeypatch):
    """A loop that takes this CPU for a GPU, one update a piece at first, with a loss scale that is far too large."""
    monkeypatch.setattr(choices, "look", lambda device: Hardware("cuda", "some GPU", (9, 0)))
    changes = {"network.hidden": [16], "device": "cpu", "accel.precision": "fp16", "accel.kernels": "off"}
    changes |= {"accel.compile": "off", "learner.learning_starts": 64, "evaluation.every": 10**6}
    changes |= (
        {"learner.train_period": 512.0} if request.param == "dqn" else {"agent.epochs": 1, "agent.minibatches": 1}
    )
    experiment = with_changes(apply(preset("cartpole"), request.param), {**changes, "env_steps": 10**5})
    setup = fused_setup(experiment, env_spec(experiment.env), UserCode())
    edges = {name: Edge() for name in ("events", "env_steps", "updates", "samples")}
    with format_put_back():
        role = Fused(setup, FusedHandles(**edges))
        role._loop.choices.scale.value.fill_(2.0**24)
        yield role, edges


def steps(role: Fused, count: int) -> None:
    for _ in range(count):
        role.step()


def test_skips_for_which_the_loss_scale_is_to_blame_do_not_stop_the_run(fused):
    role, edges = fused
    steps(role, 40)
    skipped = role.metrics()["skipped_updates"]
    assert skipped > 3  # as many as would stop it
    assert edges["updates"].count > 5
    assert "skipped_update" in [notice.kind for notice in edges["events"].queue]


def test_updates_that_are_not_a_number_stop_the_run(fused):
    role, _ = fused
    with torch.no_grad():
        role._loop.update.flat.parameters.fill_(torch.nan)
    with pytest.raises(QfleetError, match="updates in a row were not finite"):
        steps(role, 40)
