"""A gradient worker: what it sends, when it takes which weights, and what it does with batches that are not finite."""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from role_cases import Edge, random_batch
from serving_cases import Fleet, feed, learner_setup, part_of

from qfleet.accel.config import AccelConfig
from qfleet.algo.agent import HardTargetConfig, ReplayAgent, RolloutAgent, SoftTargetConfig
from qfleet.algo.heads import QuantileConfig
from qfleet.algo.optim import AdamConfig, SgdConfig
from qfleet.core import codec
from qfleet.core.errors import CheckpointError, ConfigError, QfleetError
from qfleet.core.gradients import ParameterSlice
from qfleet.core.role import DONE, WORKED, Idle
from qfleet.core.types import Batch, Version
from qfleet.parallel.compression.config import (
    Bf16Config,
    Fp16Config,
    Int8Config,
    PowerSgdConfig,
    SignConfig,
    TopKConfig,
)
from qfleet.roles.learner import Learner, LearnerHandles
from qfleet.roles.learner_setup import LearnerConfig, LearnerSetup

ALL = [
    ReplayAgent(),
    ReplayAgent(target=HardTargetConfig(period=3), double=True, dueling=True),
    ReplayAgent(target=SoftTargetConfig(tau=0.1), noisy=True),
]


def batches(count: int, seed: int = 0, size: int = 12) -> list[Batch]:
    rng = np.random.default_rng(seed)
    return [random_batch(rng, size) for _ in range(count)]


def learn_alone(setup: LearnerSetup, given: list[Batch]) -> Learner:
    names = ("batches", "priorities", "weights", "models", "events", "score", "env_steps", "updates")
    edges = {name: Edge(given if name == "batches" else ()) for name in names}
    handles = LearnerHandles(**{**edges, **{name: (edges[name],) for name in ("batches", "priorities")}})
    learner = Learner(setup, handles)
    while not isinstance(learner.step(), Idle):
        pass
    return learner


@pytest.mark.parametrize("agent", ALL, ids=["dqn", "hard", "soft-noisy"])
@pytest.mark.parametrize("servers", [1, 2, 3])
def test_one_worker_learns_what_a_learner_learns_to_the_bit(agent: ReplayAgent, servers: int) -> None:
    setup = learner_setup(agent=agent, optim=AdamConfig(lr=0.01, max_grad_norm=0.1))
    given = batches(10)
    alone = learn_alone(setup, given)
    fleet = Fleet(workers=1, servers=servers, learner=setup)
    feed(fleet, given)
    fleet.run()
    (worker,) = fleet.workers
    assert np.array_equal(alone._update.flat.to_numpy(), worker._update.flat.to_numpy())
    assert np.array_equal(alone._update.target_flat.to_numpy(), worker._update.target_flat.to_numpy())
    sent, expected = fleet.edges["priorities"].queue, alone._handles.priorities[0].queue
    assert all(np.array_equal(a.priority, b.priority) for a, b in zip(sent, expected, strict=True))
    assert fleet.edges["updates"].count == alone._handles.updates.count == 10


def test_hand_written_networks_differ_from_a_learners_in_rounding_only() -> None:
    """That learner's optimiser is compiled loops, the servers' is torch's."""
    setup, given = learner_setup(accel=AccelConfig()), batches(10)
    alone = learn_alone(setup, given)
    fleet = Fleet(workers=1, learner=setup)
    feed(fleet, given)
    fleet.run()
    assert np.abs(alone._update.flat.to_numpy() - fleet.workers[0]._update.flat.to_numpy()).max() < 1e-6


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_workers_in_step_learn_what_one_learner_learns_of_the_whole_batch(workers: int) -> None:
    setup = learner_setup(optim=SgdConfig(lr=0.1, max_grad_norm=None))
    given = batches(5)
    alone = learn_alone(setup, given)
    fleet = Fleet(workers=workers, servers=2, learner=setup)
    start = fleet.parameters
    feed(fleet, given)
    fleet.run()
    expected = alone._update.flat.to_numpy()
    assert np.linalg.norm(fleet.parameters - expected) <= 1e-5 * np.linalg.norm(expected - start)
    assert fleet.versions == [5, 5]
    for worker in fleet.workers:
        assert np.array_equal(worker._update.flat.to_numpy(), fleet.parameters)


