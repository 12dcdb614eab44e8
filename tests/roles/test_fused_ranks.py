"""Fused loops that learn as one: together they do what one loop does with all of their data."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from role_cases import Edge

from qfleet.accel import choices
from qfleet.accel.hardware import Hardware
from qfleet.accel.mlp import MlpGradient
from qfleet.algo.flat import FlatParameters
from qfleet.algo.gradients import EagerGradient
from qfleet.algo.networks import build_network
from qfleet.algo.rollouts import RolloutTensors
from qfleet.core.spec import PLAIN
from qfleet.core.tensors import TensorBatch
from qfleet.core.usercode import UserCode
from qfleet.envs import env_spec
from qfleet.experiment import with_changes
from qfleet.parallel.plan import ParallelConfig
from qfleet.presets import preset
from qfleet.presets.algorithms import apply
from qfleet.roles.fused import FusedHandles, FusedSetup
from qfleet.roles.fused.choices import choose
from qfleet.roles.fused.replay_loop import ReplayLoop
from qfleet.roles.fused.rollout_loop import RolloutLoop
from qfleet.roles.fused.shares import SharedGradient
from qfleet.roles.fused.snapshots import Snapshots
from qfleet.roles.fused.team import Team
from qfleet.roles.learner_setup import GroupConfig
from qfleet.roles.twin import FusedTwin, TwinHandles
from qfleet.runtime.keeps import LocalKeep
from qfleet.setups import fused_setup

RANKS = 2
SMALL: dict[str, Any] = {
    "device": "cpu",
    "actor.envs": 8,
    "optim": {"kind": "sgd", "lr": 0.1},
    "evaluation.target": None,
}
Result = TypeVar("Result")
BUILDING = threading.Lock()  # threads share torch's own random numbers, which networks are filled with


def setup(algo: str, name: str = "cartpole", **changes: Any) -> FusedSetup:
    small = SMALL if name != "cartpole" else {**SMALL, "network.hidden": [16]}
    if algo == "pqn":
        small = {**small, "agent.minibatches": 1, "agent.epochs": 3, "agent.rollout_length": 40}
    else:
        small = {**small, "learner.learning_starts": 64, "learner.batch_size": 32}
    experiment = with_changes(apply(preset(name), algo), {**small, **changes})
    return fused_setup(experiment, env_spec(experiment.env), UserCode())


def as_ranks(run: FusedSetup, work: Callable[[FusedSetup, Team], Result]) -> list[Result]:
    """Return what the work returned on each rank of a real group; the ranks are threads."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(RANKS) as pool:

        def rank(number: int) -> Result:
            place = GroupConfig(number, RANKS, f"file://{folder}/meet")
            team = Team(place, run.parallel, run.seed, life=0, device="cpu")
            try:
                return work(replace(run, group=place), team)
            finally:
                team.close()

        return list(pool.map(rank, range(RANKS)))


def built(kind: type[Any], run: FusedSetup, team: Team) -> Any:
    with BUILDING:
        return kind(run, team)


def joined(parts: list[RolloutTensors]) -> RolloutTensors:
    return RolloutTensors(
        observation={name: torch.cat([part.observation[name] for part in parts]) for name in parts[0].observation},
        action=torch.cat([part.action for part in parts]),
        goal=torch.cat([part.goal for part in parts]),
        weight=torch.cat([part.weight for part in parts]),
    )


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize(
    ("name", "changes"), [("cartpole", {}), ("cartpole", {"accel.kernels": "off"}), ("minatar:breakout", {})]
)
def test_ranks_learn_from_their_rollouts_what_one_loop_learns_from_all(name: str, changes: dict[str, Any]) -> None:
    run = setup("pqn", name, **changes)

    def learned(own: FusedSetup, team: Team) -> tuple[RolloutTensors, torch.Tensor]:
        loop = built(RolloutLoop, own, team)
        loop.set_epsilon()
        data = loop._play()
        loop.update.learn(data)
        return data, loop.update.flat.parameters

    (first, ours), (second, theirs) = as_ranks(run, learned)
    assert torch.equal(ours, theirs)
    assert first.weight is not None
    assert second.weight is not None
    assert first.weight.sum() != second.weight.sum(), "a mean of means would be another one"
    assert not torch.equal(first.observation[PLAIN], second.observation[PLAIN])
    alone = RolloutLoop(run)
    start = alone.update.flat.parameters.clone()
    alone.update.learn(joined([first, second]))
    assert relative(ours - start, alone.update.flat.parameters - start) < 1e-5


def union(parts: list[TensorBatch]) -> TensorBatch:
    whole = {
        field: torch.cat([getattr(part, field) for part in parts])
        for field in ("action", "reward", "discount", "weight")
    }
    seen, following = (
        {PLAIN: torch.cat([getattr(part, field)[PLAIN] for part in parts])}
        for field in ("observation", "next_observation")
    )
    size = sum(len(part.action) for part in parts)
    return TensorBatch(observation=seen, next_observation=following, mask=None, next_mask=None, size=size, **whole)


