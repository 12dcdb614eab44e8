"""Checks the loss and optimiser kernels against eager torch on a GPU and times both inside CUDA graphs.

    python benchmarks/gpu/update_kernels.py

Prints one table: microseconds of one call of each and the largest relative difference of their results. Without a CUDA
device it only checks, on tiny sizes, by Triton's interpreter.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"

from qfleet.accel.kernels import optim as optim_kernels  # noqa: E402  (reads the variable above)
from qfleet.accel.kernels.losses import (  # noqa: E402
    LossBuffers,
    Outputs,
    categorical_gradient,
    quantile_gradient,
    regression_gradient,
    scalar_gradient,
)
from qfleet.accel.kernels.optim import FlatAdam  # noqa: E402
from qfleet.algo.agent import HardTargetConfig, MunchausenConfig, ReplayAgent, SoftTargetConfig  # noqa: E402
from qfleet.algo.batch import TensorBatch  # noqa: E402
from qfleet.algo.heads import midpoints  # noqa: E402
from qfleet.algo.losses import quantile_huber, value_error  # noqa: E402
from qfleet.algo.optim import AdamConfig  # noqa: E402
from qfleet.algo.targets import bellman, greedy, pick, project, soft_log_policy, soft_value  # noqa: E402

DEVICE = torch.device("cuda" if CUDA else "cpu")
BATCHES = (32, 1024) if CUDA else (5,)
PARAMETERS = 1_693_362 if CUDA else 5_000
"""Of the Nature network with 6 actions, roughly."""
ACTIONS = 6
CALLS, REPLAYS = 20, 20
"""Calls in one graph and replays of it that are timed."""

Work = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """One row of the table; `eager` returns the per-sample loss and the gradient."""

    name: str
    batch: int
    eager: Callable[[], tuple[Tensor, Tensor]]
    kernel: Work
    buffers: LossBuffers


def main() -> None:
    start = time.perf_counter()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest")
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name() if CUDA else 'no CUDA device: checks only'}")
    print(f"{'what':<34}{'batch':>7}{'eager us':>10}{'kernel us':>11}{'loss diff':>11}{'grad diff':>11}")
    for batch in BATCHES:
        for case in loss_cases(batch):
            guarded(case.name, lambda case=case: loss_row(case))
    for rule in (HardTargetConfig(period=3), SoftTargetConfig(tau=0.005)):
        guarded("adam", lambda rule=rule: optimiser_rows(rule))
    print(f"{time.perf_counter() - start:.0f} s")


def guarded(name: str, work: Work) -> None:
    """Go on with the next row when one fails."""
    try:
        work()
    except Exception as error:
        print(f"{name:<34} FAILED: {type(error).__name__}: {str(error)[:300]}")


def loss_row(case: Case) -> None:
    case.kernel()
    loss, gradient = case.eager()
    losses = difference(case.buffers.per_sample, loss)
    gradients = difference(case.buffers.gradient, gradient)
    times = f"{graph_us(case.eager):>10}{graph_us(case.kernel):>11}"
    print(f"{case.name:<34}{case.batch:>7}{times}{losses:>11.1e}{gradients:>11.1e}", flush=True)


def difference(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference over the largest expected number."""
    return float((actual.double() - expected.double()).abs().max() / expected.double().abs().max())


def graph_us(work: Work) -> str:
    """Return the microseconds of one call, from replays of a graph of many."""
    if not CUDA:
        return "-"
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(CALLS):
                work()
        graph.replay()
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(REPLAYS):
            graph.replay()
        last.record()
    torch.cuda.synchronize()
    return f"{first.elapsed_time(last) * 1000 / (CALLS * REPLAYS):.2f}"


def random_batch(size: int) -> TensorBatch:
    mask = torch.rand(size, ACTIONS, device=DEVICE) < 0.7
    return TensorBatch(
        observation={},
        action=torch.randint(ACTIONS, (size,), device=DEVICE),
        reward=torch.randn(size, device=DEVICE),
        discount=0.97 * (torch.rand(size, device=DEVICE) < 0.9).float(),
        next_observation={},
        weight=torch.rand(size, device=DEVICE),
        mask=mask,
        next_mask=mask.flip(0).contiguous(),
        size=size,
    )


def outputs(size: int, *entries: int, dtype: torch.dtype = torch.float32, soft: bool = False) -> Outputs:
    tables = [torch.randn(size, ACTIONS, *entries, device=DEVICE, dtype=dtype) for _ in range(3)]
    tables[0].requires_grad_()
    return Outputs(*tables[:2], None, tables[2]) if soft else Outputs(*tables)


