"""A parameter server: what it makes of gradients in each mode, which ones it refuses, and what it remembers."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from role_cases import random_batch
from serving_cases import Fleet, feed, first_parameters, learner_setup, push

from qfleet.algo.flat import FlatParameters
from qfleet.algo.optim import (
    AdagradConfig,
    AdamConfig,
    AdamWConfig,
    Optim,
    OptimConfig,
    RmspropConfig,
    SgdConfig,
)
from qfleet.algo.schedules import LinearRateConfig, PlateauRateConfig
from qfleet.core import codec
from qfleet.core.errors import ConfigError
from qfleet.core.role import DONE, WORKED, Idle
from qfleet.core.types import Evaluated, Version
from qfleet.parallel.gradsync import GradientGroup
from qfleet.parallel.serving import add_in_order
from qfleet.roles.parameter_server import ParameterServer
from qfleet.roles.serving_setup import first_network

RNG = np.random.default_rng(0)


def server_of(fleet: Fleet, index: int = 0) -> ParameterServer:
    server = fleet.servers[index]
    assert server.step() == WORKED  # publishes what the run begins with
    return server


def gradient(fleet: Fleet, scale: float = 1.0) -> np.ndarray:
    return scale * RNG.normal(size=fleet.parameters.shape).astype(np.float32)


OPTIMISERS = [
    SgdConfig(momentum=0.9),
    AdagradConfig(),
    RmspropConfig(momentum=0.5),
    AdamConfig(),
    AdamWConfig(l1=0.01),
]


@pytest.mark.parametrize("optim", OPTIMISERS, ids=lambda config: config.kind)
def test_any_optimiser_on_slices_makes_the_steps_of_the_whole(optim: OptimConfig) -> None:
    setup = learner_setup(optim=optim.replace(max_grad_norm=None))
    whole = FlatParameters(first_network(setup)[0])
    alone = Optim(setup.optim, whole, 100)
    fleet = Fleet(servers=3, learner=setup)
    pieces = [server._parameters.numel() for server in fleet.servers]
    for number in range(5):
        values = gradient(fleet)
        whole.gradients.copy_(torch.from_numpy(values))
        alone.step(number)
        for server, part in enumerate(np.split(values, np.cumsum(pieces)[:-1])):
            fleet.pushes[0][server].send(push(0, number + 1, part, number))
            fleet.servers[server].step()
    assert np.array_equal(fleet.parameters, whole.parameters.numpy())


def test_a_server_does_not_clip_its_slice() -> None:
    fleet = Fleet(learner=learner_setup(optim=SgdConfig(lr=1.0, max_grad_norm=1e-3)))
    values, before = gradient(fleet), fleet.parameters
    fleet.pushes[0][0].send(push(0, 1, values))
    server_of(fleet)
    assert np.allclose(before - fleet.parameters, values, atol=1e-6)


def test_the_learning_rate_follows_the_version() -> None:
    optim = SgdConfig(lr=1.0, schedule=LinearRateConfig(updates=10))
    fleet = Fleet(workers=2, mode="async", damping=0.0, learner=learner_setup(optim=optim))
    for version in range(4):
        values, before = gradient(fleet), fleet.parameters
        fleet.pushes[version % 2][0].send(push(version % 2, 1 + version // 2, values, version))
        fleet.servers[0].step()
        assert np.allclose(before - fleet.parameters, (1 - version / 10) * values, atol=1e-5)
        assert fleet.latest[0].value.learning_rate == pytest.approx(1 - version / 10)


def test_a_plateau_of_the_score_lowers_the_rate() -> None:
    optim = SgdConfig(lr=1.0, schedule=PlateauRateConfig(patience=1))
    fleet = Fleet(learner=learner_setup(optim=optim))
    for _ in range(3):
        score = Evaluated(Version(), 0, np.ones(2), np.ones(2, np.int64), 0.0, True, None)
        fleet.servers[0]._handles.score.send(score)
        fleet.servers[0].step()
    assert fleet.servers[0].metrics()["learning_rate"] == 0.25


# Mode sync.


def all_reduced(parts: torch.Tensor, rendezvous: str) -> torch.Tensor:
    """The sum of the rows, by as many ranks of a gloo group."""
    reduced, ranks = parts.clone(), len(parts)
    barrier = threading.Barrier(ranks)

    def rank_main(rank: int) -> None:
        group = GradientGroup(rank, ranks, rendezvous, timeout_s=20.0)
        group.all_reduce_(reduced[rank])
        barrier.wait()
        group.close()

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return reduced[0]


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_a_round_adds_what_an_all_reduce_would(workers: int, tmp_path: Path) -> None:
    """In float64 to 1e-12, in float32 norm-wise to 1e-5; torch's gloo is the judge."""
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        parts = torch.randn(workers, 1001, dtype=dtype, generator=torch.Generator().manual_seed(workers))
        reduced = all_reduced(parts, f"file://{tmp_path}/{dtype}")
        found = torch.empty(1001, dtype=dtype)
        add_in_order(parts, list(range(workers)), found)
        assert (found - reduced).norm() <= tolerance * reduced.norm()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_a_round_waits_for_all_and_does_not_depend_on_who_comes_first(order: tuple[int, ...]) -> None:
    fleet = Fleet(workers=3, learner=learner_setup(optim=SgdConfig(lr=1.0)))
    rng = np.random.default_rng(4)
    values = rng.normal(size=(3, len(fleet.parameters))).astype(np.float32)
    before, server = fleet.parameters, server_of(fleet)
    for place, worker in enumerate(order):
        assert fleet.versions == [0]
        assert np.array_equal(fleet.parameters, before)
        fleet.pushes[worker][0].send(push(worker, 1, values[worker]))
        assert server.step() == WORKED
        idle = server.step()
        assert isinstance(idle, Idle)
        if place < 2:
            assert idle.wake_on == tuple(fleet.pushes[other][0] for other in sorted(order[place + 1 :]))
    assert fleet.versions == [1]
    assert np.array_equal(before - (values[0] + values[1] + values[2]), fleet.parameters)
    assert fleet.latest[0].value.taken.tolist() == [1, 1, 1]