def test_agents_with_other_heads_learn_too() -> None:
    setup = learner_setup(agent=ReplayAgent(head=QuantileConfig(quantiles=4)))
    fleet = Fleet(workers=2, servers=2, mode="async", learner=setup)
    feed(fleet, batches(3))
    fleet.run()
    assert fleet.versions == [6, 6]


def test_a_worker_computes_no_second_gradient_before_the_first_is_in_its_weights() -> None:
    fleet = Fleet(workers=1, servers=2, mode="async")
    feed(fleet, batches(3))
    (worker,) = fleet.workers
    assert isinstance(worker.step(), Idle)  # not a slice yet
    for server in fleet.servers:
        server.step()
    assert worker.step() == WORKED
    for _ in range(3):
        assert worker.step() == Idle("the servers have not answered", wake_on=worker._link.awaited)
    fleet.servers[0].step()
    assert isinstance(worker.step(), Idle)
    assert len(fleet.batches[0].queue) == 2
    fleet.servers[1].step()
    assert worker.step() == WORKED
    assert [stream.queue[0].sequence for stream in fleet.pushes[0]] == [2, 2]
    assert [stream.queue[0].version for stream in fleet.pushes[0]] == [1, 1]


def publish(fleet: Fleet, server: int, version: int, value: float) -> None:
    piece: ParameterSlice = fleet.latest[server].value
    from qfleet.algo.flat import checksum

    values = np.full_like(piece.values, value)
    changed = dataclasses.replace(piece, version=version, values=values, checksum=checksum(values))
    fleet.latest[server].publish(changed)


def started(mode: str) -> Fleet:
    fleet = Fleet(workers=1, servers=2, mode=mode)
    fleet.run()
    return fleet


def loaded(fleet: Fleet) -> list[float]:
    return np.unique(fleet.workers[0]._update.flat.parameters.numpy()).tolist()


def test_in_mode_sync_slices_of_two_versions_are_never_mixed() -> None:
    fleet = started("sync")
    (worker,) = fleet.workers
    first = worker._update.flat.to_numpy()
    publish(fleet, 0, 1, 5.0)
    assert isinstance(worker.step(), Idle)
    assert np.array_equal(first, worker._update.flat.to_numpy())
    feed(fleet, batches(1))
    assert isinstance(worker.step(), Idle), "and none is computed at such a mixture"
    publish(fleet, 1, 1, 5.0)
    assert worker.step() == WORKED
    assert loaded(fleet) == [5.0]
    assert [stream.queue[0].version for stream in fleet.pushes[0]] == [1, 1]


def test_else_the_newest_of_each_is_taken() -> None:
    fleet = started("async")
    publish(fleet, 0, 3, 5.0)
    publish(fleet, 1, 2, 4.0)
    feed(fleet, batches(1))
    assert fleet.workers[0].step() == WORKED
    assert loaded(fleet) == [4.0, 5.0]
    assert [stream.queue[0].version for stream in fleet.pushes[0]] == [3, 2]
    assert fleet.edges["updates"].count == 2, "the run is as far as the slice that is furthest behind"


def test_a_damaged_slice_is_refused() -> None:
    fleet = started("sync")
    piece = fleet.latest[1].value
    fleet.latest[1].publish(dataclasses.replace(piece, values=piece.values + 1))
    with pytest.raises(QfleetError, match="slice 0 of server 1 arrived damaged"):
        fleet.workers[0].step()


@pytest.mark.parametrize(("mode", "limit"), [("sync", 0.05), ("async", 0.1)])
def test_workers_clip_before_they_send(mode: str, limit: float) -> None:
    """In mode sync each to its part of the limit, so that the sum keeps to it."""
    fleet = Fleet(workers=2, servers=2, mode=mode, learner=learner_setup(optim=AdamConfig(max_grad_norm=0.1)))
    fleet.run()
    feed(fleet, [dataclasses.replace(b, reward=b.reward * 100) for b in batches(1)])
    for worker, streams in zip(fleet.workers, fleet.pushes, strict=True):
        worker.step()
        sent = torch.cat([stream.queue[0].payload[0] for stream in streams])
        assert sent.norm().item() == pytest.approx(limit, rel=1e-3)
        assert worker.metrics()["grad_norm"] > 2 * limit


