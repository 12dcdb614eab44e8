"""The optimiser kernels against torch's Adam and AdamW, the eager `Optim` and its target rules."""

from __future__ import annotations

import math
import re

import pytest
import torch
from compile_for_hopper import compile_for_hopper
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from qfleet.algo.agent import HardTargetConfig, SoftTargetConfig
from qfleet.algo.flat import FlatParameters
from qfleet.algo.optim import AdamConfig, AdamWConfig, Optim
from qfleet.core.errors import CheckpointError

pytest.importorskip("triton")

from qfleet.accel.kernels import optim as kernels
from qfleet.accel.kernels.optim import FlatAdam
from qfleet.accel.precision import LossScale

# By the interpreter NumPy computes what a GPU would, and remarks on each infinity.
pytestmark = pytest.mark.filterwarnings("ignore:.*(invalid value|divide by zero|overflow):RuntimeWarning")
CASES = [
    (AdamConfig(max_grad_norm=None), HardTargetConfig(period=7)),
    (
        AdamConfig(lr=0.01, betas=(0.8, 0.99), eps=1.5e-4, weight_decay=0.01, max_grad_norm=0.5),
        SoftTargetConfig(tau=0.05),
    ),
    (AdamConfig(l1=0.01, betas=(0.0, 0.9)), SoftTargetConfig(tau=0.75)),
    (AdamWConfig(lr=0.02, max_grad_norm=3.0, l1=0.001), HardTargetConfig(period=1)),
]


@pytest.fixture(autouse=True)
def _several_programs(monkeypatch):
    monkeypatch.setattr(kernels, "_JUDGED", 512)
    monkeypatch.setattr(kernels, "_APPLIED", 512)


def network(device, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(19, 30), nn.Linear(30, 5)).to(device)


class Eager:
    """What the learner does without kernels."""

    def __init__(self, config, device, rule):
        self.flat, self.target = FlatParameters(network(device)), FlatParameters(network(device, seed=1))
        self.optim, self.rule, self.count = Optim(config, self.flat, None), rule, 0

    def step(self, gradient, loss):
        if not math.isfinite(loss):
            return
        self.flat.gradients.copy_(gradient)
        if not torch.isfinite(self.optim.step(self.count)):
            return
        self.count += 1
        if isinstance(self.rule, SoftTargetConfig):
            self.target.lerp_from(self.flat, self.rule.tau)
        elif self.count % self.rule.period == 0:
            self.target.copy_from(self.flat)


class Fast:
    """The same by kernels."""

    def __init__(self, config, device, rule, **options):
        self.flat, self.target = FlatParameters(network(device)), FlatParameters(network(device, seed=1))
        self.optim = FlatAdam(
            config, self.flat.parameters, self.flat.gradients, self.target.parameters, rule, **options
        )

    def step(self, gradient, loss=1.0):
        self.flat.gradients.copy_(gradient)
        self.optim.step(torch.tensor(loss, device=self.flat.gradients.device))


def gradients(flat, count, bad=()):
    """Yield seeded gradients of very different sizes, and losses; those of the steps `bad` are not finite."""
    generator = torch.Generator().manual_seed(7)
    padding = (flat.parameters == 0).cpu()
    for number in range(count):
        gradient = torch.randn(flat.parameters.shape, generator=generator) * 10.0 ** (number % 4 - 2)
        gradient[padding] = 0
        loss = 1.0
        if number in bad:
            if number % 3 == 0:
                loss = math.inf
            else:
                gradient[number * 5] = math.nan if number % 3 == 1 else math.inf
        yield gradient.to(flat.parameters.device), loss


def same(actual, expected, rtol=1e-6):
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=1e-6)


@pytest.mark.parametrize(("config", "rule"), CASES, ids=["adam", "adam-l2-clip", "adam-l1", "adamw"])
def test_fifty_steps_equal_the_eager_ones(device, config, rule):
    bad = {0, 1, 9, 20, 31, 32, 44}
    eager, fast = Eager(config, device, rule), Fast(config, device, rule)
    for gradient, loss in gradients(eager.flat, 50, bad):
        eager.step(gradient, loss)
        fast.step(gradient, loss)
        same(fast.flat.parameters, eager.flat.parameters)
        same(fast.target.parameters, eager.target.parameters)
        assert fast.optim.count == eager.count
    assert fast.optim.skipped == len(bad)
    moments = eager.optim.state_dict()["moments"]
    for name, value in fast.optim.state_dict()["moments"].items():
        same(
            value, moments[name].to(value.dtype), rtol=1e-6 + (torchs_rounding(config) if device.type == "cuda" else 0)
        )