def test_who_leaves_is_not_waited_for_but_what_it_sent_counts() -> None:
    fleet = Fleet(workers=3, learner=learner_setup(optim=SgdConfig(lr=1.0)))
    values, before, server = gradient(fleet), fleet.parameters, server_of(fleet)
    fleet.pushes[0][0].send(push(0, 1, values))
    fleet.pushes[0][0].close()
    fleet.pushes[1][0].close()
    server.step()
    assert fleet.versions == [0]
    fleet.pushes[2][0].send(push(2, 1, values))
    server.step()
    assert np.array_equal(before - (values + values), fleet.parameters)
    fleet.pushes[2][0].close()
    assert server.step() == DONE
    assert fleet.latest[0].value.final
    assert fleet.latest[0].value.version == 1


def test_a_gradient_that_is_not_finite_is_left_out_of_its_round_and_its_worker_named() -> None:
    fleet = Fleet(workers=2, learner=learner_setup(optim=SgdConfig(lr=1.0)))
    values, before, server = gradient(fleet), fleet.parameters, server_of(fleet)
    bad = values.copy()
    bad[3] = np.inf
    fleet.pushes[0][0].send(push(0, 1, values))
    fleet.pushes[1][0].send(push(1, 1, bad))
    server.step()
    assert np.array_equal(before - values, fleet.parameters)
    (notice,) = fleet.edges["server_events"].queue
    assert notice.kind == "rejected_gradient"
    assert "gradient 1 of worker 1 is not finite" in notice.text
    assert server.metrics()["rejected_gradients"] == 1


def test_a_round_of_which_nothing_is_left_is_counted_and_moves_nothing() -> None:
    fleet = Fleet(workers=1)
    server = server_of(fleet)
    fleet.pushes[0][0].send(push(0, 1, gradient(fleet)))
    server.step()
    before = fleet.parameters
    fleet.pushes[0][0].send(push(0, 2, np.full(len(before), np.nan), 1))
    server.step()
    assert fleet.versions == [2]
    assert np.array_equal(before, fleet.parameters), "not even by momentum"
    assert fleet.latest[0].value.taken.tolist() == [2]


# Modes async and stale.


@pytest.mark.parametrize("mode", ["sync", "async", "stale"])
def test_a_gradient_sent_twice_is_taken_once(mode: str) -> None:
    fleet = Fleet(workers=1, mode=mode)
    server, values = server_of(fleet), gradient(fleet)
    fleet.pushes[0][0].send(push(0, 1, values))
    fleet.pushes[0][0].send(push(0, 1, values))
    server.step()
    once = fleet.parameters
    server.step()
    assert server.step() == Idle("no gradient", wake_on=(fleet.pushes[0][0],))
    assert np.array_equal(once, fleet.parameters)
    assert fleet.versions == [1]
    assert server.metrics()["duplicate_gradients"] == 1


