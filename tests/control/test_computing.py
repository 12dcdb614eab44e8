"""Who computes for the actors, said of runs without a plan, with flags that such a run can really have."""

from __future__ import annotations

from typing import Any

import pytest

from qfleet.control.computing import who_computes
from qfleet.experiment import Experiment, with_changes
from qfleet.presets import preset
from qfleet.presets.algorithms import apply

BOTH = "; --inference.kind adaptive or --plan auto would find out what is faster"
OWN = "each actor computes for itself (cpu)"


def run(algo: str = "dqn", placement: str = "processes", **changes: Any) -> Experiment:
    return with_changes(apply(preset("acrobot"), algo), {"placement": placement, "actors": 2, **changes})


def adaptive(**changes: Any) -> Experiment:
    return run(**{"inference.kind": "adaptive", **changes})


def test_it_is_said_of_every_kind_of_inference() -> None:
    assert who_computes(run(), "cpu") == f"local: {OWN}{BOTH}"
    served = run(**{"inference.kind": "served", "inference.servers": 2})
    assert who_computes(served, "cuda") == f"served: 2 servers compute for all actors (cuda){BOTH}"
    told = who_computes(adaptive(), "cpu")
    assert told.startswith(f"adaptive: {OWN} at first; the balancer finds out if the run is faster when 1 server ")


def test_adaptive_inference_of_a_resumed_run_is_where_it_was() -> None:
    served = "adaptive: 1 server computes for all actors (cuda) at first"
    assert who_computes(adaptive(), "cuda", served=True).startswith(served)
    assert who_computes(adaptive(**{"inference.begins": "served"}), "cuda").startswith(served)
    assert OWN in who_computes(adaptive(**{"inference.begins": "served"}), "cuda", served=False).partition(";")[0]


@pytest.mark.parametrize(
    ("experiment", "flags"),
    [
        (run(placement="ray"), ["--inference.kind adaptive"]),
        (run(balance="off"), ["--plan auto"]),
        (run(lockstep=True), []),
        (run("pqn", actors=1), []),
    ],
)
def test_only_flags_that_the_run_can_have_are_named(experiment: Experiment, flags: list[str]) -> None:
    told = who_computes(experiment, "cpu")
    assert told.startswith(f"local: {OWN}")
    assert [flag for flag in ("--inference.kind adaptive", "--plan auto") if flag in told] == flags


def test_nothing_is_said_where_roles_are_in_one_process() -> None:
    assert who_computes(run(placement="inline", topology="pipeline"), "cpu") == ""
    assert who_computes(preset("cartpole"), "cpu") == ""
