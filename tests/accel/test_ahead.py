"""Working ahead of a device that alone knows whether a step was made; on a GPU, the same to the bit."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from fake_link import HastyLink
from test_pipeline_learner import short

import qfleet.api as api
from qfleet.accel.choices import Job, choose
from qfleet.accel.choose import workload
from qfleet.accel.config import AccelConfig
from qfleet.accel.graphs import Recording
from qfleet.accel.steps import DeviceStep
from qfleet.accel.transfers import CudaLink
from qfleet.algo.agent import HardTargetConfig, ReplayAgent
from qfleet.algo.networks import build_network
from qfleet.algo.optim import AdamConfig
from qfleet.algo.schedules import ConstantRateConfig, LinearRateConfig, PlateauRateConfig
from qfleet.algo.torsos import MlpConfig, NatureConfig
from qfleet.algo.updates import ReplayUpdate, build_update
from qfleet.core.spec import PLAIN, EnvSpec, LeafSpec
from qfleet.core.types import Batch
from qfleet.core.usercode import UserCode
from qfleet.roles.updating import Ahead, Finished, OneByOne, Updating

# By the interpreter NumPy computes what a GPU would, and remarks on each infinity.
pytestmark = pytest.mark.filterwarnings("ignore:.*(invalid value|divide by zero|overflow):RuntimeWarning")
AGENT = ReplayAgent(double=True, target=HardTargetConfig(period=4))
VECTORS = EnvSpec(name="vectors", observations={PLAIN: LeafSpec(shape=(4,), dtype="float32")}, actions=3)
FRAMES = EnvSpec(name="frames", observations={PLAIN: LeafSpec(shape=(4, 84, 84), dtype="uint8", stack=4)}, actions=3)
OPTIM = AdamConfig(lr=1e-2, schedule=LinearRateConfig())
PERIOD = 4


def device_update(device: torch.device) -> ReplayUpdate:
    """A small network whose steps are the device's own."""
    network = build_network(MlpConfig(hidden=(8,)), AGENT, VECTORS, seed=0).to(device)
    generator = torch.Generator(device).manual_seed(0)
    update = build_update(AGENT, network, OPTIM, generator, 100, stepper=DeviceStep)
    assert isinstance(update, ReplayUpdate)
    return update