@pytest.mark.parametrize("rule", [SoftTargetConfig(tau=0.2), HardTargetConfig(period=10)], ids=["soft", "hard"])
def test_the_target_follows_over_all_versions_that_went_by(rule: Any) -> None:
    fleet = Fleet(workers=1, mode="async", learner=learner_setup(agent=ReplayAgent(target=rule)))
    fleet.run()
    target, before = fleet.workers[0]._update.target_flat, fleet.workers[0]._update.target_flat.to_numpy()
    publish(fleet, 0, 7, 1.0)
    fleet.workers[0].step()
    if rule.kind == "soft":
        followed = before
        for _ in range(7):
            followed = followed + 0.2 * (1.0 - followed)
        assert np.allclose(target.to_numpy(), followed, atol=1e-6)
        return
    assert np.array_equal(target.to_numpy(), before)
    publish(fleet, 0, 12, 2.0)  # past the tenth
    fleet.workers[0].step()
    assert np.unique(target.to_numpy()).tolist() == [2.0]
    publish(fleet, 0, 19, 3.0)
    fleet.workers[0].step()
    assert np.unique(target.to_numpy()).tolist() == [2.0]


def test_a_batch_that_is_not_finite_is_named_and_left_out_of_its_round() -> None:
    setup = learner_setup(optim=SgdConfig(lr=0.1, max_grad_norm=None))
    fleet, alone = (Fleet(workers=workers, servers=2, learner=setup) for workers in (2, 1))
    (good,), bad = batches(1), random_batch(np.random.default_rng(5), 12, reward=np.nan)
    fleet.batches[0].send(part_of(good, 0, 2))
    fleet.batches[1].send(part_of(bad, 1, 2))
    fleet.run()
    assert fleet.versions == [1, 1]
    kinds = {notice.kind: notice for notice in fleet.edges["events"].queue}
    assert kinds["skipped_update"].index == 1
    assert "update 1: the loss or its gradient is not finite; worker 1" in kinds["skipped_update"].text
    assert fleet.workers[1].metrics()["skipped_updates"] == 1
    assert len(fleet.edges["priorities"].queue) == 1
    assert not [notice for notice in fleet.edges["server_events"].queue if notice.kind == "rejected_gradient"]
    alone.batches[0].send(part_of(good, 0, 2))
    alone.run()
    assert np.array_equal(alone.parameters, fleet.parameters)


@pytest.mark.parametrize("compression", [None, TopKConfig(fraction=0.2, warmup=0), SignConfig()])
def test_a_worker_that_skips_batches_stays_in_step_with_the_others(compression: Any) -> None:
    """Else it is ahead by as many batches, and the shard, which sends to all or to none, finds its stream empty and the
    others' full."""
    fleet = Fleet(workers=2, servers=2, compression=compression)
    fleet.run()
    for number, batch in enumerate(batches(12), 1):
        bad = dataclasses.replace(batch, reward=np.full(12, np.nan, np.float32))
        for rank in range(2):
            skips = number % 2 == 0 and (rank == 1 or number % 4 == 0)
            fleet.batches[rank].send(part_of(bad if skips else batch, rank, 2))
    fleet.run()
    assert [len(stream.queue) for stream in fleet.batches] == [0, 0]
    assert fleet.versions == [12, 12]
    assert [worker.metrics()["skipped_updates"] for worker in fleet.workers] == [3, 6]
    assert np.isfinite(fleet.parameters).all()


def test_several_in_a_row_stop_the_run_and_name_the_worker() -> None:
    fleet = Fleet(workers=2, mode="async")
    rng = np.random.default_rng(5)
    for reward in (np.nan, np.nan, None, np.nan, np.nan):
        fleet.batches[1].send(random_batch(rng, reward=reward))
    fleet.run()
    assert fleet.versions == [1]
    fleet.batches[1].send(random_batch(rng, reward=np.nan))
    with pytest.raises(QfleetError, match="3 gradients of worker 1 in a row were not finite"):
        fleet.run()


def test_the_first_worker_publishes_counts_and_offers_models() -> None:
    setup = learner_setup(learner=LearnerConfig(publish_period=2))
    fleet = Fleet(workers=2, mode="async", learner=setup)
    fleet.run()
    assert [w.version for w in fleet.edges["weights"].queue] == [Version(0, 0)]
    fleet.edges["env_steps"].count = 2500
    feed(fleet, batches(3))
    fleet.run()
    assert [w.env_steps for w in fleet.edges["models"].queue] == [2500]
    assert fleet.edges["updates"].count == 6
    newest = fleet.edges["weights"].queue[-1]
    assert newest.version == Version(0, 6)
    assert np.array_equal(newest.flat, fleet.parameters)
    assert len({w.version for w in fleet.edges["weights"].queue}) == len(fleet.edges["weights"].queue)
    assert fleet.workers[1]._publishing is None
    assert [n.kind for n in fleet.edges["events"].queue].count("accel") == 1


