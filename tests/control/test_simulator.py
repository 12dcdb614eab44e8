"""The simulator against formulas where one thing decides, and in sizes that nobody here has."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parallel_cases import cluster, work
from plan_cases import experiment, measurements

from qfleet.control.parallel_parts import Link
from qfleet.control.parallel_traffic import slowest
from qfleet.control.simulator import Simulated, limits, simulate
from qfleet.control.simulator_cluster import Cluster, SimulateOptions, cluster_of, parse_options
from qfleet.control.simulator_text import assumptions, simulated_text
from qfleet.core.errors import ConfigError

close = pytest.approx


class TestOneThingDecides:
    """Each within 3 % of the rate that its part alone allows: a window cuts off parts of an update."""

    def check(self, made: Cluster, part: str, bottleneck: str) -> Simulated:
        found, alone = simulate(made), limits(made)
        assert min(alone, key=lambda name: alone[name]) == part
        assert found.updates_per_s == close(alone[part], rel=0.03)
        assert found.bottleneck == bottleneck
        return found

    def test_computing(self) -> None:
        found = self.check(cluster(), "learners", "the learners' computing")
        assert found.computing == close(1, abs=0.03)
        assert found.idle == close(0, abs=0.03)

    def test_actors(self) -> None:
        found = self.check(cluster(actors=2, message=1.0), "actors", "the actors")
        assert found.busy["actor"] == close(1, abs=0.05)
        assert found.idle == close(1 - found.computing, abs=0.02)

    def test_replay(self) -> None:
        found = self.check(cluster(store=1e-3), "replay", "the replay shards")
        assert found.busy["shard"] == close(1, abs=0.03)

    @pytest.mark.parametrize("collective", ["ring", "tree"])
    def test_exchange(self, collective: str) -> None:
        slow = cluster(link=Link(1e7, 1e-3), parameters=10**6, collective=collective, row_bytes=1, batch_bytes=1)
        found = self.check(slow, "learners", "the exchange of gradients")
        assert found.exchanging == close(slow.exchange / (slow.exchange + slow.compute), abs=0.03)

    def test_batches_on_their_way(self) -> None:
        self.check(cluster(batch_bytes=10**11), "batches", "the actors")

    def test_busy_servers(self) -> None:
        made = cluster(mode="server_async", servers=1, step=0.02)
        found = self.check(made, "servers", "a busy server")
        assert found.updates_per_s == close(1 / (4 * 0.02), rel=0.03)

    def test_inference_servers(self) -> None:
        made = cluster(actors=2, message=1.0, served=0.9)
        assert simulate(made).bottleneck == "the inference servers"


def test_learners_wait_for_the_slowest_of_them() -> None:
    made = cluster(learners=64, spread=0.1)
    assert simulate(made).updates_per_s == close(1 / (0.01 * (1 + 0.1 * slowest(64))), rel=0.03)
    loose = simulate(replace(made, mode="server_async", servers=8))
    assert loose.updates_per_s == close(1 / 0.01, rel=0.03), "nobody waits for anybody"


def test_gradients_of_a_ring_cross_every_learners_link() -> None:
    found = simulate(cluster(parameters=10**6, link=Link(1e12, 0.0)))
    own = 4 * (4 * 10**6) * 3 / 4 + 12_800 / 4  # sent and received, in two rounds of three of four parts
    assert found.bytes_per_s["learner"] == close(found.updates_per_s * own)
    assert found.bytes_per_s["shard"] == close((found.env_steps_per_s * 100 + found.updates_per_s * 12_800) / 2)


class TestPolicyLag:
    def test_one_message_is_as_old_as_it_takes(self) -> None:
        found = simulate(cluster(message=0.2, actors=100))
        assert found.policy_lag == close(0.2 / 0.01, rel=0.15)

    def test_weights_that_are_published_seldom_are_older(self) -> None:
        often, seldom = (simulate(cluster(publish_period=period)).policy_lag for period in (1, 32))
        assert seldom == close(often + 15.5, abs=6)

    def test_a_narrow_link_makes_weights_late(self) -> None:
        wide, narrow = (
            simulate(cluster(learners=1, parameters=10**6, row_bytes=1, batch_bytes=1, link=Link(rate, 0.0))).policy_lag
            for rate in (1e12, 1e8)
        )
        hop = 4 * 4e6 / 1e8
        assert narrow - wide > 2 * hop / 0.01 * 0.8, "two hops, at 100 updates a second"


class TestFailures:
    def test_none_by_default(self) -> None:
        assert simulate(cluster(recovery_s=1e9)) == simulate(cluster())

    def test_a_group_stops_with_any_of_its_learners(self) -> None:
        able, failing = (simulate(cluster(failure_s=failure, recovery_s=10.0)) for failure in (0.0, 400.0))
        assert failing.updates_per_s == close(able.updates_per_s / (1 + 4 * 10 / 400))

    def test_workers_of_a_server_fail_alone(self) -> None:
        made = cluster(mode="server_async", failure_s=400.0, recovery_s=10.0)
        able = simulate(replace(made, failure_s=0.0))
        assert simulate(made).updates_per_s == close(able.updates_per_s / (1 + 10 / 400), rel=0.02)


@given(
    st.integers(1, 40),
    st.integers(1, 12),
    st.integers(1, 6),
    st.floats(1e-3, 0.2),
    st.floats(1e-4, 0.1),
    st.floats(1, 2000),
    st.sampled_from(["all_reduce", "server_sync", "server_async"]),
    st.floats(0, 0.3),
)
@settings(max_examples=25, deadline=None)
def test_no_cluster_beats_its_limits_or_stands_still(
    actors: int, learners: int, shards: int, message: float, compute: float, steps: float, mode: Any, spread: float
) -> None:
    made = cluster(
        actors=actors, learners=learners, shards=shards, message=message, compute=compute, steps_per_update=steps,
        mode=mode, spread=spread, store=1e-5, link=Link(1e9, 1e-5),
    )  # fmt: skip
    found, best = simulate(made), min(limits(made).values())
    assert 0 < found.updates_per_s <= best * 1.1
    assert found.env_steps_per_s == close(found.updates_per_s * steps)
    assert found.computing + found.exchanging + found.idle == close(1, abs=0.06)
    assert found.policy_lag >= 0
    assert all(0 <= share <= 1.1 for share in found.busy.values())


def test_the_same_seed_gives_the_same_figures() -> None:
    made = cluster(spread=0.2)
    assert simulate(made, seed=3) == simulate(made, seed=3) != simulate(made, seed=4)


@pytest.mark.parametrize("mode", ["all_reduce", "server_async"])
@pytest.mark.parametrize("steps", [64.0, 4e6])
def test_the_largest_cluster_takes_seconds(mode: Any, steps: float) -> None:
    made = cluster(actors=10_000, learners=1024, shards=64, servers=64, mode=mode, spread=0.1, steps_per_update=steps)
    began = time.process_time()
    found = simulate(made)
    assert time.process_time() - began < 10
    assert found.updates_per_s > 0


class TestOptions:
    def test_names_and_values(self) -> None:
        found = parse_options("actors=2000, learners=64,gbits=2.5,mode=server_sync")
        assert found == SimulateOptions(actors=2000, learners=64, gbits=2.5, mode="server_sync")

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("actors", "takes name=value with commas between them, not 'actors'"),
            ("actors=", "takes name=value"),
            ("actors=2,actors=3", "has actors twice"),
            ("actrs=2", "Did you mean 'actors'"),
            ("actors=0", "'actors' = '0': should be greater than 0"),
            ("learners=1025", "should be less than or equal to 1024"),
            ("learners=many", "'learners' = 'many'"),
        ],
    )
    def test_mistakes_are_explained(self, text: str, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            parse_options(text)


class TestClusterOfARun:
    def made(self, text: str) -> Cluster:
        return cluster_of(experiment(), measurements(), work(), parse_options(text))

    def test_the_runs_own_batch_is_shared(self) -> None:
        made = self.made("learners=4")
        assert (made.batch, made.learners, made.shards) == (32, 4, 4)
        assert made.compute == close(2.5e-3), "a quarter of the rows"
        assert made.steps_per_update == experiment().learner.train_period

    def test_too_many_learners_for_the_batch_get_32_rows_each(self) -> None:
        made = self.made("learners=64")
        assert made.batch == 64 * 32
        assert made.compute == close(10e-3)
        assert made.steps_per_update == experiment().learner.train_period * 64
        assert "the batch is 2,048, not the run's own 32" in "\n".join(assumptions(made, simulate(made)))
        assert self.made("learners=32").raised_from == 0

    def test_a_batch_that_was_asked_for_must_do(self) -> None:
        assert self.made("learners=64,batch=128").batch == 128
        with pytest.raises(ConfigError, match="batch 32 is too small for 64 learners"):
            self.made("learners=64,batch=32")

    def test_links_are_given_in_bits(self) -> None:
        assert self.made("gbits=8,latency_us=20").link == Link(1e9, close(20e-6))

    def test_inference_servers_are_waited_for(self) -> None:
        alone, served = self.made("actors=64"), self.made("actors=64,inference=2")
        assert alone.served == 0
        assert 0 < served.served < 1
        assert served.message > alone.message

    def test_servers_make_the_steps(self) -> None:
        options = SimulateOptions(learners=2, mode="server_sync")
        assert cluster_of(experiment(), measurements(), work(step=1e-3), options).compute == close(4e-3)


def test_everything_is_told_with_what_was_assumed() -> None:
    made = cluster(mode="server_async", failure_s=3600.0, recovery_s=5.0, spread=0.1)
    found = replace(simulate(made), grouped=3)
    text = simulated_text(made, found)
    for label in ("env steps/s", "updates/s", "a learner", "policy lag", "network", "bottleneck", "assumed:"):
        assert label in text
    told = assumptions(made, found)
    assert all(f"  - {line}" in text for line in told)
    assert any("fails every 1 h and is away for 5 s" in line for line in told)
    assert any("3 messages of an actor are taken as one" in line for line in told)
    assert any("8000 Gbit/s" in line for line in told)
    assert math.isfinite(found.policy_lag)
