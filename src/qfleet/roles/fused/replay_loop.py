"""The fused loop of replay agents: act, store, draw, learn, write priorities back, all on one device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch

from qfleet.accel.replay import grid_type
from qfleet.algo.agent import ReplayAgent
from qfleet.algo.flat import FlatParameters
from qfleet.algo.schedules import Schedule
from qfleet.algo.updates import Learned, ReplayUpdate
from qfleet.core import seeding
from qfleet.core.role import State
from qfleet.core.tensors import TensorBatch
from qfleet.replay.grid import GridSample, split_sample
from qfleet.replay.grid_chunks import TickChunks
from qfleet.replay.samplers import UniformConfig
from qfleet.roles.fused.loop import Loop, Progress
from qfleet.roles.fused.memory import require_memory
from qfleet.roles.fused.setup import FusedSetup
from qfleet.roles.fused.team import Team
from qfleet.roles.learner_setup import LearnerConfig

TICKS = 32
"""Ticks of one eager piece: many enough that looking after the run costs nothing beside them."""
BATCHES = 8
"""Most batches that are drawn at once where each was to be drawn from the same rows."""
UPDATES = 256
"""Most updates of one piece, about: after each one the run is looked after, and a recorded one waits for the device."""
LONGEST = 256
"""Most ticks of one recording: each is hundreds of kernels."""
PARTS = 100
"""Pieces, at least, in which a schedule of exploration or of importance weights goes from its start to its end."""


def learning_begins(learner: LearnerConfig, agent: ReplayAgent, envs: int) -> int:
    """Return the transitions after which updates fall due: before, there is too little or nothing complete to draw."""
    return max(learner.learning_starts, (agent.n_step + 1) * envs)


class ReplayLoop(Loop):
    """One network and its target, a grid of rows, and E environments."""

    update: ReplayUpdate

    def __init__(self, setup: FusedSetup, team: Team | None = None) -> None:
        super().__init__(setup, team)
        assert isinstance(setup.agent, ReplayAgent)
        self._agent, envs = setup.agent, setup.actor.envs
        require_memory(setup, self.update.flat.parameters.numel())
        length = max(setup.replay.capacity // envs, 1)
        window = self._agent.n_step, self._agent.gamma
        made_by = grid_type(setup.replay.sampler, self.device, self.choices.settings.kernels)
        drawing = self.learning
        if team is not None:  # ranks learn with the same noise, but draw by themselves
            drawing = seeding.torch_stream(setup.seed, "fused", setup.rank, "draw", device=self.device)
        self.grid = made_by(setup.spec, length, setup.envs, *window, setup.replay.sampler, self.device, drawing)
        self._chunks = TickChunks(self.grid)
        self._drawn = BATCHES if isinstance(setup.replay.sampler, UniformConfig) else 1
        """Batches that may be drawn at once: what is learned from one changes the priorities for the next."""
        self._beta = torch.zeros((), device=self.device)
        self._ticks = self._tried = 0
        self._latest: Learned | None = None
        self._of_cycle: Learned | None = None
        self._of_single: Learned | None = None
        """What the last update in a cycle, and the last one outside, came to: each recording has its own memory."""
        self._streak = 0
        self._two_modes = self.update.online.has_dropout or setup.code.network is not None
        """Whether the network acts in another mode than it learns in."""
        schedules = [it for it in (setup.exploration, setup.beta) if isinstance(it, Schedule)]
        self._schedules = [schedule for schedule in schedules if schedule.end not in (None, schedule.start)]
        """Those that move."""
        self._begins = learning_begins(setup.learner, self._agent, envs)
        per_tick = envs / setup.learner.train_period
        updates, ticks = max(round(per_tick), 1), max(round(1 / per_tick), 1)
        self._repeats = max(min(self.choices.settings.graph_updates // updates, LONGEST // ticks), 1)
        self._cycle_updates, self._cycle_ticks = updates * self._repeats, ticks * self._repeats
        self._cycles = max(UPDATES // self._cycle_updates, 1) if max(updates, ticks) <= LONGEST else 0
        """Cycles of one piece at most; 0 where a recording of one would be too long."""
        self._acting, self._learning = self.recording(self._act), self.recording(self._learn_once)
        self._cycling = self.recording(self._cycle)

    @property
    def evaluated(self) -> FlatParameters:
        """The target's weights, or the online network's."""
        return self.update.target_flat if self.setup.learner.evaluated == "target" else self.update.flat

    @property
    def over(self) -> bool:
        """Whether the budget is spent, and nothing is left to be learned."""
        return super().over and self._owed() <= 0

    def advance(self) -> Progress:
        """Act for some ticks, and learn as often as the transitions so far ask for."""
        before, steps, tried = self.update.updates, self.steps, self._tried
        self.update.prepare()
        if self.choices.recorded:
            self._advance_recorded()
        else:
            self._advance_eagerly()
        made, tried = self.update.updates - before, self._tried - tried
        streak = tried - made if made == 0 else self._streak
        return Progress(self.steps - steps, made, tried, tried - made, streak)

    def _advance_eagerly(self) -> None:
        """Tick by tick: after each one learn what is owed."""
        tried = self._tried
        for _ in range(TICKS):
            if self._owed() <= 0:
                self._run_ticks(1)
            self._settle()
            if self.steps >= self.setup.env_steps or self._tried - tried >= UPDATES:
                break

    def _advance_recorded(self) -> None:
        """Many cycles of acting and learning at once, in about the right ratio; then settle the difference."""
        if self._owed() <= 0:
            self._run_until_due()
        self._settle()

    def _run_until_due(self) -> None:
        """Act and learn as long as nothing else is due, or act only where learning is ahead or not begun."""
        room = self._room()
        if not self._learns():
            self._run_ticks(min(TICKS, room))
            return
        ahead = min(int(-self._owed() * self.setup.learner.train_period / self.setup.actor.envs), room)
        cycles = min(self._cycles, (room - ahead) // self._cycle_ticks)
        if ahead or not cycles:
            self._run_ticks(ahead or min(TICKS, room))
        if cycles:
            self._run_cycles(cycles)

    def _room(self) -> int:
        """Return the ticks, at least one, before the budget, an evaluation or the beginning of learning is due."""
        every = self.setup.evaluation.every
        due = (self.setup.env_steps, self._begins, (self.steps // every + 1) * every)
        return max(min(step - self.steps for step in due if step > self.steps) // self.setup.actor.envs, 1)

    def _run_cycles(self, cycles: int) -> None:
        steps = self._cycle_ticks * self.setup.actor.envs
        moving = [schedule.steps for schedule in self._schedules if self.steps < schedule.steps]
        stride = max(min(moving) // (PARTS * steps), 1) if moving else cycles
        for done in range(cycles):
            if done % stride == 0:
                self._prepare(done * steps)  # about: to know how many were resets, one would have to wait
            self._cycling()
        self._latest = self._of_cycle
        self._ticks += cycles * self._cycle_ticks
        self._tried += cycles * self._cycle_updates
        self.count_steps()

    def _run_ticks(self, ticks: int) -> None:
        self._prepare()
        for _ in range(ticks):
            self._acting()
        self._ticks += ticks
        self.count_steps()

    def _settle(self) -> None:
        """Learn what the transitions so far ask for beyond what was learned.

        That is done in pieces of bounded size: what is left over comes first in the next one, before anything is acted.
        """
        owed = min(self._owed(), UPDATES)
        while owed > 0:
            drawn = 1 if self.choices.recorded else min(owed, self._drawn)
            if drawn > 1:
                self._learn_several(drawn)
            else:
                self._learning()
            self._latest = self._of_single
            self._tried += drawn
            owed -= drawn

    def _learns(self) -> bool:
        """Return whether there is enough to learn from."""
        return self.steps >= self._begins and self._ticks > self._agent.n_step + 1

    def _owed(self) -> int:
        """Return how many updates the transitions so far ask for beyond those that were tried; may be below 0."""
        if not self._learns():
            return 0
        return math.floor((self.steps - self._begins) / self.setup.learner.train_period) - self._tried

    def _prepare(self, further: int = 0) -> None:
        """Bring exploration and importance weights up to where the run is, or is some steps further."""
        self.set_epsilon(further)
        self._beta.fill_(self.setup.beta.at(self.steps + further))

    def _cycle(self) -> None:
        for _ in range(self._repeats):
            for _ in range(self._cycle_ticks // self._repeats):
                self._act()
            for _ in range(self._cycle_updates // self._repeats):
                self._of_cycle = self._learn()

    def _act(self) -> None:
        if self._two_modes:
            self.update.online.explore()
        ticked, reward = self.tick()
        self.grid.add(ticked.observation, ticked.action, reward, ticked.outcome.terminated, ticked.final, ticked.mask)

    def _learn_once(self) -> None:
        self._of_single = self._learn()

    def _learn_several(self, count: int) -> None:
        """Learn from several batches that were drawn at once: to draw one alone takes nearly as long."""
        for sample in split_sample(self.grid.sample(count * self.setup.batch, self._beta), count):
            self._of_single = self._learn_from(sample)

    def _learn(self) -> Learned:
        return self._learn_from(self.grid.sample(self.setup.batch, self._beta))

    def _learn_from(self, sample: GridSample) -> Learned:
        if self._two_modes:
            self.update.online.train()
        learned = self.update.learn(sample.batch if self.team is None else self._part(sample.batch, self.team))
        self._streak = self._streak + 1 if learned.made is False else 0
        if learned.made is not False:
            self.grid.update_priorities(sample.index, sample.generation, learned.priority)
        return learned

    def _part(self, batch: TensorBatch, team: Team) -> TensorBatch:
        """Return a batch as this rank's part of the whole one, with weights over the maximum of all ranks."""
        weight = batch.weight
        if self.grid.priorities is not None:
            tree = self.grid.priorities.tree
            unlikeliest = tree.total / tree.minimum
            weight = weight * (unlikeliest / team.largest(unlikeliest)) ** self._beta
        return replace(batch, weight=weight, size=self.setup.learner.batch_size)

    def metrics(self) -> Mapping[str, float]:
        """Return the numbers worth watching. Waits for the device."""
        latest = {} if self._latest is None else self._latest.metrics
        numbers = {name: float(value) for name, value in latest.items()}
        replay = {
            "replay_size": float(self.grid.count),
            "replay_fill": min(self._ticks / self.grid.length, 1.0),
            "samples_per_insert": self._tried * self.setup.learner.batch_size / max(self.steps, 1),
        }
        return {**super().metrics(), **numbers, **replay}

    def state_dict(self) -> State:
        """Return everything that the loop's future depends on; the older ticks of its replay are chunks."""
        return self._with(self._chunks.state_dict(), super().state_dict())

    def whole_state(self) -> State:
        """Return the same with all ticks."""
        return self._with(self.grid.state_dict(), super().state_dict())

    def _with(self, grid: State, state: State) -> State:
        return {**state, "grid": grid, "counters": [self._ticks, self._tried]}

    def load_state_dict(self, state: State) -> None:
        """Continue."""
        super().load_state_dict(state)
        self._chunks.load_state_dict(state["grid"])
        self._ticks, self._tried = state["counters"]
