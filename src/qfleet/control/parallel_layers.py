"""Measures one update of a run's network, as a whole and layer by layer, with as many rows as ranks may have."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from qfleet.algo.agent import ReplayAgent
from qfleet.algo.networks import QNetwork, build_network
from qfleet.algo.steps import GradientStep
from qfleet.algo.updates import ReplayUpdate, build_update
from qfleet.control.candidates import format_put_back
from qfleet.control.parallel_parts import Layer, Work
from qfleet.control.parallel_samples import call_seconds, quiet, rising, sample
from qfleet.core.errors import ConfigError
from qfleet.core.spec import EnvSpec
from qfleet.core.tensors import TensorBatch
from qfleet.roles.learner import Learner
from qfleet.roles.learner_setup import LearnerSetup
from qfleet.roles.learning import build_learning

PARTS = (1, 2, 4, 8)
"""Numbers of ranks whose rows are timed; between them a line is drawn."""
UPDATE_S = 0.4
"""How long whole updates of one size are timed."""
LAYER_S = 0.03
"""How long each pass of a layer is timed."""
Timed = Callable[[Callable[[], object], float], list[float]]
"""Calls a piece of work for about so many seconds, and returns the seconds of each call."""


def measure_layers(setup: LearnerSetup, timed: Timed | None = None) -> Work:
    """Return what one update of a learner costs; the learner must learn from single transitions of a replay."""
    agent, device = setup.agent, torch.device(setup.device)
    if not isinstance(agent, ReplayAgent) or agent.memory is not None:
        raise ConfigError("plans of several learners are for agents that learn from single transitions of a replay")
    timed = timed or partial(call_seconds, device=device)
    sizes = sorted({max(1, setup.learner.batch_size // parts) for parts in PARTS})
    with format_put_back():
        learned = build_learning(setup, Learner.kind, None).update
    assert isinstance(learned, ReplayUpdate)
    spent = {rows: timed(partial(learned.learn, sample(setup.spec, rows, device)), UPDATE_S) for rows in sizes}
    network = build_network(setup.network, agent, setup.spec, seed=setup.seed, custom=setup.code.network).to(device)
    layers = _layers(network, setup.spec, sizes, timed)
    step, moments = _step(setup, network, timed)
    passes = 2 if agent.double else 1
    eager = build_update(agent, network, setup.optim, torch.Generator(device), total_updates=setup.total_updates)
    assert isinstance(eager, ReplayUpdate)
    rest = []
    for number, rows in enumerate(sizes):
        whole = quiet(timed(partial(eager.learn, sample(setup.spec, rows, device)), UPDATE_S))
        inside = sum((1 + passes) * one.forward[number][1] + one.backward[number][1] for one in layers)
        rest.append((rows, max(0.0, whole - inside - step)))
    return Work(
        batch=setup.learner.batch_size,
        update=rising([(rows, quiet(spent[rows])) for rows in sizes]),
        layers=layers,
        rest=rising(rest),
        step=step,
        passes=passes,
        moments=moments,
        spread=_spread(spent[sizes[-1]]),
    )


def _spread(seconds: list[float]) -> float:
    """Return the standard deviation as a part of the median, read off the middle half: single hiccups are not it."""
    low, middle, high = statistics.quantiles(seconds, n=4)
    return 0.7413 * (high - low) / middle


def _step(setup: LearnerSetup, network: QNetwork, timed: Timed) -> tuple[float, int]:
    """Return the seconds of clipping and optimiser, and the values that it keeps for each parameter."""
    step = GradientStep(network, setup.optim, setup.total_updates, None)
    loss = torch.zeros((), device=step.flat.parameters.device)
    seconds = quiet(timed(lambda: step(loss), LAYER_S))
    kept = step.optim.state_dict()["moments"].values()
    size = step.flat.parameters.numel()
    return seconds, sum(isinstance(value, Tensor) and value.numel() == size for value in kept)


def _layers(network: QNetwork, spec: EnvSpec, sizes: list[int], timed: Timed) -> tuple[Layer, ...]:
    """Return the network's outermost modules that have parameters of their own, in the order of their calls."""
    device = next(network.parameters()).device
    seen = {rows: _inputs(network, sample(spec, rows, device)) for rows in sizes}
    names = {module: name for name, module in network.named_modules()}
    layers: list[Layer] = []
    for module in seen[sizes[0]]:
        passes = [(rows, *_passes(module, seen[rows][module], bool(layers), timed)) for rows in sizes]
        rows, given = sizes[-1], seen[sizes[-1]][module]
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            made = _first(module(*given))
        layers.append(
            Layer(
                name=names[module],
                parameters=sum(parameter.numel() for parameter in module.parameters()),
                inputs=_first(given).numel() // rows,
                outputs=made.numel() // rows,
                units=_units(module),
                flops=counter.get_total_flops() / rows,
                forward=rising([(rows, forward) for rows, forward, _ in passes]),
                backward=rising([(rows, backward) for rows, _, backward in passes]),
            )
        )
    return tuple(layers)


def _inputs(network: QNetwork, batch: TensorBatch) -> dict[nn.Module, tuple[Any, ...]]:
    """Return what each layer was called with, in the order of the first calls."""
    chosen: list[nn.Module] = []
    seen: dict[nn.Module, tuple[Any, ...]] = {}
    inside: set[nn.Module] = set()
    for module in network.modules():
        if module not in inside and next(module.parameters(recurse=False), None) is not None:
            chosen.append(module)
            inside.update(module.modules())

    def note(module: nn.Module, given: tuple[Any, ...]) -> None:
        seen.setdefault(module, given)

    hooks = [module.register_forward_pre_hook(note) for module in chosen]
    with torch.no_grad():
        network(batch.observation)
    for hook in hooks:
        hook.remove()
    return seen


def _passes(module: nn.Module, given: tuple[Any, ...], inner: bool, timed: Timed) -> tuple[float, float]:
    """Return the seconds of a layer's forward and backward pass; only inner layers need their input's gradient."""
    wanted = [
        one.detach().requires_grad_(inner) if isinstance(one, Tensor) and one.is_floating_point() else one
        for one in given
    ]

    def forward() -> None:
        with torch.no_grad():
            module(*given)

    def both() -> None:
        made = _first(module(*wanted))
        torch.autograd.backward(made, torch.ones_like(made))

    alone, together = (quiet(timed(work, LAYER_S)) for work in (forward, both))
    return alone, max(0.0, together - alone)


def _first(values: Any) -> Tensor:
    """Return the tensor of a call's arguments or results that the data go through."""
    found = values if isinstance(values, Tensor) else values[0]
    assert isinstance(found, Tensor)
    return found


def _units(module: nn.Module) -> int:
    """Return the features or channels that tensor ranks can share, 0 for a layer of another kind."""
    if isinstance(module, nn.Linear):
        return module.out_features
    return module.out_channels if isinstance(module, nn.Conv2d) else 0
