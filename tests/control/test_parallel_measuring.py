"""What is measured for a parallel plan: layers, links, and what is kept of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from parallel_cases import MS, work

from qfleet.accel.config import AccelConfig
from qfleet.algo.agent import ReplayAgent, RolloutAgent
from qfleet.algo.optim import AdamConfig, SgdConfig
from qfleet.algo.schedules import LinearRateConfig
from qfleet.algo.torsos import MlpConfig, NatureConfig
from qfleet.control import parallel_measured
from qfleet.control.kept import KeptFile
from qfleet.control.parallel_coding import measure_compressions
from qfleet.control.parallel_layers import measure_layers
from qfleet.control.parallel_links import LocalRanks, fit_link, local_ranks, measure_links, shares
from qfleet.control.parallel_measured import plan_learners, site_of
from qfleet.control.parallel_parts import Fabric, Handling, Link, Way, Work
from qfleet.control.parallel_ranks import SIZES
from qfleet.control.parallel_samples import call_seconds, quiet, rising
from qfleet.control.parallel_tiny import handling_of
from qfleet.control.parallel_traffic import gather_seconds, ring_seconds
from qfleet.control.resources import Gpu, Resources
from qfleet.core.errors import ConfigError
from qfleet.core.spec import PLAIN, EnvSpec, LeafSpec
from qfleet.core.usercode import UserCode
from qfleet.presets import preset
from qfleet.roles.learner_setup import LearnerConfig, LearnerSetup
from qfleet.scaling import learners_text

VECTOR = EnvSpec(name="vector", observations={PLAIN: LeafSpec(shape=(8,), dtype="float32")}, actions=3)
PIXELS = EnvSpec(name="pixels", observations={PLAIN: LeafSpec(shape=(4, 84, 84), dtype="uint8", stack=4)}, actions=6)


def setup(spec: EnvSpec = VECTOR, **changes: Any) -> LearnerSetup:
    values: dict[str, Any] = {
        "learner": LearnerConfig(batch_size=16),
        "network": MlpConfig(hidden=(32, 24)),
        "agent": ReplayAgent(double=True),
        "optim": AdamConfig(),
        "spec": spec,
        "seed": 0,
        "total_updates": 100,
        "evaluate_every": 100,
        "env_steps": 100,
        "device": "cpu",
        "group": None,
        "warm_start": None,
        "warm_start_part": "all",
        "code": UserCode(),
        "accel": AccelConfig(),
    }
    return LearnerSetup(**{**values, **changes})


def once(call: Callable[[], object], budget_s: float) -> list[float]:
    """Call a piece of work, and say that every call takes a millisecond."""
    call()
    return [MS] * 5


class TestLayers:
    def test_layers_are_those_with_parameters_in_order(self) -> None:
        found = measure_layers(setup(), once)
        assert [(one.inputs, one.outputs, one.units) for one in found.layers] == [(8, 32, 32), (32, 24, 24), (24, 3, 3)]
        assert [one.parameters for one in found.layers] == [8 * 32 + 32, 32 * 24 + 24, 24 * 3 + 3]
        assert [one.flops for one in found.layers] == [2 * 8 * 32, 2 * 32 * 24, 2 * 24 * 3]
        assert len({one.name for one in found.layers}) == 3
        assert (found.passes, found.moments, found.batch, found.spread) == (2, 2, 16, 0)
        assert [rows for rows, _ in found.update] == [2, 4, 8, 16]

    def test_convolutions_count_positions(self) -> None:
        found = measure_layers(setup(PIXELS, network=NatureConfig(), learner=LearnerConfig(batch_size=2)), once)
        first, second = found.layers[:2]
        assert (first.units, first.outputs, first.flops) == (32, 32 * 20 * 20, 2 * 32 * 20 * 20 * 4 * 8 * 8)
        assert (second.inputs, second.outputs) == (32 * 20 * 20, 64 * 9 * 9)
        assert found.parameters == 1_687_206, "the Nature network for 6 actions"

    def test_one_pass_less_without_double_and_no_moments_without_adam(self) -> None:
        found = measure_layers(setup(agent=ReplayAgent(double=False), optim=SgdConfig(momentum=0.0)), once)
        assert (found.passes, found.moments) == (1, 0)

    def test_a_rate_that_falls_to_the_end_of_the_run_knows_its_length(self) -> None:
        found = measure_layers(setup(optim=AdamConfig(schedule=LinearRateConfig())), once)
        assert found.moments == 2

    def test_agents_that_learn_from_rollouts_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="single transitions of a replay"):
            measure_layers(setup(agent=RolloutAgent()), once)

    def test_really_timed(self) -> None:
        found = measure_layers(setup())
        assert all(seconds > 0 for _, seconds in found.update)
        assert all(seconds > 0 for one in found.layers for _, seconds in one.forward)
        assert found.step > 0


def test_calls_are_timed_a_few_times_at_least() -> None:
    calls: list[int] = []
    assert len(call_seconds(lambda: calls.append(1), 0.0, torch.device("cpu"))) == 5
    assert len(calls) == 6, "after a warm-up"


def test_other_programs_only_add() -> None:
    assert quiet([1.0, 1.0, 1.0, 9.0, 9.0]) == 1.0
    assert rising([(1, 5.0), (2, 3.0), (4, 4.0)]) == ((1, 3.0), (2, 3.0), (4, 4.0))


def test_forms_of_gradients_cost_their_bytes() -> None:
    found = {form.name: form for form in measure_compressions(100_000, "cpu", once)}
    assert {name: round(4 / form.value_bytes, 1) for name, form in found.items() if name in ("fp16", "bf16")} == {
        "fp16": 2.0,
        "bf16": 2.0,
    }
    assert 4 / found["int8"].value_bytes > 3.9
    assert 4 / found["sign"].value_bytes > 30
    assert 4 / found["topk"].value_bytes > 250
    assert all(form.gathered and form.encode == form.decode == MS / 100_000 for form in found.values())


class TestLinks:
    @given(st.floats(1e-6, 1e-2), st.floats(1e6, 1e10), st.integers(2, 8))
    @settings(max_examples=60, deadline=None)
    def test_a_link_is_found_again(self, latency: float, bandwidth: float, ranks: int) -> None:
        link = Link(bandwidth, latency)
        for kind, seconds in (("reduce", ring_seconds), ("gather", gather_seconds)):
            found = fit_link(SIZES, [seconds(link, ranks, size) for size in SIZES], *shares(ranks, kind))
            assert found.bandwidth == pytest.approx(bandwidth, rel=1e-6)
            assert found.latency == pytest.approx(latency, rel=1e-3)

    def test_times_that_fall_with_the_size_still_make_a_link(self) -> None:
        found = fit_link((1000, 2000), (2e-3, 1e-3), 1, 1.0)
        assert found.bandwidth > 0
        assert found.latency > 0

    def test_slowdown_is_never_a_gain(self) -> None:
        times = {"2": [1e-3] * len(SIZES)}
        compute, tiny = {"1": [2.0], "2": [1.8], "4": [5.0]}, {"whole": [1.0], "tensor": [1.0], "pipeline": [1.0]}
        found = local_ranks({"reduce": times, "gather": times, "compute": compute, "tiny": tiny})
        assert found.handling == Handling(), "nor is handling parts"
        assert found.slowdown == ((1, 1.0), (2, 1.0), (4, 2.5))

    def test_handling_is_what_is_left_of_a_tiny_update(self) -> None:
        found = handling_of(whole=1e-3, tensor=10e-3, pipeline=14e-3, link=Link(1e9, 1e-4))
        assert found.layer == pytest.approx((9e-3 - 6e-4) / 8)
        assert found.micro_batch == pytest.approx((13e-3 - 4e-4) / 12)

    def test_real_ranks(self) -> None:
        found = measure_links(ranks=2)
        assert [count for count, _ in found.fabric.reduce] == [2]
        assert [count for count, _ in found.slowdown] == [1, 2]
        assert 1e6 < found.fabric.reduce[0][1].bandwidth < 1e12
        assert found.fabric.gather[0][1].latency < 1
        assert 0 < found.handling.layer < 1
        assert 0 < found.handling.micro_batch < 1


class TestKept:
    @pytest.fixture(autouse=True)
    def own_cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("QFLEET_CACHE", str(tmp_path))

    def test_what_is_kept_comes_back_equal_by_its_key_alone(self) -> None:
        kept = KeptFile("work.json", Work)
        kept.store({"a": 1}, work())
        kept.store({"a": 2}, work(batch=8))
        kept.store({"a": 1}, work(batch=64))
        assert kept.find({"a": 1}) == work(batch=64)
        assert kept.find({"a": 2}) == work(batch=8)
        assert kept.find({"a": 3}) is None

    def test_a_damaged_file_holds_nothing_and_is_replaced(self) -> None:
        kept = KeptFile("work.json", Work)
        kept.path.write_text("{")
        assert kept.find({}) is None
        kept.store({}, work())
        assert kept.find({}) == work()

    def test_values_of_another_version_are_measured_again(self) -> None:
        KeptFile("work.json", dict[str, int]).store({}, {"batch": 3})
        assert KeptFile("work.json", Work).find({}) is None

    def test_a_second_plan_measures_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        link = Link(1e9, 1e-4)
        ranks = LocalRanks(Fabric(((2, link),), ((2, link),)), ((1, 1.0), (2, 1.0)), Handling())
        monkeypatch.setattr(parallel_measured, "measure_links", lambda: ranks)
        monkeypatch.setattr(parallel_measured, "measure_layers", lambda setup: work(step=MS))
        monkeypatch.setattr(parallel_measured, "core_share", lambda seconds: 1.0)
        machine = Resources(cpu="test", cores=2, memory=2**30, shared_memory=2**30)
        said: list[str] = []
        first = plan_learners(setup(), {"run": 1}, machine, said.append)
        assert said == ["timing the network layer by layer", "timing sums between ranks"]
        assert plan_learners(setup(), {"run": 1}, machine, said.append) == first
        assert len(said) == 2
        assert first[0].best.way == Way(2)
        plan_learners(setup(), {"run": 2}, machine, said.append)
        assert len(said) == 3, "the links of the machine are still known"
        plan_learners(setup(), {"run": 1}, machine, said.append, fresh=True)
        assert len(said) == 5

    def test_nothing_is_kept_of_a_busy_machine(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(parallel_measured, "measure_layers", lambda setup: work())
        monkeypatch.setattr(parallel_measured, "core_share", lambda seconds: 0.5)
        parallel_measured.known_work(setup(), {}, lambda text: None)
        assert not parallel_measured.WORKS.path.exists()


def test_every_form_of_gradients_is_among_the_ways_that_are_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    links = LocalRanks(Fabric(((2, Link(1e9, 0.0)),), ((2, Link(1e9, 0.0)),)), ((1, 1.0), (2, 1.0)), Handling())
    monkeypatch.setattr(parallel_measured, "known_work", lambda *_: work())
    monkeypatch.setattr(parallel_measured, "known_links", lambda *_: links)
    table = learners_text(preset("mountaincar"), UserCode(), lambda text: None)
    for form in ("fp16", "bf16", "int8", "sign", "topk"):
        assert f"data 2, {form} " in table
    assert "--parallel.compression" not in table, "none of them is chosen: they learn otherwise"


def test_a_machine_has_a_rank_for_each_core_and_two_at_least() -> None:
    ranks = LocalRanks(Fabric(((2, Link(1e9, 0.0)),), ((2, Link(1e9, 0.0)),)), ((1, 1.0), (2, 1.5)), Handling())
    sites = [site_of("cpu", Resources(cpu="", cores=n, memory=5, shared_memory=0), ranks) for n in (1, 2, 16)]
    assert [one.ranks for one in sites] == [2, 2, 16]
    assert all(one.shared and one.memory == 5 for one in sites)
    gpus = [Gpu(name="large", memory=9), Gpu(name="small", memory=7)]
    on_gpus = site_of("cuda", Resources(cpu="", cores=1, memory=5, shared_memory=0, gpus=gpus), ranks)
    assert (on_gpus.ranks, on_gpus.memory) == (2, 7), "what one rank needs fits any of them"
