"""What an update costs when ranks share it, in cases that can be done by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parallel_cases import LINK, MS, layer, site, work

from qfleet.control.parallel_cost import cut, predict
from qfleet.control.parallel_parts import Compression, Fabric, Handling, Link, Site, Way
from qfleet.control.parallel_traffic import gather_seconds, ring_seconds, server_seconds, slowest, tree_seconds

close = pytest.approx


def test_one_device_costs_what_was_measured() -> None:
    cost = predict(work(), site(LINK), Way())
    assert cost.seconds == close(10 * MS)
    assert (cost.communication, cost.idle) == (0, 0)


@pytest.mark.parametrize("data", [2, 4])
def test_free_links_and_devices_divide_the_rows(data: int) -> None:
    assert predict(work(), site(), Way(data)).seconds == close(10 * MS / data)


@pytest.mark.parametrize("data", [2, 3, 4])
def test_ranks_that_share_one_core_gain_nothing(data: int) -> None:
    rows = math.ceil(32 / data)
    assert predict(work(), site(cores=1), Way(data)).seconds == close(data * rows / 32 * 10 * MS)


def test_three_ranks_on_two_cores_take_one_and_a_half_times_as_long() -> None:
    assert site(cores=2).slow(3) == close(1.5)
    measured = Site(site().fabric, 2**40, 4, cores=2, slowdown=((1, 1.0), (2, 1.2), (4, 2.6)))
    assert [measured.slow(ranks) for ranks in (1, 2, 3, 4, 8)] == close([1.0, 1.2, 1.9, 2.6, 5.2])
    assert replace(measured, slowdown=((1, 1.0), (2, 1.2))).slow(3) == close(1.8), (
        "the cores are in each other's way all the same"
    )


def test_ranks_of_a_cluster_do_not_share_its_links() -> None:
    assert site(LINK).link("reduce", 64) == Link(close(LINK.bandwidth), LINK.latency)


def test_links_of_one_machine_are_shared_like_its_cores() -> None:
    fabric = Fabric(reduce=((2, Link(1e9, 1e-4)), (4, Link(5e8, 3e-4))), gather=((2, LINK),))
    here = Site(fabric, 2**40, 8, cores=2)
    assert here.link("reduce", 3).latency == close(2e-4)
    assert here.link("reduce", 3).bandwidth == close(1 / 1.5e-9)
    assert here.link("reduce", 8) == Link(close(2.5e8), close(6e-4))


def test_sum_of_gradients_is_a_ring() -> None:
    cost = predict(work(), site(LINK), Way(4))
    values = 4000
    assert cost.communication == close(6 * (1e-4 + 4 * values / 4 / 1e9))
    assert cost.seconds == close(cost.compute + cost.communication)


def test_large_sums_are_on_their_way_during_the_backward_pass() -> None:
    large = work(tuple(layer(f"layer-{i}", 0.5 * MS, parameters=2**18) for i in range(4)))  # four pieces of 1 MiB
    slow, fast = Link(bandwidth=1e9, latency=0.0), Link(bandwidth=1e11, latency=0.0)
    whole, hidden = 4 * 2**20 / 1e9, 5 * MS / 2
    assert predict(large, site(slow), Way(2)).communication == close(whole - hidden)
    assert predict(large, site(fast), Way(2)).communication == close(whole / 100 / 4), "the last piece"
    assert predict(large, site(slow, cores=2), Way(2)).communication == close(whole), "sums need the cores too"


@given(st.integers(2, 1024), st.floats(1, 1e9))
@settings(max_examples=50, deadline=None)
def test_ring_sends_least_and_tree_waits_least(ranks: int, size: float) -> None:
    bandwidth_only, latency_only = Link(1e9, 0.0), Link(1e30, 1e-4)
    assert ring_seconds(bandwidth_only, ranks, size) == close(2 * (ranks - 1) / ranks * size / 1e9)
    assert ring_seconds(bandwidth_only, ranks, size) <= tree_seconds(bandwidth_only, ranks, size) * (1 + 1e-9)
    assert tree_seconds(latency_only, ranks, size) <= ring_seconds(latency_only, ranks, size) * (1 + 1e-9)
    assert gather_seconds(bandwidth_only, ranks, size) == close((ranks - 1) * size / 1e9)


def test_compression_trades_bytes_for_coding() -> None:
    slow = Link(bandwidth=1e6, latency=0.0)
    int8 = Compression("int8", value_bytes=1.0, encode=1e-8, decode=2e-8, gathered=True)
    plain, coded = (predict(work(), site(slow), Way(2, compression=how)) for how in (Way().compression, int8))
    assert plain.communication == close(4000 * 4 / 1e6)
    assert coded.communication == close(4000 / 1e6)
    assert coded.compute - plain.compute == close(4000 * (1e-8 + 2 * 2e-8))
    assert coded.memory - plain.memory == 4 * 4000, "what was not sent is kept"


def test_local_updates_pay_for_the_sum_once_in_a_period() -> None:
    every, seldom = (predict(work(spread=0.1), site(LINK), Way(4, mode="local", period=n)) for n in (1, 16))
    assert seldom.communication == close(every.communication / 16)
    assert seldom.idle == close(every.idle / 4)


@pytest.mark.parametrize("ranks", [2, 8, 64, 1024])
def test_the_slowest_of_many_is_where_drawing_puts_it(ranks: int) -> None:
    draws = np.random.default_rng(0).standard_normal((4000, ranks)).max(1)
    assert slowest(ranks) == close(draws.mean(), abs=0.03)


def test_uneven_updates_make_ranks_wait() -> None:
    cost = predict(work(spread=0.2), site(), Way(4))
    assert cost.idle == close(2.5 * MS * 0.2 * slowest(4))
    assert predict(work(spread=0.2), site(), Way()).idle == 0


class TestServers:
    def test_the_servers_link_is_what_all_workers_share(self) -> None:
        own, busy = server_seconds(Link(1e9, 0.0), workers=8, servers=2, values=1000, how=Way().compression)
        assert (own, busy) == (close(8000 / 1e9), close(4 * 8000 / 1e9))

    def test_servers_make_the_steps(self) -> None:
        whole = work(step=2 * MS)
        assert predict(whole, site(), Way(2, mode="server_sync", servers=2)).seconds == close(5 * MS - 2 * MS + 1 * MS)

    def test_sync_waits_for_the_slowest_and_async_does_not(self) -> None:
        uneven = work(spread=0.3)
        sync, stale, loose = (
            predict(uneven, site(), Way(4, mode=mode, servers=2, slack=slack))
            for mode, slack in (("server_sync", 0), ("server_stale", 2), ("server_async", 0))
        )
        assert (loose.idle, stale.idle) == (0, close(sync.idle / 3))

    def test_a_server_that_is_busy_all_the_time_is_the_limit(self) -> None:
        narrow = Link(bandwidth=1e6, latency=0.0)
        cost = predict(work(), site(narrow), Way(4, mode="server_async", servers=1))
        assert cost.seconds == close(4 * 4000 * 8 / 1e6)


class TestSplits:
    def test_tensor_ranks_share_the_layers(self) -> None:
        assert predict(work(), site(), Way(tensor=2)).compute == close(4 * (2 * 0.25 + 0.5) * MS)

    def test_what_a_call_costs_without_rows_is_not_shared(self) -> None:
        called = layer(forward=((8, 2 * MS), (32, 5 * MS)), backward=((8, 0.0), (32, 0.0)))
        cost = predict(work((called,)), site(), Way(tensor=2))
        assert cost.compute == close(2 * (1 + 4 / 2) * MS)

    def test_small_layers_are_kept_whole(self) -> None:
        head = layer(units=6)
        assert predict(work((head,)), site(), Way(tensor=2)) == predict(work((head,)), site(LINK), Way(tensor=2))

    def test_pairs_of_layers_sum_once_each_way(self) -> None:
        cost = predict(work(), site(Link(1e9, 0.0)), Way(tensor=2))
        forward, backward = 2 * 2 * ring(32 * 50), ring(32 * 100)  # the first layer's input needs no gradient
        assert cost.communication == close(forward + backward)

    @pytest.mark.parametrize("micro", [2, 4, 8])
    def test_a_pipeline_waits_while_it_fills_and_drains(self, micro: int) -> None:
        cost = predict(work(), site(), Way(pipeline=2, micro=micro))
        stage = 2 * (2 * 0.5 + 1.0) * MS / micro
        assert cost.seconds == close((micro + 1) * stage)
        assert cost.idle == close(stage)

    def test_a_pipeline_waits_for_its_slowest_stage(self) -> None:
        uneven = work((layer("large", 3 * MS), layer("small", MS)))
        cost = predict(uneven, site(), Way(pipeline=2, micro=4))
        large, small = (4 * seconds / 4 for seconds in (3 * MS, MS))
        assert cost.seconds == close(large + small + 3 * large)

    def test_parts_are_handled_in_every_pass(self) -> None:
        here = replace(site(), handling=Handling(layer=MS, micro_batch=10 * MS))
        plain, tensor, stages = (Way(), Way(tensor=2), Way(pipeline=2, micro=2))
        extra = [
            predict(work(), here, way).seconds - predict(work(), site(), way).seconds for way in (plain, tensor, stages)
        ]
        assert extra == close([0.0, 4 * 3 * MS, (2 + 1) * 3 * 10 * MS])

    def test_a_pipeline_on_one_core_is_as_slow_as_one_device(self) -> None:
        alone = 4 * (2 * 0.5 + 1.0) * MS
        assert predict(work(), site(cores=1), Way(pipeline=2, micro=4)).seconds == close(alone)

    def test_boundaries_send_activations(self) -> None:
        cost = predict(work(), site(Link(1e9, 1e-4)), Way(pipeline=2, micro=2))
        assert cost.communication == close(3 * (1e-4 + 4 * 16 * 50 / 1e9))

    def test_split_networks_need_less_memory(self) -> None:
        whole, halves, stages = (
            predict(work(), site(), way).memory for way in (Way(), Way(tensor=2), Way(pipeline=2, micro=2))
        )
        assert whole == 4 * (5 * 4000 + 32 * 200)
        assert halves == whole / 2
        assert stages == whole / 2

    def test_shards_need_their_part_and_one_layer_with_its_gradient(self) -> None:
        assert predict(work(), site(), Way(2, mode="sharded")).memory == 4 * (5 * 4000 / 2 + 2 * 1000 + 16 * 200)

    def test_shards_are_gathered_in_every_pass_and_summed_once(self) -> None:
        """Three gathers, one more for double, and half of a ring, against a whole ring."""
        link = Link(1e9, 0.0)
        plain = predict(work(), site(link, cores=4), Way(2)).communication
        sharded, double = (
            predict(work(passes=passes), site(link, cores=4), Way(2, mode="sharded")).communication for passes in (1, 2)
        )
        assert (sharded, double) == close((2 * plain, 2.5 * plain))

    @given(st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=7), st.data())
    @settings(max_examples=60, deadline=None)
    def test_stages_are_cut_where_the_slowest_takes_least(self, seconds: list[float], data: st.DataObject) -> None:
        stages = data.draw(st.integers(1, len(seconds)))
        layers = tuple(layer(str(i), spent) for i, spent in enumerate(seconds))
        found = cut(work(layers), stages, 32)
        assert sum(found, ()) == layers
        assert all(found)
        assert len(found) == stages
        everywhere = [
            max(sum(seconds[a:b]) for a, b in pairwise((0, *cuts, len(seconds))))
            for cuts in combinations(range(1, len(seconds)), stages - 1)
        ]
        slowest_stage = max(sum(seconds[int(one.name)] for one in stage) for stage in found)
        assert slowest_stage == close(min(everywhere))


def ring(values: int) -> float:
    return ring_seconds(Link(1e9, 0.0), 2, 4 * values)


@given(
    st.floats(0, 0.01),
    st.floats(1e5, 1e10),
    st.sampled_from([Way(2), Way(4), Way(2, mode="sharded"), Way(tensor=2), Way(2, pipeline=2)]),
)
@settings(max_examples=60, deadline=None)
def test_a_slower_link_never_helps(latency: float, bandwidth: float, way: Way) -> None:
    fast, slow = site(Link(bandwidth, latency)), site(Link(bandwidth / 2, 2 * latency + 1e-6))
    assert predict(work(), slow, way).seconds >= predict(work(), fast, way).seconds


def test_more_rows_need_more_memory() -> None:
    assert predict(replace(work(), batch=64), site(), Way()).memory > predict(work(), site(), Way()).memory
