"""Schedules against torch's own, and the promises that exploration relies on."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, ReduceLROnPlateau

from qfleet.algo.schedules import (
    ConstantRateConfig,
    CosineRateConfig,
    LearningRate,
    LinearRateConfig,
    PlateauRateConfig,
    RateConfig,
    Schedule,
)
from qfleet.core.codec import roundtrip
from qfleet.core.errors import ConfigError


def torch_optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)


@pytest.mark.parametrize(
    ("config", "scheduler", "options"),
    [
        (LinearRateConfig(updates=20, end=0.1), LinearLR, {"start_factor": 1.0, "end_factor": 0.1, "total_iters": 20}),
        (CosineRateConfig(updates=20, end=0.1), CosineAnnealingLR, {"T_max": 20, "eta_min": 0.1}),
    ],
)
def test_decay_equals_torch(config: RateConfig, scheduler: type, options: dict[str, float]) -> None:
    rate, optimizer = LearningRate(config, None), torch_optimizer()
    oracle = scheduler(optimizer, **options)
    for update in range(21):
        assert rate.fraction(update) == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-9)
        optimizer.step()
        oracle.step()
    assert rate.fraction(10**9) == pytest.approx(0.1)


def test_warmup_goes_before_any_schedule() -> None:
    for config in (
        ConstantRateConfig(warmup=4),
        LinearRateConfig(warmup=4, updates=10),
        CosineRateConfig(warmup=4, updates=10),
        PlateauRateConfig(warmup=4),
    ):
        warm, plain = LearningRate(config, None), LearningRate(config.replace(warmup=0), None)
        assert [warm.fraction(i) for i in range(4)] == [0.25, 0.5, 0.75, 1.0]
        assert [warm.fraction(4 + i) for i in range(12)] == [plain.fraction(i) for i in range(12)]


def test_decay_takes_the_whole_run_unless_told() -> None:
    rate = LearningRate(LinearRateConfig(warmup=100), total_updates=300)
    assert rate.fraction(200) == pytest.approx(0.5)
    assert rate.fraction(300) == 0.0


@pytest.mark.parametrize("total", [None, 100])
def test_decay_without_an_end_is_refused(total: int | None) -> None:
    with pytest.raises(ConfigError, match="set its 'updates'"):
        LearningRate(CosineRateConfig(warmup=100), total)


@settings(deadline=None, max_examples=60)
@given(
    scores=st.lists(st.integers(0, 6), max_size=40),
    patience=st.integers(1, 4),
    cooldown=st.integers(0, 3),
    margin=st.sampled_from([0.0, 1.5]),
)
def test_plateau_equals_torch(scores: list[int], patience: int, cooldown: int, margin: float) -> None:
    config = PlateauRateConfig(patience=patience, cooldown=cooldown, margin=margin, floor=0.1)
    rate, optimizer = LearningRate(config, None), torch_optimizer()
    oracle = ReduceLROnPlateau(
        optimizer,
        mode="max",
        factor=0.5,
        patience=patience - 1,  # torch counts the evaluations that it tolerates
        cooldown=cooldown,
        threshold=margin,
        threshold_mode="abs",
        min_lr=0.1,
    )
    for score in scores:
        rate.score(float(score))
        oracle.step(float(score))
        assert rate.fraction(0) == pytest.approx(optimizer.param_groups[0]["lr"])


def test_plateau_takes_nan_for_no_improvement() -> None:
    rate = LearningRate(PlateauRateConfig(patience=2), None)
    for score in (math.nan, math.nan):
        rate.score(score)
    assert rate.fraction(0) == 0.5


@settings(deadline=None, max_examples=30)
@given(scores=st.lists(st.integers(0, 4), min_size=10, max_size=20))
def test_trap_15_plateau_resumes_exactly_from_every_evaluation(scores: list[int]) -> None:
    config = PlateauRateConfig(patience=2, cooldown=1)
    uncut = LearningRate(config, None)
    states, fractions = [], []
    for score in scores:
        states.append(roundtrip(uncut.state_dict()))
        uncut.score(float(score))
        fractions.append(uncut.fraction(0))
    for cut, state in enumerate(states):
        resumed = LearningRate(config, None)
        resumed.load_state_dict(state)
        for score, fraction in zip(scores[cut:], fractions[cut:], strict=True):
            resumed.score(float(score))
            assert resumed.fraction(0) == fraction


def test_schedules_are_chosen_by_kind_and_refuse_nonsense() -> None:
    adapter: TypeAdapter[RateConfig] = TypeAdapter(RateConfig)
    assert adapter.validate_python({"kind": "cosine", "updates": 5}) == CosineRateConfig(updates=5)
    for bad in (
        {"kind": "cosin"},
        {"kind": "linear", "end": 2},
        {"kind": "plateau", "cut": 1},
        {"kind": "constant", "x": 1},
    ):
        with pytest.raises(ValidationError):
            adapter.validate_python(bad)


@pytest.mark.parametrize("shape", ["linear", "exponential"])
def test_trap_8_a_schedule_moves_all_the_way_and_stays(shape: str) -> None:
    schedule = Schedule(start=1.0, end=0.01, steps=1000, shape=shape)
    values = [schedule.at(step) for step in range(0, 1001, 100)]
    assert values[0] == 1.0
    assert values[-1] == 0.01
    assert all(a > b for a, b in itertools.pairwise(values))
    assert schedule.at(10**9) == 0.01
    middle = {"linear": 0.505, "exponential": 0.1}
    assert values[5] == pytest.approx(middle[shape])


def test_a_schedule_may_rise_or_stay() -> None:
    assert Schedule(start=0.4, end=1.0, steps=10).at(5) == pytest.approx(0.7)
    assert [Schedule(start=0.4).at(step) for step in (0, 1, 10**9)] == [0.4] * 3


def test_an_exponential_schedule_to_zero_is_refused() -> None:
    with pytest.raises(ValidationError, match="above 0"):
        Schedule(start=1.0, end=0.0, shape="exponential")


@settings(deadline=None, max_examples=60)
@given(
    start=st.floats(0.01, 1), end=st.floats(0.01, 1), steps=st.integers(1, 10**7), at=st.integers(0, 2 * 10**7),
    shape=st.sampled_from(["linear", "exponential"]),
)  # fmt: skip
def test_a_schedule_stays_between_its_ends(start: float, end: float, steps: int, at: int, shape: str) -> None:
    value = Schedule(start=start, end=end, steps=steps, shape=shape).at(at)
    assert min(start, end) * (1 - 1e-12) <= value <= max(start, end) * (1 + 1e-12)