@pytest.mark.parametrize(
    ("optim", "waits"),
    [
        (AdamConfig(lr=1e-2), False),
        (AdamConfig(lr=1e-2, schedule=PlateauRateConfig()), False),
        (AdamConfig(lr=1e-2, schedule=ConstantRateConfig(warmup=5)), True),
        (OPTIM, True),
    ],
    ids=["constant", "plateau", "warm-up", "linear"],
)
def test_only_a_rate_that_changes_with_the_updates_waits_for_the_device(
    optim: AdamConfig, waits: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU stood still at every second batch for a number that nobody needed."""
    network = build_network(MlpConfig(hidden=(8,)), AGENT, VECTORS, seed=0).to(device)
    update = build_update(AGENT, network, optim, torch.Generator(device), 100, stepper=DeviceStep)
    asked: list[int] = []
    monkeypatch.setattr(DeviceStep, "count", property(lambda step: asked.append(1) or 0))
    update.prepare()
    assert bool(asked) == waits
    if not waits:
        assert update.learning_rate == optim.lr


def make_batches(spec: EnvSpec, size: int, count: int, spoilt: tuple[int, ...] = ()) -> list[Batch]:
    """Random batches; the rewards of those with the numbers `spoilt` are NaN."""
    rng, leaf = np.random.default_rng(0), spec.observations[PLAIN]

    def observation() -> dict[str, Any]:
        return {PLAIN: (256 * rng.random((size, *leaf.shape))).astype(leaf.dtype)}

    return [
        Batch(
            observation=observation(),
            action=rng.integers(spec.actions, size=size),
            reward=np.full(size, np.nan if number in spoilt else rng.normal(), np.float32),
            discount=np.full(size, 0.99, np.float32),
            next_observation=observation(),
            weight=rng.uniform(0.5, 1, size).astype(np.float32),
            index=np.arange(size) + 1000 * number,
            generation=np.zeros(size, np.int64),
            global_size=size,
        )
        for number in range(count)
    ]


def learn_from(updating: Updating, batches: list[Batch]) -> list[Finished]:
    finished = []
    for batch in batches:
        updating.advance(batch)
        finished += updating.finished()
    while updating.waiting:
        updating.advance(None)
    return finished + updating.finished(math.inf)


def told(finished: list[Finished]) -> list[Any]:
    """What is told of each update, in a form that can be compared."""
    return [
        (
            message.index[0],
            result.updates,
            result.skipped,
            None if result.priority is None else result.priority.tolist(),
        )
        for message, result in finished
        if isinstance(message, Batch)
    ]


def test_the_device_says_later_whether_a_step_was_made(device):
    batches = make_batches(VECTORS, 8, 13, spoilt=(2, 7, 8))
    one, other = device_update(device), device_update(device)
    link = CudaLink(device) if device.type == "cuda" else HastyLink(late=2)
    expected = learn_from(OneByOne(one), batches)
    found = learn_from(Ahead(other, link, 1, lambda work: work), batches)
    assert told(found) == told(expected)
    assert [result.skipped for _, result in found] == [int(n in (2, 7, 8)) for n in range(13)]
    assert other.updates == 10
    assert torch.equal(one.flat.parameters, other.flat.parameters)
    assert torch.equal(one.target_flat.parameters, other.target_flat.parameters)


def test_the_device_says_how_many_of_a_batchs_updates_were_made(device):
    batches = [dataclasses.replace(batch, updates=3) for batch in make_batches(VECTORS, 6, 4)]
    batches[2].reward[2:4] = np.nan  # those of the second update
    link = CudaLink(device) if device.type == "cuda" else HastyLink(late=2)
    results = []
    for updating in (OneByOne, partial(Ahead, link=link, period=1, record=lambda work: work)):
        update = device_update(device)
        finished = learn_from(updating(update), batches)
        assert [(result.updates, result.skipped) for _, result in finished] == [(3, 0), (3, 0), (2, 1), (3, 0)]
        assert np.flatnonzero(np.isnan(finished[2][1].priority)).tolist() == [2, 3]
        results.append((np.array(told(finished)[0][3]).tolist(), update.flat.to_numpy().tobytes(), update.updates))
    assert results[0] == results[1]
    assert results[0][2] == 11


def test_a_batch_that_says_what_is_new_in_the_replay_is_learned_from_too(device):
    batches = [dataclasses.replace(batch, fresh=np.arange(3)) for batch in make_batches(VECTORS, 8, 3)]
    link = CudaLink(device) if device.type == "cuda" else HastyLink(late=2)
    finished = learn_from(Ahead(device_update(device), link, 1, lambda work: work), batches)
    assert [message.fresh for message, _ in finished] == [None] * 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_a_run_in_processes_works_ahead(tmp_path):
    run = api.train(short("qr", placement="processes"), seed=3, run_dir=tmp_path / "run")
    assert "recorded" in run.summary["accel"]
    assert run.summary["updates"] > 7


def test_the_learning_rate_follows_its_schedule_period_by_period(device):
    update = device_update(device)
    link = CudaLink(device) if device.type == "cuda" else HastyLink(late=0)
    updating, rates = Ahead(update, link, PERIOD, lambda work: work), []
    for batch in make_batches(VECTORS, 8, 9):
        updating.advance(batch)
        updating.advance(None)
        rates.append(update.learning_rate)
    assert rates == pytest.approx([1e-2] * 4 + [0.96e-2] * 4 + [0.92e-2])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.usefixtures("switches_put_back")
@pytest.mark.parametrize("updates", [1, 4])
@pytest.mark.parametrize(("kernels", "recorded"), [("off", False), ("auto", False), ("auto", True)])
def test_on_a_gpu_it_learns_the_same_to_the_bit(device, kernels, recorded, updates):
    single = make_batches(FRAMES, 32 * updates, 24, spoilt=(5,))
    batches, results = [dataclasses.replace(batch, updates=updates) for batch in single], []
    config, optim = NatureConfig(), AdamConfig(lr=1e-4)
    for ahead in (False, True):
        network = build_network(config, AGENT, FRAMES, seed=0).to(device)
        work = workload(AGENT, config, optim, FRAMES, UserCode())
        chosen = choose(Job(AccelConfig(deterministic=True, kernels=kernels), AGENT, optim, device, work), network)
        generator = torch.Generator(device).manual_seed(0)
        made_by = {"gradient": chosen.gradient, "stepper": chosen.stepper}
        update = build_update(AGENT, network, optim, generator, 100, **made_by)
        assert isinstance(update, ReplayUpdate)
        record = partial(Recording, generators=(generator,), enabled=recorded)
        updating = Ahead(update, CudaLink(device), PERIOD, record) if ahead else OneByOne(update)
        finished = learn_from(updating, batches)
        results.append((told(finished), update.flat.to_numpy().tobytes(), update.target_flat.to_numpy().tobytes()))
    assert results[0] == results[1]