def test_each_gradient_is_applied_as_it_comes() -> None:
    fleet = Fleet(workers=2, mode="async", learner=learner_setup(optim=SgdConfig(lr=1.0)))
    values, before, server = gradient(fleet), fleet.parameters, server_of(fleet)
    fleet.pushes[1][0].send(push(1, 1, values))
    server.step()
    assert np.array_equal(before - values, fleet.parameters)
    assert fleet.latest[0].value.taken.tolist() == [0, 1]
    assert fleet.latest[0].value.version == 1


@pytest.mark.parametrize("optim", [SgdConfig(lr=0.1), AdamConfig(lr=0.1)], ids=lambda config: config.kind)
@pytest.mark.parametrize(("damping", "factor"), [(0.0, 1.0), (0.5, 0.5), (1.0, 0.25)])
def test_a_step_along_an_old_gradient_is_shorter_for_adam_too(
    optim: OptimConfig, damping: float, factor: float
) -> None:
    moved = []
    for old in (False, True):
        fleet = Fleet(workers=4, mode="async", damping=damping, learner=learner_setup(optim=optim))
        server, rng = server_of(fleet), np.random.default_rng(1)
        for number in range(4):
            if number == 3:
                before = fleet.parameters
            values = rng.normal(size=len(fleet.parameters)).astype(np.float32)
            # The first three are never old, so that both fleets stand where this one does.
            version = 0 if old and number == 3 else number
            fleet.pushes[number][0].send(push(number, 1, values, version))
            server.step()
        moved.append(fleet.parameters - before)
        assert server.metrics()["staleness_most"] == (3 if old else 0)
    assert np.allclose(moved[1], factor * moved[0], atol=1e-6)


def test_a_rejected_gradient_moves_nothing_but_its_worker_is_answered() -> None:
    fleet = Fleet(workers=2, mode="async")
    server, before = server_of(fleet), fleet.parameters
    fleet.pushes[1][0].send(push(1, 1, np.full(len(before), np.nan)))
    assert server.step() == WORKED
    assert np.array_equal(before, fleet.parameters)
    assert fleet.latest[0].value.taken.tolist() == [0, 1]
    assert "worker 1" in fleet.edges["server_events"].queue[-1].text


def test_a_bound_that_could_never_be_kept_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_staleness 2 is too small for 4 workers"):
        Fleet(workers=4, mode="async", max_staleness=2)
    Fleet(workers=4, mode="async", max_staleness=3)


# Lives and checkpoints.


def send_all(fleet: Fleet, sequence: int, rng: np.random.Generator) -> None:
    for worker in range(len(fleet.batches)):
        values = rng.normal(size=len(fleet.parameters)).astype(np.float32)
        fleet.pushes[worker][0].send(push(worker, sequence, values, sequence - 1))


@pytest.mark.parametrize("mode", ["sync", "async", "stale"])
def test_a_server_goes_on_from_its_snapshot_and_says_what_is_lost(mode: str) -> None:
    fleet = Fleet(workers=2, keeps=True, mode=mode, snapshot_s=7.0)
    server, rng = server_of(fleet), np.random.default_rng(2)
    for sequence in range(1, 6):
        send_all(fleet, sequence, rng)
        server.step()
        if sequence == 3:
            kept = fleet.parameters
            server.state_dict()
    reached, lost = fleet.versions[0], fleet.versions[0] * 2 // 5
    fleet.restart_server(0)
    assert np.array_equal(kept, fleet.parameters)
    assert fleet.versions == [reached]
    text = fleet.edges["server_events"].queue[-1].text
    assert f"restarted from update {reached - lost}: {lost} updates of its slice lost" in text
    assert "every 7 s" in text
    assert fleet.servers[0].metrics()["lost_updates"] == lost
    assert fleet.servers[0].step() == WORKED
    assert fleet.latest[0].value.version == reached
    assert fleet.latest[0].value.taken.tolist() == [5, 5]
    assert np.array_equal(fleet.latest[0].value.values, kept)


