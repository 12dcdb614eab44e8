"""The flat optimiser against torch's on separate tensors, its refusal of bad gradients, and exact resume."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from torch import nn

from qfleet.algo.flat import FlatParameters, checksum
from qfleet.algo.optim import AdagradConfig, AdamConfig, AdamWConfig, Optim, OptimConfig, RmspropConfig, SgdConfig
from qfleet.algo.schedules import CosineRateConfig, LinearRateConfig, PlateauRateConfig
from qfleet.core.codec import roundtrip
from qfleet.core.errors import CheckpointError, ConfigError

CONFIGS: list[OptimConfig] = [
    SgdConfig(lr=0.1),
    SgdConfig(lr=0.1, momentum=0.9, weight_decay=0.01),
    AdagradConfig(lr=0.1, weight_decay=0.01),
    RmspropConfig(lr=0.01, momentum=0.9, weight_decay=0.01),
    RmspropConfig(lr=0.01, centered=False),
    AdamConfig(lr=0.01, weight_decay=0.01),
    AdamWConfig(lr=0.01, betas=(0.8, 0.9), eps=1e-5),
]
CUDA = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICES = ["cpu", pytest.param("cuda", marks=CUDA)]


def label(config: Any) -> str:
    return str(config.kind)


def network(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


class Flattened(FlatParameters):
    """A flat network that says whose it is."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.module = module


def backward(module: nn.Module, seed: int, scale: float = 1.0) -> None:
    data = torch.randn(16, 3, generator=torch.Generator().manual_seed(seed)).to(next(module.parameters()).device)
    (scale * module(data).square().mean()).backward()


def torch_optimizer(config: OptimConfig, module: nn.Module) -> torch.optim.Optimizer:
    common = {"lr": config.lr, "weight_decay": config.weight_decay}
    match config:
        case SgdConfig():
            return torch.optim.SGD(module.parameters(), momentum=config.momentum, **common)
        case AdagradConfig():
            return torch.optim.Adagrad(module.parameters(), eps=config.eps, **common)
        case AdamConfig():
            return torch.optim.Adam(module.parameters(), betas=config.betas, eps=config.eps, **common)
        case AdamWConfig():
            return torch.optim.AdamW(module.parameters(), betas=config.betas, eps=config.eps, **common)
    raise NotImplementedError


@pytest.mark.parametrize("max_norm", [None, 0.1])
@pytest.mark.parametrize("config", [c for c in CONFIGS if c.kind != "rmsprop"], ids=label)
def test_steps_equal_torch_on_separate_parameters(config: OptimConfig, max_norm: float | None) -> None:
    plain, flattened = network(), network()
    oracle = torch_optimizer(config, plain)
    flat = FlatParameters(flattened)
    optim = Optim(config.replace(max_grad_norm=max_norm), flat, None)
    for update in range(30):
        oracle.zero_grad()
        flat.zero_grad()
        backward(plain, update)
        backward(flattened, update)
        expected = nn.utils.clip_grad_norm_(plain.parameters(), max_norm or math.inf)
        torch.testing.assert_close(optim.step(update), expected)
        oracle.step()
    for p, q in zip(plain.parameters(), flattened.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_rmsprop_equals_its_formula(centered: bool, momentum: float) -> None:
    config = RmspropConfig(lr=0.01, alpha=0.9, eps=0.01, centered=centered, momentum=momentum, max_grad_norm=None)
    flat = FlatParameters(network())
    optim = Optim(config, flat, None)
    theta = flat.parameters.double().numpy().copy()
    square, mean, direction = (np.zeros_like(theta) for _ in range(3))
    rng = np.random.default_rng(0)
    for update in range(30):
        gradient = rng.normal(size=theta.shape)
        flat.gradients.copy_(torch.from_numpy(gradient))
        square = 0.9 * square + 0.1 * gradient**2
        mean = 0.9 * mean + 0.1 * gradient
        direction = momentum * direction + gradient / np.sqrt(square - centered * mean**2 + 0.01)
        theta -= 0.01 * direction
        optim.step(update)
    np.testing.assert_allclose(flat.parameters.numpy(), theta, rtol=1e-4, atol=1e-5)


def test_centred_rmsprop_stays_finite_when_the_gradient_does_not_change() -> None:
    flat = FlatParameters(network())
    optim = Optim(RmspropConfig(max_grad_norm=None), flat, None)
    gradient = torch.randn(flat.parameters.shape, generator=torch.Generator().manual_seed(0)) * 100
    for update in range(1000):
        flat.gradients.copy_(gradient)
        optim.step(update)
    assert torch.isfinite(flat.parameters).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, 3e38])