def test_at_the_end_the_last_model_has_the_gradients_of_all() -> None:
    fleet = Fleet(workers=3, servers=2, mode="async")
    fleet.batches[0].close()
    for stream in fleet.batches[1:]:
        for batch in batches(4):
            stream.send(batch)
    first = fleet.workers[0]
    for _ in range(3):
        for role in fleet.roles:
            role.step()
    while (status := first.step()) == WORKED:
        pass
    assert status == Idle("other workers have not finished", wake_on=first._link.awaited)
    assert not fleet.edges["models"].queue
    fleet.finish()
    assert fleet.versions == [8, 8]
    (model,) = fleet.edges["models"].queue
    assert model.version == Version(0, 8)
    assert np.array_equal(model.flat, fleet.parameters)
    assert fleet.edges["models"].closed


def test_beside_others_a_waiting_worker_looks_again_soon_and_then_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    fleet = Fleet(workers=1, learner=learner_setup(ahead=True))
    (worker,) = fleet.workers
    assert worker.step().deadline == pytest.approx(2e-4)
    now += 0.08
    assert worker.step().deadline == pytest.approx(0.01)
    now += 10
    assert worker.step().deadline == pytest.approx(0.05)


# Lives and checkpoints.


def test_a_worker_that_died_between_two_servers_is_neither_lost_nor_counted_twice() -> None:
    fleet = Fleet(workers=2, servers=2, keeps=True)
    given = batches(3)
    feed(fleet, given[:1])
    fleet.run()
    feed(fleet, given[1:2])
    fleet.workers[1]._handles.gradients[1].capacity = 0  # it dies when it has sent to the first server only
    fleet.run()
    assert fleet.versions == [2, 1]
    fleet.restart_worker(1)
    assert "worker 1 restarted; it goes on after its gradient 2" in fleet.edges["events"].queue[-1].text
    fleet.workers[1]._handles.gradients[1].capacity = 2
    fleet.run()
    assert fleet.versions == [2, 2]
    feed(fleet, given[2:])
    fleet.run()
    untroubled = Fleet(workers=2, servers=2)
    feed(untroubled, given)
    untroubled.run()
    assert np.array_equal(fleet.parameters, untroubled.parameters)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_new_life_of_the_first_worker_goes_on_under_a_new_epoch(mode: str) -> None:
    agent = ReplayAgent(target=HardTargetConfig(period=2))
    fleet = Fleet(workers=2, servers=2, keeps=True, mode=mode, learner=learner_setup(agent=agent))
    feed(fleet, batches(2))
    fleet.run()
    reached = fleet.versions[0]
    target = fleet.workers[0]._update.target_flat.to_numpy()
    fleet.restart_worker(0)
    fleet.run()
    assert fleet.edges["weights"].queue[-1].version == Version(1, reached)
    assert np.array_equal(fleet.edges["weights"].queue[-1].flat, fleet.parameters)
    assert fleet.edges["updates"].count == reached
    if mode == "sync":
        assert np.array_equal(fleet.workers[0]._update.target_flat.to_numpy(), target)
    feed(fleet, batches(1))
    fleet.run()
    assert fleet.edges["updates"].count == fleet.versions[0] > reached


def test_a_server_that_was_begun_anew_is_gone_on_with() -> None:
    fleet = Fleet(workers=2, servers=2, keeps=True)
    feed(fleet, batches(3))
    fleet.run()
    fleet.servers[1].state_dict()
    feed(fleet, batches(2, seed=1))
    fleet.run()
    fleet.restart_server(1)
    feed(fleet, batches(2, seed=2))
    fleet.run()
    assert fleet.versions == [7, 7]
    assert fleet.edges["updates"].count == 7
    for worker in fleet.workers:
        assert np.array_equal(worker._update.flat.to_numpy(), fleet.parameters)


