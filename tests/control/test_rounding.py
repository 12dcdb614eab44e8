"""Actors compute in fewer bits where that was measured to pay, and nowhere else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from plan_cases import US, experiment, measurements, resources

from qfleet.control.measurements import Measurements, at
from qfleet.control.plan import Plan
from qfleet.control.planner import make_plan
from qfleet.control.rounding import PRECISION, in_bf16, may_round
from qfleet.core.usercode import UserCode
from qfleet.experiment import Experiment
from qfleet.planning import apply_plan
from qfleet.presets import preset
from qfleet.presets.algorithms import apply


def rounding(times: float, act: float = 300 * US) -> Measurements:
    """Return costs of actors whose network takes so many times less in bf16."""
    measured = measurements(env=50 * US, act=act, learner=10 * US)
    return measured.replace(act_bf16=tuple((size, seconds / times) for size, seconds in measured.act))


def planned(measured: Measurements, run: Experiment | None = None, *fixed: str) -> Plan:
    return make_plan(run or experiment(), measured, resources(8), {"placement", *fixed})


def test_bf16_is_taken_where_it_pays_and_the_rate_follows() -> None:
    fast, plain = planned(rounding(2.0)), planned(rounding(1.0))
    assert fast.settings[PRECISION] == "bf16"
    assert "in fp32" in fast.reasons[PRECISION]
    assert apply_plan(experiment(), fast).inference.precision == "bf16"
    assert (fast.env_steps_per_s or 0) > 1.3 * (plain.env_steps_per_s or 0)
    assert fast.measurements == rounding(2.0), "what was measured is kept as it is"


@pytest.mark.parametrize("times", [1.05, 1.0, 0.1])
def test_where_it_gains_little_or_loses_fp32_stays(times: float) -> None:
    plan = planned(rounding(times))
    assert PRECISION not in plan.settings
    assert plan.env_steps_per_s == planned(rounding(1.0)).env_steps_per_s


@pytest.mark.parametrize("fixed", [(PRECISION,), ()])
def test_what_was_asked_for_stays(fixed: tuple[str, ...]) -> None:
    run = experiment() if fixed else experiment(lockstep=True)
    assert PRECISION not in planned(rounding(2.0), run, *fixed).settings


def test_bf16_that_was_asked_for_is_predicted_as_slow_as_it_is() -> None:
    slow = planned(rounding(0.2), experiment(**{PRECISION: "bf16"}), PRECISION)
    assert (slow.env_steps_per_s or 0) < 0.5 * (planned(rounding(0.2)).env_steps_per_s or 0)


def test_a_tick_changes_by_what_its_network_gains() -> None:
    measured = rounding(3.0)
    rounded = in_bf16(measured)
    for size, _ in measured.actor_tick:
        gained = at(measured.act, size) - at(measured.act_bf16, size)
        assert at(rounded.actor_tick, size) == pytest.approx(at(measured.actor_tick, size) - gained)
    assert in_bf16(measurements()) == measurements()


class Own(torch.nn.Module):
    """A network of one's own."""


@pytest.mark.parametrize(
    ("algo", "code", "may"),
    [
        ("dqn", UserCode(), True),
        ("pqn", UserCode(), True),
        ("r2d2", UserCode(), False),
        ("dqn", UserCode(network=Own), False),
    ],
)
def test_memory_and_networks_of_ones_own_are_never_rounded(algo: str, code: Any, may: bool) -> None:
    assert may_round(apply(preset("mountaincar"), algo), code) == may


def test_what_is_chosen_is_what_the_reason_says() -> None:
    slower = planned(rounding(0.5), experiment(**{PRECISION: "bf16"}))
    assert slower.settings[PRECISION] == "fp32"
    assert slower.reasons[PRECISION].startswith("fp32: ")
    assert planned(rounding(2.0)).reasons[PRECISION].startswith("bf16: ")


def test_inline_acts_in_the_format_that_was_asked_for_too() -> None:
    asked = experiment(**{PRECISION: "bf16"})
    slow, fast = (make_plan(asked, rounding(times), resources(8), {PRECISION}).placements for times in (0.2, 4.0))
    assert fast["inline"] > 1.2 * slow["inline"]