@pytest.mark.parametrize("algo", ["dqn", "prioritised"])
def test_ranks_learn_from_their_batches_what_one_loop_learns_from_all(algo: str) -> None:
    run = setup(algo, **{"agent.noisy": False})

    def learned(own: FusedSetup, team: Team) -> tuple[list[TensorBatch], torch.Tensor, torch.Tensor]:
        loop, batches = built(ReplayLoop, own, team), []
        learn = loop.update.learn
        loop.update.learn = lambda batch: (batches.append(batch), learn(batch))[1]
        while len(batches) < 20:
            loop.advance()
        return batches, loop.update.flat.parameters, loop.update.target_flat.parameters

    (first, ours, our_target), (second, theirs, their_target) = as_ranks(run, learned)
    assert torch.equal(ours, theirs)
    assert torch.equal(our_target, their_target)
    assert {len(batch.action) for batch in first} == {16}
    alone = ReplayLoop(run)
    start = alone.update.flat.parameters.clone()
    for parts in zip(first, second, strict=True):
        alone.update.learn(union(list(parts)))
    assert relative(ours - start, alone.update.flat.parameters - start) < 1e-5
    assert relative(our_target - start, alone.update.target_flat.parameters - start) < 1e-5


def test_importance_weights_are_those_of_one_draw_over_all_ranks() -> None:
    run = setup("prioritised", **{"replay.sampler.beta_start": 0.7, "replay.sampler.alpha": 1.0})

    def drawn(own: FusedSetup, team: Team) -> tuple[np.ndarray, np.ndarray, float, float]:
        loop = built(ReplayLoop, own, team)
        while loop.update.updates < 30:
            loop.advance()
        sample = loop.grid.sample(16, loop._beta)
        leaves = loop.grid.priorities.tree.leaves.double().numpy()
        chance = leaves[leaves > 0] / leaves.sum() / RANKS  # of a draw from all ranks, each of which has its share
        own_chance = leaves[sample.index.numpy()] / leaves.sum() / RANKS
        return own_chance, loop._part(sample.batch, team).weight.numpy(), chance.min(), float(loop._beta)

    found = as_ranks(run, drawn)
    least = min(smallest for _, _, smallest, _ in found)
    for chance, weight, _, beta in found:
        np.testing.assert_allclose(weight, (least / chance) ** beta, rtol=1e-4)
    assert found[0][2] != pytest.approx(found[1][2], rel=1e-3)


def test_all_ranks_stand_at_the_same_step_of_the_run() -> None:
    def stepped(own: FusedSetup, team: Team) -> tuple[int, int, int, int, float]:
        loop = built(ReplayLoop, own, team)
        for _ in range(4):
            loop.advance()
        return loop.steps, int(loop.player.steps), loop.update.updates, loop._tried, float(loop._epsilon[0])

    first, second = as_ranks(setup("dqn"), stepped)
    assert first[0] == second[0] == first[1] + second[1]
    assert first[2:] == second[2:]
    assert first[2] == (first[0] - 64) // 8


def test_every_environment_of_the_run_has_its_own_rung_of_the_ladder() -> None:
    run = setup("dqn", **{"exploration.kind": "ladder"})
    shares = as_ranks(run, lambda own, team: built(ReplayLoop, own, team)._epsilon)
    assert torch.equal(torch.cat(shares), ReplayLoop(run)._epsilon)


@pytest.mark.parametrize(("kind", "algo"), [(ReplayLoop, "dqn"), (RolloutLoop, "pqn")])
def test_a_loss_that_is_not_finite_is_skipped_by_all_and_its_rank_is_named(kind: type[Any], algo: str) -> None:
    def spoiled(own: FusedSetup, team: Team) -> tuple[int, int, list[int], bool]:
        loop = built(kind, own, team)
        tick, start = loop.tick, loop.update.flat.parameters.clone()
        if own.rank == 1:
            loop.tick = lambda: (lambda ticked, reward: (ticked, reward * torch.nan))(*tick())
        progress = loop.advance()
        while not progress.batches:
            progress = loop.advance()
        return progress.updates, progress.skipped, team.blamed(), torch.equal(start, loop.update.flat.parameters)

    first, second = as_ranks(setup(algo), spoiled)
    assert first == second
    assert first[0] == 0
    assert first[1] > 0
    assert first[2:] == ([1], True)