def torchs_rounding(config):
    """What torch's fused kernel on a GPU takes too much or too little: there 1 - beta is a difference of float32s."""
    return max(abs((1 - float(torch.tensor(beta))) / (1 - beta) - 1) for beta in config.betas)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_fifty_steps_equal_torch_with_its_own_clipping(device, kind):
    config = (AdamConfig if kind is torch.optim.Adam else AdamWConfig)(weight_decay=0.02, max_grad_norm=1.0, lr=0.003)
    fast = Fast(config, device, None)
    parameter = nn.Parameter(fast.flat.parameters.clone())
    oracle = kind([parameter], lr=0.003, weight_decay=0.02)
    for gradient, loss in gradients(fast.flat, 50):
        parameter.grad = gradient.clone()
        norm = nn.utils.clip_grad_norm_([parameter], 1.0)
        oracle.step()
        fast.step(gradient, loss)
        torch.testing.assert_close(fast.optim.norm, norm, rtol=1e-6, atol=0)
        same(fast.flat.parameters, parameter.detach())


@pytest.mark.parametrize("warm", [0, 3])
@pytest.mark.parametrize(("spoil", "loss"), [(math.nan, 1.0), (math.inf, 1.0), (3e38, 1.0), (1.0, math.nan)])
def test_what_is_not_finite_changes_nothing(device, warm, spoil, loss):
    rule = SoftTargetConfig(tau=0.5)
    copy = torch.zeros_like(FlatParameters(network(device)).parameters, dtype=torch.bfloat16)
    fast = Fast(AdamConfig(l1=0.1), device, rule, copies=(copy, None))
    for gradient, _ in gradients(fast.flat, warm):
        fast.step(gradient)
    assert fast.optim.made == (warm > 0)

    def everything():
        moments = fast.optim.state_dict()["moments"].values()
        return [tensor.clone() for tensor in (fast.flat.parameters, fast.target.parameters, copy, *moments)]

    before = everything()
    fast.step(torch.full_like(fast.flat.parameters, spoil), loss)
    assert all(torch.equal(a, b) for a, b in zip(before, everything(), strict=True))
    assert (fast.optim.made, fast.optim.pull, fast.optim.skipped) == (0, 0, 1)


def test_equal_gradients_give_equal_bits(device):
    runs = [Fast(AdamConfig(), device, SoftTargetConfig()) for _ in range(2)]
    for run in runs:
        for gradient, loss in gradients(run.flat, 5):
            run.step(gradient, loss)
    assert torch.equal(runs[0].flat.parameters, runs[1].flat.parameters)
    assert torch.equal(runs[0].optim.norm, runs[1].optim.norm)


def test_the_rate_is_read_from_the_device(device):
    fast, frozen = Fast(AdamConfig(lr=0.01), device, None), Fast(AdamConfig(lr=0.01), device, None)
    frozen.optim.rate.zero_()
    start = frozen.flat.parameters.clone()
    for run in (fast, frozen):
        run.step(torch.ones_like(start))
    assert torch.equal(frozen.flat.parameters, start)
    same(start - fast.flat.parameters, torch.full_like(start, 0.01))  # Adam's first step


def test_bias_correction_keeps_its_digits(device):
    fast = Fast(AdamConfig(lr=1.0, betas=(0.9, 0.9999), eps=1e-20, max_grad_norm=None), device, None)
    start = fast.flat.parameters.clone()
    fast.step(torch.full_like(start, 1e-3))
    torch.testing.assert_close(start - fast.flat.parameters, torch.ones_like(start), rtol=3e-7, atol=3e-7)


def test_copies_follow_within_their_rounding(device):
    like = FlatParameters(network(device)).parameters
    copies = tuple(torch.zeros_like(like, dtype=torch.bfloat16) for _ in range(2))
    fast = Fast(AdamConfig(lr=0.1), device, HardTargetConfig(period=2), copies=copies)
    assert torch.equal(copies[0], fast.flat.parameters.bfloat16())
    for gradient, _ in gradients(fast.flat, 3):
        fast.step(gradient)
        for copy, original in zip(copies, (fast.flat.parameters, fast.target.parameters), strict=True):
            torch.testing.assert_close(copy.float(), original, rtol=2**-7, atol=0)
    fast.flat.parameters.fill_(2.0)
    fast.optim.refresh()
    assert (copies[0] == 2).all()


def test_scaled_gradients_give_the_same_steps(device):
    plain = Fast(AdamConfig(max_grad_norm=1.0), device, None)
    scaled = Fast(AdamConfig(max_grad_norm=1.0), device, None, scale=LossScale(device, initial=1024.0))
    for gradient, loss in gradients(plain.flat, 10):
        plain.step(gradient, loss)
        scaled.step(gradient * 1024, loss)
        same(scaled.optim.norm, plain.optim.norm)
        same(scaled.flat.parameters, plain.flat.parameters)