def test_a_worker_that_was_done_says_so_again() -> None:
    fleet = Fleet(workers=1, keeps=True)
    feed(fleet, batches(2))
    fleet.run()
    fleet.finish()
    for _ in range(3):
        fleet.restart_worker(0)
        while fleet.workers[0].step() != DONE:
            pass
    assert len(fleet.edges["models"].queue) == 1
    assert fleet.edges["updates"].count == 2


def transplanted(fleet: Fleet, fresh: Fleet) -> Fleet:
    """A new fleet with the states and edges of another, as a checkpoint restores them."""
    for old, new in zip(fleet.roles, fresh.roles, strict=True):
        new.load_state_dict(codec.roundtrip(old.state_dict()))
    for olds, news in zip(fleet.pushes, fresh.pushes, strict=True):
        for old, new in zip(olds, news, strict=True):
            new.queue = deque(old.queue)
    for old, new in zip(fleet.latest, fresh.latest, strict=True):
        new.value, new.stamp = old.value, old.stamp
    for old, new in zip(fleet.workers, fresh.workers, strict=True):
        for a, b in zip(old._handles.slices, new._handles.slices, strict=True):
            b.seen = a.seen
    for old, new in zip(fleet.batches, fresh.batches, strict=True):
        new.queue = deque(old.queue)
    return fresh


def test_a_gradient_on_its_way_in_another_form_is_refused() -> None:
    """A server would read it as what it is not: the sizes of signs as the first values of float16."""
    fleet = Fleet(compression=SignConfig())
    fleet.batches[0].send(*batches(1))
    while not fleet.pushes[0][0].queue:
        for role in fleet.roles:
            if not fleet.pushes[0][0].queue:
                role.step()
    with pytest.raises(CheckpointError, match=r"as 'sign', not 'fp16': resume with .* 'sign'"):
        transplanted(fleet, Fleet(compression=Fp16Config()))


@pytest.mark.parametrize("mode", ["sync", "async", "stale"])
@pytest.mark.parametrize("steps", [7, 20, 33])
def test_a_fleet_resumed_in_the_midst_of_everything_ends_the_same(mode: str, steps: int) -> None:
    compression = TopKConfig(fraction=0.2, warmup=3)
    agent = ReplayAgent(noisy=True, target=SoftTargetConfig(tau=0.1))
    rng = np.random.default_rng(0)
    order = [int(rng.integers(5)) for _ in range(steps)]
    found = []
    for cut in (False, True):
        settings = {"mode": mode, "compression": compression, "learner": learner_setup(agent=agent)}
        fleet = Fleet(workers=3, servers=2, **settings)
        feed(fleet, batches(4))
        for number in order:
            fleet.roles[number].step()
        if cut:
            fleet = transplanted(fleet, Fleet(workers=3, servers=2, **settings))
        fleet.finish()
        targets = [worker._update.target_flat.to_numpy() for worker in fleet.workers]
        found.append([fleet.parameters, *targets])
    assert all(np.array_equal(a, b) for a, b in zip(*found, strict=True))


# Compression and refusals.

KINDS = [
    Fp16Config(),
    Bf16Config(),
    Int8Config(),
    SignConfig(),
    TopKConfig(fraction=0.05, warmup=0),
    PowerSgdConfig(rank=1),
]


@pytest.mark.parametrize("compression", KINDS, ids=lambda config: config.kind)
def test_compressed_gradients_take_fewer_bytes_and_move_the_weights_alike(compression: Any) -> None:
    plain, fleet = (
        Fleet(
            workers=2, servers=2, compression=kind, learner=learner_setup(optim=SgdConfig(lr=0.01, max_grad_norm=None))
        )
        for kind in (None, compression)
    )
    start = plain.parameters
    for one in (plain, fleet):
        feed(one, batches(1) * 30)
        one.run()
    sent, whole = (one.workers[0].metrics()["gradient_bytes"] for one in (fleet, plain))
    assert whole == 4 * len(start)
    assert sent < 0.9 * whole
    moved, expected = fleet.parameters - start, plain.parameters - start
    assert moved @ expected > 0.9 * np.linalg.norm(moved) * np.linalg.norm(expected)


def test_what_makes_several_steps_of_one_message_is_refused() -> None:
    with pytest.raises(ConfigError, match="not 'rollout'"):
        Fleet(learner=learner_setup(agent=RolloutAgent()))
    with pytest.raises(ConfigError, match="updates_per_draw"):
        Fleet(learner=learner_setup(learner=LearnerConfig(updates_per_draw=2)))
