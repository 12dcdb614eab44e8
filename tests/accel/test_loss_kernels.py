"""The loss kernels against the eager losses, on networks whose outputs are given tables."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch
from compile_for_hopper import compile_for_hopper
from hypothesis import given, settings
from hypothesis import strategies as st

from qfleet.algo.agent import MunchausenConfig, ReplayAgent
from qfleet.algo.heads import (
    CategoricalConfig,
    CategoricalHead,
    ImplicitQuantileConfig,
    QuantileConfig,
    QuantileHead,
    ScalarHead,
)
from qfleet.algo.losses import compute_loss, value_error
from qfleet.algo.targets import pick
from qfleet.core.tensors import TensorBatch

pytest.importorskip("triton")

from qfleet.accel.kernels.losses import (
    LossBuffers,
    Outputs,
    categorical_gradient,
    quantile_gradient,
    regression_gradient,
    scalar_gradient,
)

# By the interpreter NumPy computes what a GPU would, and remarks on each infinity.
pytestmark = pytest.mark.filterwarnings("ignore:.*(invalid value|divide by zero|overflow):RuntimeWarning")
SOFT = MunchausenConfig()
NAN, INF = float("nan"), float("inf")
KINDS = ["scalar", "categorical", "quantile"]
SEEDS = st.integers(0, 2**32 - 1)


class Network:
    """Answers "now" and "next" by tables; implicit quantiles have a third table for acting."""

    def __init__(self, head, tables, seed=0):
        self.tables, self.head = tables, head
        self.generator = torch.Generator(next(iter(tables.values())).device).manual_seed(seed)
        self.torso = lambda observation: observation["when"]

    def __call__(self, observation, taus=None):
        return self.head(self.torso(observation)) if taus is None else self.head(self.torso(observation), taus)

    def q(self, observation):
        return self.head.expectation(self(observation))

    q_without_dropout = q


class ImplicitTables:
    def __init__(self, tables):
        self.tables = tables

    def __call__(self, when, taus=None):
        return self.tables[when if taus is not None else f"acting {when}"]

    def expectation(self, output):
        return output.mean(-1)


class Case:
    """A seeded batch with ties, masks, terminal items and huge errors."""

    def __init__(self, seed, size, actions, device="cpu", masked=False, ties=False, double=False, soft=False, **agent):
        self.generator = torch.Generator().manual_seed(seed)
        self.size, self.actions, self.device, self.ties, self.double = size, actions, device, ties, double
        agent["munchausen"] = SOFT if soft else None
        self.agent = ReplayAgent(double=double and not soft, **agent)
        reward = self.random(size) * torch.where(torch.rand(size, generator=self.generator) < 0.1, 1e6, 1.0).to(device)
        self.batch = TensorBatch(
            observation={"when": "now"},
            action=torch.randint(actions, (size,), generator=self.generator).to(device),
            reward=reward,
            discount=0.97 * (self.random(size) > -1).float(),
            next_observation={"when": "next"},
            weight=self.random(size).abs(),
            mask=self.masks() if masked else None,
            next_mask=self.masks() if masked else None,
            size=size + 3,
        )

    def random(self, *shape):
        return torch.randn(*shape, generator=self.generator).to(self.device)

    def masks(self):
        masks = torch.rand(self.size, self.actions, generator=self.generator) < 0.6
        masks[:: max(self.size - 1, 1)] = False
        return masks.to(self.device)

    def output(self, *entries):
        if not self.ties:
            return self.random(self.size, self.actions, *entries)
        coarse = self.random(self.size, self.actions, *[1 for _ in entries]).round()
        return coarse.expand(self.size, self.actions, *entries).contiguous()

    def tables(self, *entries):
        return {"now": self.output(*entries), "next": self.output(*entries)}

    def outputs(self, online, target):
        choosing = online["next"] if self.agent.double else None
        present = None if self.agent.munchausen is None else target["now"]
        return Outputs(online["now"], target["next"], choosing, present)


def check(case, eager, outputs, kernel):
    """Compare losses, priorities, metrics and gradients with the eager loss."""
    batch, predicted = case.batch, outputs.predicted
    total = torch.dot(eager.per_sample, batch.weight) / batch.size
    (expected,) = torch.autograd.grad(total, predicted)
    buffers = LossBuffers.like(predicted)
    kernel(buffers)
    close(buffers.per_sample, eager.per_sample)
    close(buffers.priority, eager.priority)
    close(buffers.total, total)
    close(buffers.q_mean, eager.metrics["q_mean"])
    close(buffers.gradient * batch.size, expected * batch.size)


def close(actual, expected):
    """Equal to 1e-5; near 0, to some roundings of the numbers between, which are of the order of 1 (places: of 50)."""
    torch.testing.assert_close(actual.detach(), expected.detach(), rtol=1e-5, atol=1e-5)


def check_scalar(case):
    online, target = case.tables(), case.tables()
    online["now"].requires_grad_()
    networks = [Network(ScalarHead(tables.get), tables) for tables in (online, target)]
    outputs = case.outputs(online, target)
    check(
        case,
        compute_loss(case.agent, *networks, case.batch),
        outputs,
        lambda buffers: scalar_gradient(case.agent, outputs, case.batch, buffers),
    )


def check_categorical(case, atoms):
    config = CategoricalConfig(atoms=atoms, v_min=-3, v_max=4)
    case.agent = case.agent.replace(head=config)
    online, target = case.tables(atoms), case.tables(atoms)
    online["now"].requires_grad_()
    networks = []
    for tables in (online, target):
        head = CategoricalHead(torch.nn.Identity(), config).to(case.device)
        head.forward = tables.get
        networks.append(Network(head, tables))
    outputs, support = case.outputs(online, target), networks[0].head.support
    check(
        case,
        compute_loss(case.agent, *networks, case.batch),
        outputs,
        lambda buffers: categorical_gradient(outputs, support, case.batch, buffers),
    )


def check_quantile(case, quantiles):
    config = QuantileConfig(quantiles=quantiles)
    case.agent = case.agent.replace(head=config)
    online, target = case.tables(quantiles), case.tables(quantiles)
    online["now"].requires_grad_()
    networks = []
    for tables in (online, target):
        head = QuantileHead(torch.nn.Identity(), config).to(case.device)
        head.forward = tables.get
        networks.append(Network(head, tables))
    outputs, taus = case.outputs(online, target), networks[0].head.taus
    check(
        case,
        compute_loss(case.agent, *networks, case.batch),
        outputs,
        lambda buffers: quantile_gradient(case.agent, outputs, taus, case.batch, buffers),
    )


def check_implicit(case, taus, target_taus, acting_taus):
    config = ImplicitQuantileConfig(taus=taus, target_taus=target_taus, acting_taus=acting_taus)
    case.agent = case.agent.replace(head=config)

    def table(count):
        return case.output(count).transpose(1, 2).contiguous().transpose(1, 2)  # strides as the real head makes them

    online = {"now": table(taus).requires_grad_(), "acting next": table(acting_taus)}
    target = {"next": table(target_taus), "acting next": table(acting_taus), "acting now": table(acting_taus)}
    networks = [Network(ImplicitTables(tables), tables, seed=5) for tables in (online, target)]
    eager = compute_loss(case.agent, *networks, case.batch)
    drawn = torch.Generator(case.device).manual_seed(5)
    torch.rand(case.size, target_taus, generator=drawn, device=case.device)  # the eager loss draws the target's first
    fractions = torch.rand(case.size, taus, generator=drawn, device=case.device)
    choosing = (online if case.agent.double else target)["acting next"]
    present = None if case.agent.munchausen is None else target["acting now"]
    outputs = Outputs(online["now"], target["next"], choosing, present)
    check(
        case,
        eager,
        outputs,
        lambda buffers: quantile_gradient(case.agent, outputs, fractions, case.batch, buffers),
    )


FLAGS = {"masked": st.booleans(), "ties": st.booleans(), "double": st.booleans(), "soft": st.booleans()}


@settings(max_examples=20, deadline=None)
@given(
    seed=SEEDS,
    size=st.sampled_from([1, 2, 31, 32, 33, 70]),
    actions=st.integers(2, 18),
    loss=st.sampled_from(["huber", "mse"]),
    flags=st.fixed_dictionaries(FLAGS),
    threshold=st.sampled_from([0.5, 1.0, 10.0]),
)
def test_values(device, seed, size, actions, loss, flags, threshold):
    check_scalar(Case(seed, size, actions, device, loss=loss, huber_threshold=threshold, **flags))


@settings(max_examples=8, deadline=None)
@given(
    seed=SEEDS,
    size=st.sampled_from([1, 3]),
    actions=st.integers(2, 18),
    atoms=st.sampled_from([2, 51, 64]),
    flags=st.fixed_dictionaries({name: FLAGS[name] for name in ("masked", "ties", "double")}),
)
def test_categorical(device, seed, size, actions, atoms, flags):
    check_categorical(Case(seed, size, actions, device, **flags), atoms)


@settings(max_examples=8, deadline=None)
@given(
    seed=SEEDS,
    size=st.sampled_from([1, 3]),
    actions=st.integers(2, 18),
    quantiles=st.sampled_from([1, 32, 51, 200]),
    flags=st.fixed_dictionaries(FLAGS),
    threshold=st.sampled_from([0.5, 1.0]),
)
def test_quantile(device, seed, size, actions, quantiles, flags, threshold):
    check_quantile(Case(seed, size, actions, device, huber_threshold=threshold, **flags), quantiles)


@settings(max_examples=8, deadline=None)
@given(
    seed=SEEDS,
    size=st.sampled_from([1, 3]),
    actions=st.integers(2, 18),
    counts=st.tuples(st.sampled_from([1, 8, 64]), st.sampled_from([7, 32, 64]), st.sampled_from([5, 32])),
    flags=st.fixed_dictionaries(FLAGS),
)
def test_implicit_quantile(device, seed, size, actions, counts, flags):
    check_implicit(Case(seed, size, actions, device, **flags), *counts)


@pytest.mark.parametrize("loss", ["huber", "mse"])
@pytest.mark.parametrize("weighted", [False, True])
def test_regression(device, loss, weighted):
    case = Case(3, 37, 5, device)
    predicted, action, goal = case.output().requires_grad_(), case.batch.action, case.batch.reward
    weight = case.batch.weight if weighted else torch.ones(37, device=device)
    value = pick(predicted, action)
    errors = value_error(value, goal, loss, 0.7)
    total = (weight * errors).sum() / 11
    buffers = LossBuffers.like(predicted)
    regression_gradient(loss, 0.7, predicted, action, goal, weight if weighted else None, 11, buffers)
    close(buffers.per_sample, errors)
    close(buffers.total, total)
    close(buffers.q_mean, value.mean())
    close(buffers.gradient, torch.autograd.grad(total, predicted)[0])


def launches(case, dtype=torch.float32):
    """Return, for each kind of loss, outputs and a function that launches its kernel on them."""
    tau = torch.rand(case.size, 9, generator=case.generator).to(case.device)
    support, agent, batch = torch.linspace(-3, 3, 9, device=case.device), case.agent, case.batch
    values, entries = (Outputs(*(case.output(*shape).to(dtype) for _ in range(3))) for shape in ((), (9,)))
    return {
        "scalar": (values, lambda o, b, **k: scalar_gradient(agent, o, batch, b, **k)),
        "categorical": (entries, lambda o, b, **k: categorical_gradient(o, support, batch, b, **k)),
        "quantile": (entries, lambda o, b, **k: quantile_gradient(agent, o, tau, batch, b, **k)),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_outputs_are_computed_in_float32(device, kind):
    outputs, launch = launches(Case(1, 5, 4, device), torch.bfloat16)[kind]
    wide = Outputs(outputs.predicted.float(), outputs.following.float(), outputs.choosing.float())
    buffers, expected = LossBuffers.like(outputs.predicted), LossBuffers.like(wide.predicted)
    launch(outputs, buffers)
    launch(wide, expected)
    assert buffers.gradient.dtype == torch.bfloat16
    torch.testing.assert_close(buffers.gradient.float(), expected.gradient, rtol=2**-7, atol=1e-30)
    assert torch.equal(buffers.per_sample, expected.per_sample)
    assert torch.equal(buffers.metrics, expected.metrics)


@pytest.mark.parametrize("kind", KINDS)
def test_buffers_serve_again(device, kind):
    outputs, launch = launches(Case(1, 5, 4, device))[kind]
    buffers = LossBuffers.like(outputs.predicted)
    launch(outputs, buffers)
    before = [getattr(buffers, name).clone() for name in ("per_sample", "priority", "gradient", "metrics")]
    launch(outputs, buffers)
    after = [getattr(buffers, name) for name in ("per_sample", "priority", "gradient", "metrics")]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert buffers.ticket == 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_scale_multiplies_the_gradient_alone(device, kind):
    outputs, launch = launches(Case(1, 5, 4, device))[kind]
    plain, scaled = LossBuffers.like(outputs.predicted), LossBuffers.like(outputs.predicted)
    launch(outputs, plain)
    launch(outputs, scaled, loss_scale=torch.tensor(1024.0, device=device))
    assert torch.equal(plain.gradient * 1024, scaled.gradient)
    assert torch.equal(plain.metrics, scaled.metrics)


SPOILT = [(kind, where, bad) for kind in KINDS for where in ("reward", "predicted", "following") for bad in (NAN, INF)]
SPOILT.remove(("categorical", "reward", INF))  # an infinite return lies at the end of the support


@pytest.mark.parametrize(("kind", "where", "bad"), SPOILT)
def test_what_is_not_finite_shows_in_the_total(device, kind, where, bad):
    case = Case(2, 5, 4, device)
    outputs, launch = launches(case)[kind]
    if where == "reward":
        case.batch.reward[3] = bad
    elif where == "predicted":
        outputs.predicted[3] = bad
    else:
        case.batch.discount[3] = 0.9
        outputs.following[3] = bad
    buffers = LossBuffers.like(outputs.predicted)
    launch(outputs, buffers)
    assert not torch.isfinite(buffers.total)
    others = torch.arange(5, device=device) != 3
    assert torch.isfinite(buffers.per_sample[others]).all()
    assert torch.isfinite(buffers.gradient[others]).all()


def test_a_batch_with_strides_is_refused(device):
    case = Case(0, 6, 3, device)
    batch = SimpleNamespace(**{**vars(case.batch), "weight": torch.ones(1, device=device).expand(6)})
    outputs = Outputs(case.output(), case.output())
    with pytest.raises(ValueError, match="contiguous"):
        scalar_gradient(case.agent, outputs, batch, LossBuffers.like(outputs.predicted))


def test_soft_targets_need_the_present_values(device):
    case = Case(0, 6, 3, device, soft=True)
    outputs = Outputs(case.output(), case.output())
    with pytest.raises(ValueError, match="Munchausen"):
        scalar_gradient(case.agent, outputs, case.batch, LossBuffers.like(outputs.predicted))


def every_launch():
    """What `compile_for_hopper` compiles."""
    flat, mask = torch.zeros(32), torch.ones(32, 6, dtype=torch.bool)
    batch = TensorBatch({}, torch.zeros(32, dtype=torch.int64), flat, flat, {}, flat, mask, mask, 32)
    values, entries = torch.zeros(32, 6), torch.zeros(32, 6, 51, dtype=torch.bfloat16)
    plain, soft = ReplayAgent(), ReplayAgent(munchausen=MunchausenConfig())
    for agent, values_now, entries_now in ((plain, None, None), (soft, values, entries)):
        choosing = (values, entries) if agent is plain else (None, None)
        outputs = Outputs(values, values, choosing[0], values_now)
        scalar_gradient(agent, outputs, batch, LossBuffers.like(values), torch.ones(()))
        outputs = Outputs(entries, entries, choosing[1], entries_now)
        quantile_gradient(agent, outputs, torch.zeros(1, 51), batch, LossBuffers.like(entries))
    categorical_gradient(Outputs(entries, entries, entries), flat, batch, LossBuffers.like(entries))
    regression_gradient("mse", 1.0, values, batch.action, flat, None, 1, LossBuffers.like(values))


def test_every_kernel_compiles_for_a_gpu(tmp_path):
    code = compile_for_hopper("test_loss_kernels", tmp_path)
    assert len(code) == 6
    assert {name for ptx in code for name in re.findall(r"\.entry (\w+)", ptx)} == {
        "scalar_kernel", "categorical_kernel", "quantile_kernel",
    }  # fmt: skip