@pytest.mark.parametrize("warm", [0, 3])
@pytest.mark.parametrize("config", CONFIGS, ids=label)
def test_a_gradient_that_is_not_finite_changes_nothing(config: OptimConfig, warm: int, bad: float, device: str) -> None:
    clean, dirty = network().to(device), network().to(device)
    flats = [FlatParameters(clean), FlatParameters(dirty)]
    optims = [Optim(config.replace(l1=0.01), flat, None) for flat in flats]
    for update in range(warm + 3):
        for module, flat, optim in zip((clean, dirty), flats, optims, strict=True):
            if module is dirty and update == warm:
                before = checksum(flat.to_numpy())
                flat.gradients.fill_(bad)
                assert not torch.isfinite(optim.step(update))
                assert checksum(flat.to_numpy()) == before
            flat.zero_grad()
            backward(module, update)
            assert torch.isfinite(optim.step(update))
    assert checksum(flats[0].to_numpy()) == checksum(flats[1].to_numpy())


@pytest.mark.parametrize("config", [SgdConfig(momentum=0.9), AdamConfig(), AdamWConfig()], ids=label)
def test_the_flag_that_lets_a_gpu_skip_by_itself_works_like_looking(config: OptimConfig) -> None:
    looking, skipping = (Optim(config, Flattened(network()), None) for _ in range(2))
    skipping._skips_on_device = True  # the CPU's fused kernels understand the same flag
    for update, scale in enumerate([1.0, 1000.0, math.nan, 1.0, math.inf, 1.0]):
        for optim in (looking, skipping):
            optim._flat.zero_grad()
            backward(optim._flat.module, update, scale)
            optim.step(update)
    torch.testing.assert_close(looking._flat.parameters, skipping._flat.parameters, rtol=1e-6, atol=1e-7)
    states = [optim.state_dict()["moments"] for optim in (looking, skipping)]
    for name, value in states[0].items():
        torch.testing.assert_close(value, states[1][name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "schedule", [LinearRateConfig(updates=20, warmup=3), PlateauRateConfig(patience=1, cooldown=1)]
)
@pytest.mark.parametrize("config", CONFIGS, ids=label)
def test_trap_15_resume_is_exact_to_the_bit(config: OptimConfig, schedule: Any) -> None:
    config = config.replace(schedule=schedule)

    def train(optim: Optim, flat: Flattened, updates: range) -> None:
        for update in updates:
            flat.zero_grad()
            backward(flat.module, update)
            optim.step(update)
            if update % 3 == 0:
                optim.score(float(update % 2))

    uncut = Flattened(network())
    train(reference := Optim(config, uncut, None), uncut, range(20))
    for cut in (0, 1, 7):
        first = Flattened(network())
        train(optim := Optim(config, first, None), first, range(cut))
        state, weights = roundtrip(optim.state_dict()), first.to_numpy()
        train(optim, first, range(cut, 20))  # going on must not reach into what was saved
        second = Flattened(network(seed=9))
        second.load_numpy(weights)
        resumed = Optim(config, second, None)
        train(resumed, second, range(2))  # nor must what the new one did before
        second.load_numpy(weights)
        resumed.load_state_dict(state)
        train(resumed, second, range(cut, 20))
        assert checksum(second.to_numpy()) == checksum(uncut.to_numpy()) == checksum(first.to_numpy())
        assert resumed.learning_rate == reference.learning_rate


def test_a_loaded_state_is_not_shared() -> None:
    flat = Flattened(network())
    optim = Optim(AdamConfig(), flat, None)
    backward(flat.module, 0)
    optim.step(0)
    state = optim.state_dict()
    kept = {name: value.clone() for name, value in state["moments"].items()}
    twin = Optim(AdamConfig(), flat, None)
    twin.load_state_dict(state)
    optim.step(1)
    twin.step(1)
    assert all(torch.equal(kept[name], state["moments"][name]) for name in kept)


def test_a_foreign_state_is_refused() -> None:
    flat = FlatParameters(network())
    optim = Optim(AdamConfig(), flat, None)
    optim.step(0)
    with pytest.raises(CheckpointError, match=r"adam state.*optimiser sgd"):
        Optim(SgdConfig(), flat, None).load_state_dict(optim.state_dict())
    with pytest.raises(CheckpointError, match="size"):
        Optim(AdamConfig(), FlatParameters(nn.Linear(9, 9)), None).load_state_dict(optim.state_dict())


def test_l1_and_weight_decay_are_added_after_clipping() -> None:
    flat = FlatParameters(network())
    before = flat.parameters.clone()
    optim = Optim(SgdConfig(lr=1.0, l1=0.5, weight_decay=0.25, max_grad_norm=1e-3), flat, None)
    flat.gradients.zero_()[0] = 1000.0
    optim.step(0)
    expected = before - 0.5 * before.sign() - 0.25 * before
    expected[0] -= 1e-3
    torch.testing.assert_close(flat.parameters, expected)


def test_padding_between_tensors_stays_zero() -> None:
    for config in CONFIGS:
        module = nn.Sequential(nn.Linear(3, 1), nn.Linear(1, 3))  # sizes that are no multiple of four
        flat = FlatParameters(module)
        optim = Optim(config.replace(l1=0.01, weight_decay=0.1), flat, None)
        for update in range(3):
            backward(module, update)
            optim.step(update)
        total = sum(p.detach().abs().sum() for p in module.parameters())
        torch.testing.assert_close(flat.parameters.abs().sum(), total)


def test_the_schedule_sets_the_rate_of_each_update() -> None:
    flat = FlatParameters(network())
    optim = Optim(SgdConfig(lr=1.0, schedule=CosineRateConfig(warmup=2), max_grad_norm=None), flat, total_updates=12)
    for update, fraction in {0: 0.5, 1: 1.0, 7: 0.5, 12: 0.0}.items():
        before = flat.parameters.clone()
        flat.gradients.fill_(1.0)
        optim.step(update)
        assert optim.learning_rate == pytest.approx(fraction)
        torch.testing.assert_close(before - flat.parameters, torch.full_like(before, fraction))
    with pytest.raises(ConfigError):
        Optim(SgdConfig(schedule=CosineRateConfig()), flat, None)


def test_scores_reach_the_plateau_schedule() -> None:
    flat = FlatParameters(network())
    optim = Optim(SgdConfig(lr=1.0, schedule=PlateauRateConfig(patience=2, cut=0.1)), flat, None)
    for score in (5.0, 4.0, 3.0):
        optim.score(score)
    assert optim.learning_rate == pytest.approx(0.1)


def test_configs_are_chosen_by_kind_and_refuse_nonsense() -> None:
    adapter: TypeAdapter[OptimConfig] = TypeAdapter(OptimConfig)
    for config in CONFIGS:
        assert adapter.validate_python(config.model_dump()) == config
    for bad in (
        {"kind": "adma"},
        {"kind": "adam", "lr": 0},
        {"kind": "adam", "lr": math.nan},
        {"kind": "adam", "betas": (0.9, 1.0)},
        {"kind": "sgd", "eps": 1e-8},
        {"kind": "sgd", "max_grad_norm": 0},
        {"kind": "rmsprop", "schedule": {"kind": "linear", "updates": 0}},
    ):
        with pytest.raises(ValidationError):
            adapter.validate_python(bad)
