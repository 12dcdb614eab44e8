"""Adam over flat parameters in two launches: one judges the gradient, one applies it and moves the target network.

Everything that a step decides (is it finite, how far is it clipped, is the target due) is decided on the device, so
that nothing waits and a recorded graph can contain any number of steps.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qfleet.accel.precision import LARGEST, SMALLEST, LossScale
from qfleet.algo.agent import HardTargetConfig, SoftTargetConfig
from qfleet.algo.optim import AdamConfig, AdamWConfig
from qfleet.core.errors import CheckpointError

_JUDGED = 8192
"""Gradients in one program of the first launch; 1.7 million are 208 programs, which an H200 runs at once."""
_APPLIED = 512
"""Parameters in one program of the second launch."""


class FlatAdam:
    """Adam or AdamW on tensors [P], with clipping, a finite gate and the target network's rule.

    A step whose loss or gradient is not finite changes nothing but `skipped` and the loss scale. Gradients are only
    read: they are neither clipped in place nor zeroed. In a group of learners all ranks must pass the same loss.
    """

    count: Tensor
    """Steps made, a scalar int64."""
    skipped: Tensor
    """Steps left out because something was not finite, a scalar int64."""
    rate: Tensor
    """Learning rate of the next step, a scalar; the caller fills it when the schedule moves."""
    made: Tensor
    """1 if the latest step was made, 0 if it was left out, a scalar."""
    norm: Tensor
    """The latest gradient's norm before clipping, a scalar."""
    pull: Tensor
    """How far the latest step moved the target network, a scalar: 0 not at all, 1 all the way."""

    def __init__(
        self,
        config: AdamConfig | AdamWConfig,
        parameters: Tensor,
        gradients: Tensor,
        target: Tensor | None = None,
        rule: HardTargetConfig | SoftTargetConfig | None = None,
        copies: tuple[Tensor | None, Tensor | None] = (None, None),
        scale: LossScale | None = None,
    ) -> None:
        """Take float32 tensors [P]; `copies` [P] of other types follow the parameters and the target.

        Gradients come multiplied by the `scale`, which each step adapts.
        """
        self._config, self._rule, self._scale = config, rule, scale
        self._parameters, self._gradients, self._target, self._copies = parameters, gradients, target, copies
        device = parameters.device
        self._exp_avg, self._exp_avg_sq = torch.zeros_like(parameters), torch.zeros_like(parameters)
        self.count, self.skipped = (torch.zeros((), dtype=torch.int64, device=device) for _ in range(2))
        self.rate = torch.full((), config.lr, device=device)
        self.norm = torch.zeros((), device=device)
        self._programs = triton.cdiv(parameters.numel(), _JUDGED)
        self._partials = torch.zeros(self._programs, device=device)
        self._ticket = torch.zeros(1, dtype=torch.int32, device=device)
        self._decision = torch.zeros(6, device=device)
        self.made, self.pull = self._decision[0], self._decision[5]
        logs = [math.log(beta) if beta > 0 else -math.inf for beta in config.betas]
        self._log_betas = torch.tensor(logs, dtype=torch.float64, device=device)
        self.refresh()

    def step(self, loss: Tensor) -> None:
        """Apply the gradients of a scalar loss, unless either is not finite."""
        self._judge(loss)
        self._apply()

    def refresh(self) -> None:
        """Write the copies anew; needed after parameters or target were changed by others."""
        for copy, original in zip(self._copies, (self._parameters, self._target), strict=True):
            if copy is not None and original is not None:
                copy.copy_(original)

    def state_dict(self) -> dict[str, Any]:
        """Return copies of all that later steps depend on, apart from parameters, target, rate and scale."""
        moments = {"step": self.count, "exp_avg": self._exp_avg, "exp_avg_sq": self._exp_avg_sq}
        return {
            "kind": self._config.kind,
            "moments": {name: value.clone() for name, value in moments.items()},
            "skipped": self.skipped.clone(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what this class's or `Optim`'s `state_dict` returned."""
        moments = state["moments"]
        size = moments["exp_avg"].numel() if moments else self._parameters.numel()
        if state["kind"] != self._config.kind or size != self._parameters.numel():
            raise CheckpointError(
                f"a saved {state['kind']} state of size {size} does not fit the optimiser {self._config.kind} of size"
                f" {self._parameters.numel()}: resume with the settings of the saved run"
            )
        for name, value in (("step", self.count), ("exp_avg", self._exp_avg), ("exp_avg_sq", self._exp_avg_sq)):
            value.copy_(moments[name]) if moments else value.zero_()
        self.skipped.copy_(state.get("skipped", torch.zeros(())))

    def _judge(self, loss: Tensor) -> None:
        config, rule, scale = self._config, self._rule, self._scale
        judge_kernel[(self._programs,)](
            *(self._gradients, loss, self.rate, self._log_betas, self.count, self.skipped, self.norm),
            *((None, None, None) if scale is None else (scale.value, scale.good, scale.overflows)),
            *(self._partials, self._ticket, self._decision),
            self._parameters.numel(),
            math.inf if config.max_grad_norm is None else config.max_grad_norm,
            config.weight_decay if isinstance(config, AdamWConfig) else 0.0,
            rule.tau if isinstance(rule, SoftTargetConfig) else 1.0,
            rule.period if isinstance(rule, HardTargetConfig) else 1,
            *(0 if scale is None else scale.interval, SMALLEST, LARGEST),
            PROGRAMS=self._programs,
            BLOCK=_JUDGED,
            num_warps=8,
        )

    def _apply(self) -> None:
        config, size = self._config, self._parameters.numel()
        apply_kernel[(triton.cdiv(size, _APPLIED),)](
            *(self._parameters, self._gradients, self._exp_avg, self._exp_avg_sq, self._target),
            *(*self._copies, self._decision, size),
            *(weight for beta in config.betas for weight in (beta, 1 - beta)),
            *(config.eps, 0.0 if isinstance(config, AdamWConfig) else config.weight_decay, config.l1),
            BLOCK=_APPLIED,
        )


@triton.jit
def judge_kernel(
    gradients, loss, rate, log_betas, count, skipped, norm, loss_scale, good, overflows, partials, ticket,
    decision, size, max_norm, weight_decay, tau, period, interval, smallest, largest,
    PROGRAMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum the squares of BLOCK gradients; the program that ends last decides what the step will be."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    gradient = tl.load(gradients + at, mask=at < size, other=0.0)
    tl.store(partials + tl.program_id(0), tl.sum(gradient * gradient))
    if tl.atomic_add(ticket, 1, sem="acq_rel") == PROGRAMS - 1:
        tl.store(ticket, 0)
        squares = tl.zeros([1024], tl.float32)  # always added in the same order: equal gradients have equal norms
        for start in range(0, PROGRAMS, 1024):
            part = start + tl.arange(0, 1024)
            squares += tl.load(partials + part, mask=part < PROGRAMS, other=0.0, cache_modifier=".cg")
        length = tl.sqrt(tl.sum(squares))
        shrink = 1.0
        if loss_scale is not None:
            shrink = 1 / tl.load(loss_scale)
            length *= shrink
        finite_loss = tl.abs(tl.load(loss)) < float("inf")
        made = (length < float("inf")) & finite_loss
        tl.store(norm, length)
        tl.store(skipped, tl.load(skipped) + (made == 0).to(tl.int64))
        steps = tl.load(count) + made.to(tl.int64)
        tl.store(count, steps)
        # In float32, 1 - 0.999^n would have lost most of its digits.
        bias = 1 - tl.exp(steps.to(tl.float64) * tl.load(log_betas))
        root = tl.sqrt(1 - tl.exp(steps.to(tl.float64) * tl.load(log_betas + 1)))
        speed = tl.load(rate)
        tl.store(decision, made.to(tl.float32))
        tl.store(decision + 1, tl.minimum(max_norm / (length + 1e-6), 1.0) * shrink)
        tl.store(decision + 2, (speed / bias).to(tl.float32))
        tl.store(decision + 3, root.to(tl.float32))
        tl.store(decision + 4, 1 - speed * weight_decay)
        tl.store(decision + 5, tl.where(made & (steps % period == 0), tau, 0.0))
        if loss_scale is not None:
            _adapt(loss_scale, good, overflows, made, finite_loss, interval, smallest, largest)


@triton.jit
def _adapt(loss_scale, good, overflows, made, finite_loss, interval, smallest, largest):
    """Halve the loss scale after an overflow, double it after `interval` good steps; see `LossScale`."""
    scale, streak, overflow = tl.load(loss_scale), tl.load(good) + 1, (made == 0) & finite_loss
    due = made & (streak == interval)
    tl.store(overflows, tl.load(overflows) + (overflow & (scale > smallest)).to(tl.int64))
    scale = tl.where(overflow, tl.maximum(scale / 2, smallest), scale)
    tl.store(loss_scale, tl.where(due, tl.minimum(scale * 2, largest), scale))
    tl.store(good, tl.where(made & (due == 0), streak, 0))


@triton.jit
def apply_kernel(
    parameters, gradients, exp_avg, exp_avg_sq, target, parameters_copy, target_copy, decision,
    size, keep_avg, take_avg, keep_sq, take_sq, eps, l2, l1,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Move BLOCK parameters and what follows them as `judge_kernel` has decided."""
    if tl.load(decision) != 0:
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        real = at < size
        parameter = tl.load(parameters + at, mask=real)
        sign = (parameter > 0).to(tl.float32) - (parameter < 0).to(tl.float32)
        gradient = tl.load(gradients + at, mask=real) * tl.load(decision + 1) + l1 * sign + l2 * parameter
        average = keep_avg * tl.load(exp_avg + at, mask=real) + take_avg * gradient
        square = keep_sq * tl.load(exp_avg_sq + at, mask=real) + take_sq * gradient * gradient
        step = tl.load(decision + 2) * average / (tl.sqrt(square) / tl.load(decision + 3) + eps)
        parameter = parameter * tl.load(decision + 4) - step
        tl.store(parameters + at, parameter, mask=real)
        tl.store(exp_avg + at, average, mask=real)
        tl.store(exp_avg_sq + at, square, mask=real)
        if parameters_copy is not None:
            tl.store(parameters_copy + at, parameter, mask=real)
        if target is not None:
            pull = tl.load(decision + 5)
            if pull > 0:
                old = tl.load(target + at, mask=real)
                way = parameter - old
                # Measured from the nearer end, so that a whole way arrives exactly.
                new = tl.where(pull < 0.5, old + pull * way, parameter - (1 - pull) * way)
                tl.store(target + at, new, mask=real)
                if target_copy is not None:
                    tl.store(target_copy + at, new, mask=real)