def loss_cases(size: int) -> Iterator[Case]:
    """Yield all losses at one batch size."""
    batch, plain, soft = random_batch(size), ReplayAgent(), ReplayAgent(munchausen=MunchausenConfig())

    def case(name: str, said: Outputs, errors: Callable[[], Tensor], kernel: Callable[[LossBuffers], None]) -> Case:
        def eager() -> tuple[Tensor, Tensor]:
            loss = errors()
            total = torch.dot(loss, batch.weight) / size
            return loss.detach(), torch.autograd.grad(total, said.predicted)[0]

        buffers = LossBuffers.like(said.predicted)
        return Case(name, size, eager, lambda: kernel(buffers), buffers)

    def values(said: Outputs, agent: ReplayAgent) -> Tensor:
        goal = eager_goal(agent, said, batch, said.following.float())
        return value_error(pick(said.predicted, batch.action).float(), goal, "huber", 1.0)

    for dtype in (torch.float32, torch.bfloat16):
        said = outputs(size, dtype=dtype)
        name = f"double values, {str(dtype).removeprefix('torch.')}"
        yield case(name, said, lambda s=said: values(s, plain), lambda b, s=said: scalar_gradient(plain, s, batch, b))
    said = outputs(size, soft=True)
    yield case(
        "munchausen values", said, lambda s=said: values(s, soft), lambda b, s=said: scalar_gradient(soft, s, batch, b)
    )
    yield case(
        "regression",
        said,
        lambda s=said: value_error(pick(s.predicted, batch.action), batch.reward, "mse", 1.0),
        lambda b, s=said: regression_gradient(
            "mse", 1.0, s.predicted, batch.action, batch.reward, batch.weight, size, b
        ),
    )
    said, support = outputs(size, 51), torch.linspace(-10, 10, 51, device=DEVICE)
    yield case(
        "double categorical 51",
        said,
        lambda s=said: eager_categorical(s, support, batch),
        lambda b, s=said: categorical_gradient(s, support, batch, b),
    )
    for count in (64, 200):
        said, taus = outputs(size, count), midpoints(count).to(DEVICE)
        yield case(
            f"double quantile {count}",
            said,
            lambda s=said, t=taus: quantile_huber(
                pick(s.predicted, batch.action), t, eager_goal(plain, s, batch, s.following), 1.0
            ),
            lambda b, s=said, t=taus: quantile_gradient(plain, s, t, batch, b),
        )


@torch.no_grad()
def eager_goal(agent: ReplayAgent, said: Outputs, batch: TensorBatch, following: Tensor) -> Tensor:
    def means(output: Tensor) -> Tensor:
        return output.float() if output.ndim == 2 else output.mean(-1)

    soft = agent.munchausen
    if soft is None or said.present is None:
        assert said.choosing is not None
        return bellman(batch.reward, batch.discount, greedy(following, means(said.choosing), batch.next_mask))
    chosen = pick(soft_log_policy(means(said.present), batch.mask, soft.temperature), batch.action)
    log_policy = soft_log_policy(means(following), batch.next_mask, soft.temperature)
    reward = batch.reward + soft.alpha * chosen.clamp(min=soft.clip)
    return bellman(reward, batch.discount, soft_value(following, log_policy, soft.temperature))


def eager_categorical(said: Outputs, support: Tensor, batch: TensorBatch) -> Tensor:
    assert said.choosing is not None
    with torch.no_grad():
        returns = bellman(batch.reward, batch.discount, support.expand(len(batch.action), -1))
        chosen = greedy(said.following, said.choosing.softmax(-1) @ support, batch.next_mask)
        goal = project(chosen.softmax(-1), returns, support)
    return -(goal * pick(said.predicted, batch.action).log_softmax(-1)).sum(-1)


class EagerAdam:
    """torch's fused Adam with clipping, a finite gate and the target rule, as far as a graph can hold them."""

    def __init__(self, parameters: Tensor, gradients: Tensor, target: Tensor, tau: float | None) -> None:
        self.parameter = torch.nn.Parameter(parameters.clone())
        self.parameter.grad = gradients
        self.target, self._tau = target.clone(), tau
        self._torch = torch.optim.Adam([self.parameter], fused=True, capturable=CUDA)

    def step(self) -> None:
        gradients = self.parameter.grad
        assert gradients is not None
        norm = torch.linalg.vector_norm(gradients)
        self._torch.found_inf = (~torch.isfinite(norm)).float()  # type: ignore[attr-defined]
        gradients.mul_((10.0 / (norm + 1e-6)).clamp_(max=1.0))
        self._torch.step()
        if self._tau is not None:
            self.target.lerp_(self.parameter.detach(), self._tau)


def optimiser_rows(rule: HardTargetConfig | SoftTargetConfig) -> None:
    """Compare 20 steps with torch's, then time both; the kernel with and without a bfloat16 copy, by block size."""
    default = optim_kernels._APPLIED
    for block in (512, 1024, 2048, 4096) if CUDA else (default,):
        optim_kernels._APPLIED = block
        for copied in (False, True) if block == default else (False,):
            guarded("adam", lambda block=block, copied=copied: optimiser_row(rule, block, copied))
    optim_kernels._APPLIED = default


def optimiser_row(rule: HardTargetConfig | SoftTargetConfig, block: int, copied: bool) -> None:
    parameters, target = (torch.randn(PARAMETERS, device=DEVICE) for _ in range(2))
    gradients, loss = torch.zeros_like(parameters), torch.ones((), device=DEVICE)
    copy = torch.empty_like(parameters, dtype=torch.bfloat16) if copied else None
    eager = EagerAdam(
        parameters, torch.zeros_like(parameters), target, rule.tau if isinstance(rule, SoftTargetConfig) else None
    )
    fast = FlatAdam(AdamConfig(), parameters, gradients, target, rule, (copy, None))
    for number in range(20):
        gradients.normal_()
        eager.parameter.grad.copy_(gradients)  # type: ignore[union-attr]
        fast.step(loss)
        eager.step()
        if isinstance(rule, HardTargetConfig) and (number + 1) % rule.period == 0:
            eager.target.copy_(eager.parameter.detach())
        gradients[number] = math.nan
        fast.step(loss)
    assert (fast.count.item(), fast.skipped.item()) == (20, 20), "the finite gate let a step through"
    assert copy is None or difference(copy, parameters) < 2**-7, "the copy does not follow"
    moved = difference(parameters, eager.parameter.detach()), difference(target, eager.target)
    gradients.normal_()
    name = f"adam {rule.kind} P={PARAMETERS / 1e6:.1f}M block {block}{' +bf16' if copied else ''}"
    times = f"{graph_us(eager.step):>10}{graph_us(lambda: fast.step(loss)):>11}"
    print(f"{name:<34}{'':>7}{times}{moved[0]:>11.1e}{moved[1]:>11.1e}", flush=True)


if __name__ == "__main__":
    main()
