"""The largest learner of one device: Double DQN of the Nature network, prioritised replay of a million frames."""

from __future__ import annotations

import torch
from torch import Tensor

from qfleet.accel.graphs import Recording
from qfleet.accel.replay import grid_type
from qfleet.algo.agent import ReplayAgent
from qfleet.algo.gradients import GradientFactory
from qfleet.algo.networks import build_network
from qfleet.algo.optim import AdamConfig
from qfleet.algo.steps import StepFactory
from qfleet.algo.torsos import NatureConfig
from qfleet.algo.updates import Learned, ReplayUpdate, build_update
from qfleet.core.spec import PLAIN, EnvSpec, LeafSpec
from qfleet.replay import PrioritisedConfig
from qfleet.replay.grid import Grid

ENVS, LENGTH = 64, 16_400
"""More than a million rows."""
ACTIONS = 18
SPEC = EnvSpec(
    name="frames", observations={PLAIN: LeafSpec(shape=(4, 84, 84), dtype="uint8", stack=4)}, actions=ACTIONS
)
AGENT = ReplayAgent(double=True)
OPTIM = AdamConfig(lr=1e-4, eps=1.5e-4)
ENDS = 1 / 200
"""Chance that an episode ends at a step."""
_TICKS, _ROWS = 16, 8192
"""Ticks in one recording of a filling; priorities in one write."""


def filled_grid(length: int, envs: int, generator: torch.Generator) -> Grid:
    """Return a full grid on the generator's device: random frames and priorities, episodes of random lengths."""
    device = generator.device
    sampler = PrioritisedConfig()
    made = grid_type(sampler, device, kernels=True)
    grid = made(SPEC, length, envs, AGENT.n_step, AGENT.gamma, sampler, device, generator)
    final = torch.zeros(envs, dtype=torch.bool, device=device)

    def some_ticks() -> None:
        for _ in range(_TICKS):
            _add_tick(grid, final)

    filling = Recording(some_ticks, (generator,), enabled=device.type == "cuda")
    for _ in range(0, length, _TICKS):
        filling()
    for rows in torch.split(torch.arange(grid.rows, device=device), _ROWS):
        priority = torch.rand(len(rows), generator=generator, device=device)
        grid.update_priorities(rows, grid.stamp.index_select(0, rows // envs), priority)
    return grid


def _add_tick(grid: Grid, final: Tensor) -> None:
    """Add one tick of noise; `final` [E] says which rows end an episode, and is moved on."""
    envs, generator = grid.envs, grid.generator
    shape, device = (envs, *SPEC.observations[PLAIN].frame_shape), generator.device
    frames = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator, device=device)
    end, kind, choice, luck = torch.rand(4, envs, generator=generator, device=device).unbind()
    ended = (end < ENDS) & ~final
    terminated, action = ended & (kind < 0.9), (choice * ACTIONS).long()
    grid.add({PLAIN: frames}, action, (luck * 3).floor() - 1, terminated, final, None)
    final.copy_(ended)


def build(gradient: GradientFactory, stepper: StepFactory, generator: torch.Generator) -> ReplayUpdate:
    """Return an update of a new network on the generator's device."""
    network = build_network(NatureConfig(), AGENT, SPEC, seed=1).to(generator.device)
    update = build_update(AGENT, network, OPTIM, generator, gradient=gradient, stepper=stepper)
    assert isinstance(update, ReplayUpdate)
    update.prepare()
    return update


class Learning:
    """Whole updates, some at once: draw, learn, let the target follow, write priorities back."""

    latest: Learned

    def __init__(self, grid: Grid, update: ReplayUpdate, batch: int, at_once: int, recorded: bool) -> None:
        self.grid, self.update, self.batch, self.at_once = grid, update, batch, at_once
        self.beta = torch.full((), 0.5, device=grid.stamp.device)
        self._work = Recording(self._learn, (grid.generator,), enabled=recorded)

    def __call__(self) -> None:
        """Make `at_once` updates."""
        self._work()

    def _learn(self) -> None:
        for _ in range(self.at_once):
            sample = self.grid.sample(self.batch, self.beta)
            self.latest = self.update.learn(sample.batch)
            self.grid.update_priorities(sample.index, sample.generation, self.latest.priority)


class Sampling:
    """Draws of whole batches, some at once, and nothing else."""

    def __init__(self, grid: Grid, batch: int, at_once: int, recorded: bool) -> None:
        self.at_once = at_once
        beta = torch.full((), 0.5, device=grid.stamp.device)

        def draw() -> None:
            for _ in range(at_once):
                grid.sample(batch, beta)

        self._work = Recording(draw, (grid.generator,), enabled=recorded)

    def __call__(self) -> None:
        """Draw `at_once` batches."""
        self._work()