def test_a_rank_that_learns_apart_and_skips_updates_is_named_by_the_first() -> None:
    parallel = ParallelConfig.model_validate({"update": {"kind": "local", "period": 3}})
    run = replace(setup("pqn", **{"learner.skips": 100}), parallel=parallel)
    setups = tuple(replace(run, group=GroupConfig(rank, RANKS, "")) for rank in range(RANKS))
    events = Edge()
    handles = tuple(FusedHandles(events if rank == 0 else None, Edge(), Edge(), Edge()) for rank in range(RANKS))
    twin = FusedTwin(setups, TwinHandles(handles))
    spoiled: Any = twin._ranks[1]
    tick = spoiled._loop.tick
    spoiled._loop.tick = lambda: (lambda ticked, reward: (ticked, reward * torch.nan))(*tick())
    while not events.queue or events.queue[-1].kind != "skipped_update":
        twin.step()
    assert events.queue[-1].text == "3 updates of rank 1 before update 4 were not finite: skipped"
    assert spoiled.metrics()["skipped_updates"] == 3
    twin.close()


def test_ranks_that_learn_apart_meet_and_then_are_the_same() -> None:
    parallel = ParallelConfig.model_validate({"update": {"kind": "local", "period": 3}})

    def learned(own: FusedSetup, team: Team) -> list[torch.Tensor]:
        loop, weights = built(RolloutLoop, own, team), []
        for _ in range(3):
            loop.update.learn(loop._play())
            weights.append(loop.update.flat.parameters.clone())
        return weights

    first, second = as_ranks(replace(setup("pqn", **{"agent.epochs": 2}), parallel=parallel), learned)
    same = [torch.equal(ours, theirs) for ours, theirs in zip(first, second, strict=True)]
    assert same == [False, False, True], "after two, four and six updates"


@settings(max_examples=40, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("kind", [EagerGradient, MlpGradient])
def test_the_parts_of_a_minibatch_add_up_to_the_whole(kind: type[Any], data: st.DataObject) -> None:
    run = setup("pqn")
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    total = sum(sizes)
    weight = torch.tensor(data.draw(st.lists(st.sampled_from([0.0, 1.0]), min_size=total, max_size=total)))
    rng = torch.Generator().manual_seed(total)
    seen, goal = torch.randn(total, 4, generator=rng), torch.randn(total, generator=rng)
    action = torch.randint(2, (total,), generator=rng)
    network = build_network(run.network, run.agent, run.spec, seed=1)
    flat = FlatParameters(network)
    own = kind(run.agent, flat, network, None)

    def gradient(of: Any, rows: slice) -> torch.Tensor:
        of.regression({PLAIN: seen[rows]}, action[rows], goal[rows], weight[rows])
        return flat.gradients.clone()

    part = SharedGradient(own, lambda value: weight.sum())
    ends = np.cumsum(sizes).tolist()
    parts = [gradient(part, slice(end - size, end)) for size, end in zip(sizes, ends, strict=True)]
    torch.testing.assert_close(sum(parts), gradient(own, slice(None)), rtol=1e-5, atol=1e-6)


class Kept(LocalKeep):
    """What a rank leaves to its next life."""

    def again(self, life: int) -> Kept:
        self.life = life
        return self


def test_after_a_death_all_ranks_go_on_from_the_newest_state_that_every_one_has() -> None:
    def lives(own: FusedSetup, team: Team) -> list[Any]:
        keep = Kept()
        snapshots = Snapshots(keep, team)
        snapshots.commit({"at": 1})
        snapshots.commit({"at": 2})
        if own.rank == 0:
            snapshots.commit({"at": 3})  # the other one dies before
        second = Snapshots(keep.again(1), team)
        restored = [second.restore()]
        if own.rank == 1:
            second.commit({"at": 2})  # now the other one dies before
        third = Snapshots(keep.again(2), team)
        restored.append(third.restore())
        third.commit({"at": 4})
        return [*restored, Snapshots(keep.again(3), team).restore()]

    assert as_ranks(setup("pqn"), lives) == [[{"at": 2}, {"at": 2}, {"at": 4}]] * 2


def test_a_death_before_the_first_snapshot_begins_anew() -> None:
    def restored(own: FusedSetup, team: Team) -> Any:
        snapshots = Snapshots(keep := Kept(), team)
        if own.rank == 0:
            snapshots.commit({"at": 1})
        return Snapshots(keep.again(1), team).restore()

    assert as_ranks(setup("pqn"), restored) == [None, None]


def test_nothing_is_recorded_between_whose_parts_ranks_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "look", lambda device: Hardware("cuda", "some GPU", (9, 0)))
    run = setup("dqn", **{"optim.kind": "adam", "accel.graphs": "on", "accel.kernels": "off", "accel.compile": "off"})
    network = build_network(run.network, run.agent, run.spec, seed=1)
    chosen = choose(replace(run, group=GroupConfig(0, 2, "file:///nowhere")), network)
    assert not chosen.recorded
    assert "graphs off: ranks sum their gradients before each step" in chosen.description