def test_the_loss_scale_halves_on_overflow_and_doubles_after_good_steps(device):
    scale = LossScale(device, initial=8.0, interval=3)
    fast = Fast(AdamConfig(), device, None, scale=scale)
    good, bad = torch.ones_like(fast.flat.parameters), torch.full_like(fast.flat.parameters, math.inf)
    scales = []
    for gradient in [good, good, bad, good, good, good, good, bad, bad, bad, bad, bad]:
        fast.step(gradient)
        scales.append(scale.value.item())
    assert scales == [8, 8, 4, 4, 4, 8, 8, 4, 2, 1, 1, 1]
    assert (fast.optim.count, fast.optim.skipped) == (6, 6)
    assert (scale.take_overflows(), scale.take_overflows()) == (4, 0)  # a scale of 1 is to blame for nothing


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from(["good", "overflow", "bad loss"]), min_size=1, max_size=12))
def test_the_kernel_and_the_eager_step_adapt_the_scale_alike(device, steps):
    scale, eager = (LossScale(device, initial=4.0, interval=2) for _ in range(2))
    optim = FlatAdam(AdamConfig(), torch.zeros(8, device=device), torch.zeros(8, device=device), scale=scale)
    for step in steps:
        optim._gradients.fill_(math.nan if step == "overflow" else 1.0)
        loss = torch.full((), math.inf if step == "bad loss" else 1.0, device=device)
        optim.step(loss)
        eager.adapt(step == "good", loss)
        assert scale.state_dict() == eager.state_dict()
        assert torch.equal(scale.overflows, eager.overflows)


def test_trap_15_resume_is_exact_to_the_bit(device):
    uncut, first = (Fast(AdamConfig(), device, HardTargetConfig(period=3)) for _ in range(2))
    steps = list(gradients(uncut.flat, 20, bad={2, 13}))
    for step in steps:
        uncut.step(*step)
    for step in steps[:8]:
        first.step(*step)
    state, weights = first.optim.state_dict(), (first.flat.to_numpy(), first.target.to_numpy())
    for step in steps[8:]:  # going on must not reach into what was saved
        first.step(*step)
    second = Fast(AdamConfig(), device, HardTargetConfig(period=3))
    second.step(*steps[5])
    second.flat.load_numpy(weights[0])
    second.target.load_numpy(weights[1])
    second.optim.load_state_dict(state)
    for step in steps[8:]:
        second.step(*step)
    for run in (first, second):
        assert torch.equal(run.flat.parameters, uncut.flat.parameters)
        assert torch.equal(run.target.parameters, uncut.target.parameters)
        assert (run.optim.count, run.optim.skipped) == (18, 2)


def test_states_of_the_eager_optimiser_and_this_one_serve_each_other(device):
    rule = SoftTargetConfig()
    eager, fast = Eager(AdamConfig(), device, rule), Fast(AdamConfig(), device, rule)
    fast.optim.load_state_dict(eager.optim.state_dict())  # before the first step torch has no moments
    steps = list(gradients(eager.flat, 9))
    for step in steps[:3]:
        eager.step(*step)
    fast.optim.load_state_dict(eager.optim.state_dict())
    fast.flat.copy_from(eager.flat)
    for step in steps[3:6]:
        eager.step(*step)
        fast.step(*step)
    same(fast.flat.parameters, eager.flat.parameters)
    other = Eager(AdamConfig(), device, rule)
    other.optim.load_state_dict({**eager.optim.state_dict(), **fast.optim.state_dict()})
    other.flat.copy_from(fast.flat)
    for step in steps[6:]:
        eager.step(*step)
        other.step(*step)
    same(other.flat.parameters, eager.flat.parameters)


def test_a_state_that_does_not_fit_is_refused(device):
    fast = Fast(AdamConfig(), device, None)
    with pytest.raises(CheckpointError, match="adamw"):
        fast.optim.load_state_dict(Fast(AdamWConfig(), device, None).optim.state_dict())
    small = FlatAdam(AdamConfig(), torch.zeros(8, device=device), torch.zeros(8, device=device))
    with pytest.raises(CheckpointError, match="size 8"):
        fast.optim.load_state_dict(small.state_dict())


def every_launch():
    """What `compile_for_hopper` compiles."""
    parameters, copy, loss = torch.zeros(20_000), torch.zeros(20_000, dtype=torch.bfloat16), torch.zeros(())
    soft, hard, scale = SoftTargetConfig(), HardTargetConfig(), LossScale(torch.device("cpu"))
    FlatAdam(AdamConfig(), parameters, parameters, parameters, soft, (copy, copy), scale).step(loss)
    FlatAdam(AdamWConfig(), parameters, parameters, parameters, hard).step(loss)


def test_both_kernels_compile_for_a_gpu(tmp_path):
    code = compile_for_hopper("test_optim_kernels", tmp_path)
    names = [name for ptx in code for name in re.findall(r"\.entry (\w+)", ptx)]
    assert names == ["judge_kernel", "apply_kernel"] * 2