def test_a_server_without_a_snapshot_begins_with_the_first_weights() -> None:
    fleet = Fleet(keeps=True)
    server_of(fleet)
    send_all(fleet, 1, np.random.default_rng(0))
    fleet.servers[0].step()
    fleet.restart_server(0)
    assert np.array_equal(fleet.parameters, first_parameters(fleet.learner))
    assert "restarted from update 0: 1 updates" in fleet.edges["server_events"].queue[-1].text


def test_snapshots_are_kept_in_the_rhythm_of_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    fleet = Fleet(keeps=True, snapshot_s=5.0)
    server, rng = server_of(fleet), np.random.default_rng(0)
    for sequence in range(1, 13):
        now += 1.0
        send_all(fleet, sequence, rng)
        server.step()
    assert server._handles.keep.state["version"] == 9  # before the step at 110 s


def test_what_waits_for_its_round_outlives_the_server() -> None:
    fleet = Fleet(workers=2, keeps=True, learner=learner_setup(optim=SgdConfig(lr=1.0)))
    server, values, before = server_of(fleet), gradient(fleet), fleet.parameters
    fleet.pushes[0][0].send(push(0, 1, values))
    server.step()  # which acknowledges it
    fleet.restart_server(0)
    fleet.pushes[0][0].send(push(0, 1, values))  # in case it was not acknowledged
    fleet.servers[0].step()
    assert fleet.latest[0].value.taken.tolist() == [0, 0], "it is here, but not in the slice"
    fleet.pushes[1][0].send(push(1, 1, values))
    for _ in range(3):
        fleet.servers[0].step()
    assert fleet.versions == [1]
    assert np.array_equal(before - (values + values), fleet.parameters)


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("place", ["server.before_noting", "server.after_noting"])
def test_a_death_while_a_gradient_is_taken_counts_it_once(
    mode: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = Fleet(workers=1, keeps=True, mode=mode)
    server, values = server_of(fleet), gradient(fleet)

    def die(name: str) -> None:
        if name == place:
            raise KeyboardInterrupt

    monkeypatch.setattr("qfleet.roles.parameter_server.failpoint", die)
    fleet.pushes[0][0].send(push(0, 1, values))
    with pytest.raises(KeyboardInterrupt):
        server.step()
    monkeypatch.undo()
    fleet.restart_server(0)
    fleet.pushes[0][0].send(push(0, 1, values))  # it was not acknowledged
    for _ in range(4):
        fleet.servers[0].step()
    assert fleet.versions == [1]
    assert fleet.latest[0].value.taken.tolist() == [1]


@pytest.mark.parametrize("mode", ["sync", "async", "stale"])
def test_a_restored_server_makes_the_same_steps(mode: str) -> None:
    def steps(fleet: Fleet, first: int, last: int) -> None:
        for sequence in range(first, last):
            for worker in (sequence % 2, (sequence + 1) % 2):
                values = np.random.default_rng([sequence, worker]).normal(size=len(fleet.parameters))
                fleet.pushes[worker][0].send(push(worker, sequence, values, sequence))
                fleet.servers[0].step()

    uncut, cut = Fleet(workers=2, mode=mode), Fleet(workers=2, mode=mode)
    for fleet in (uncut, cut):
        steps(fleet, 1, 5)
        values = np.random.default_rng(9).normal(size=len(fleet.parameters))
        fleet.pushes[1][0].send(push(1, 5, values, 4))
        fleet.servers[0].step()  # in the midst of a round
    resumed = Fleet(workers=2, mode=mode)
    resumed.servers[0].load_state_dict(codec.roundtrip(cut.servers[0].state_dict()))
    for fleet in (uncut, resumed):
        fleet.pushes[0][0].send(push(0, 5, values, 4))
        fleet.servers[0].step()
        steps(fleet, 6, 9)
    assert np.array_equal(uncut.parameters, resumed.parameters)
    assert uncut.versions == resumed.versions
    first, second = (codec.pack(fleet.servers[0].state_dict()) for fleet in (uncut, resumed))
    assert first[0] == second[0]
    assert all(np.array_equal(a, b) for a, b in zip(first[1], second[1], strict=True))


def test_a_whole_fleet_ends_with_the_same_slices_everywhere() -> None:
    fleet = Fleet(workers=3, servers=2)
    feed(fleet, [random_batch(RNG) for _ in range(4)])
    fleet.run()
    fleet.finish()
    for worker in fleet.workers[:1]:
        assert np.array_equal(worker._update.flat.parameters.numpy(), fleet.parameters)
    assert fleet.versions == [4, 4]
