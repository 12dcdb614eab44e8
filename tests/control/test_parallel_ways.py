"""Which ways are considered, refused and chosen, and how that is told."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parallel_cases import LINK, MS, layer, site, work
from plan_cases import experiment

from qfleet.control.parallel_cost import predict
from qfleet.control.parallel_parts import Compression, Link, Way, Work
from qfleet.control.parallel_table import candidates_table
from qfleet.control.parallel_ways import ALIKE, Choice, considered, ways, weigh
from qfleet.experiment import with_changes

SLOW = Link(bandwidth=1e6, latency=1e-3)
CODED = Compression("top-k", value_bytes=0.016, gathered=True)


def obstacle(way: Way, of: Work | None = None, **place: int) -> str:
    return considered(of or work(), site(**place), way).obstacle


def test_every_way_stays_within_the_ranks_and_none_comes_twice() -> None:
    found = list(ways(work(), site(ranks=8), [CODED]))
    assert found[0] == Way()
    assert len(set(found)) == len(found)
    assert max(way.ranks for way in found) == 8
    assert {(way.data, way.tensor, way.pipeline) for way in found} >= {(2, 2, 2), (8, 1, 1), (1, 8, 1), (3, 1, 1)}


def test_a_network_without_layers_is_not_split() -> None:
    assert {way.tensor * way.pipeline for way in ways(work(()), site())} == {1}


class TestRefusals:
    def test_more_ranks_than_rows(self) -> None:
        assert obstacle(Way(64)) == "does not divide: 64 ranks cannot share a batch of 32"

    def test_more_stages_than_layers(self) -> None:
        assert obstacle(Way(pipeline=8, micro=8)) == "does not divide: 4 layers make no 8 stages"

    def test_micro_batches_of_different_sizes(self) -> None:
        assert "32 rows of a rank make no 3 equal micro-batches" in obstacle(Way(pipeline=3, micro=3))

    def test_a_layer_that_tensor_ranks_cannot_share_is_named_with_what_would_fit(self) -> None:
        odd = work((layer("first", units=64), layer("second", units=48)))
        assert obstacle(Way(tensor=5), odd) == (
            "does not divide: layer first has 64 outputs (tensor degrees that fit: 2, 4, 8, 16)"
        )
        assert obstacle(Way(tensor=4), odd) == ""

    def test_only_small_layers(self) -> None:
        assert "no layer has 16 outputs or more" in obstacle(Way(tensor=2), work((layer(units=6),)))

    def test_a_network_that_does_not_fit_a_device(self) -> None:
        large = work((layer(parameters=10**9), layer(parameters=10**9)))
        assert obstacle(Way(2), large, memory=30 * 2**30).startswith(
            "does not fit: a rank need 37.25 GiB, there are 30"
        )
        choice = weigh(large, site(memory=30 * 2**30))
        assert choice.best.way.tensor * choice.best.way.pipeline > 1
        assert "one device cannot hold the network" in choice.why

    def test_ranks_of_one_machine_share_its_memory(self) -> None:
        needed = considered(work(), site(), Way()).cost
        assert needed is not None
        room = int(1.5 * needed.memory)
        assert "2 ranks together" in considered(work(), site(memory=room, cores=2), Way(2)).obstacle
        assert considered(work(), site(memory=room), Way(2)).cost

    def test_nothing_fits(self) -> None:
        choice = weigh(work(), site(memory=1))
        assert choice.why.startswith("nothing is possible: does not fit")
        assert "does not fit" in candidates_table(choice)


class TestChoice:
    def test_one_device_is_best_where_talking_costs_more_than_it_saves(self) -> None:
        choice = weigh(work(), site(SLOW))
        assert choice.best.way == Way()
        assert choice.why.startswith("one device is best: ")
        assert "most of the loss by communication" in choice.why

    def test_more_ranks_are_best_where_talking_is_free(self) -> None:
        choice = weigh(work(()), site())
        assert choice.best.way == Way(4)
        assert "4.00 times as fast as one device" in choice.why

    def test_ranks_on_one_core_are_not_taken(self) -> None:
        assert weigh(work(()), site(cores=1)).best.way == Way()

    def test_about_as_fast_with_fewer_ranks_is_taken(self) -> None:
        flat = work((), update=((8, 10 * MS * (1 - ALIKE / 2)), (32, 10 * MS)))
        assert weigh(flat, site()).best.way == Way()

    def test_what_learns_otherwise_is_shown_but_not_chosen(self) -> None:
        choice = weigh(work(), site(Link(bandwidth=1e6, latency=0.0)), [CODED])
        fastest = choice.candidates[0]
        assert choice.best.way.exact
        assert not fastest.way.exact
        assert f"{fastest.way} would take" in choice.why
        assert "learns otherwise" in choice.why

    @given(st.floats(1e5, 1e11), st.floats(0, 1e-2), st.sampled_from([1.0, 2.0, 4.0]))
    @settings(max_examples=40, deadline=None)
    def test_nothing_exact_is_clearly_faster_than_the_choice(self, rate: float, latency: float, cores: float) -> None:
        choice = weigh(work(), site(Link(rate, latency), cores=cores))
        exact = [one.cost.seconds for one in choice.candidates if one.cost and one.way.exact]
        assert choice.best.cost is not None
        assert choice.best.cost.seconds <= min(exact) / (1 - ALIKE) * (1 + 1e-9)

    def test_shards_are_for_what_fits_no_other_way(self) -> None:
        """Layers that tensor ranks cannot share, and a pipeline whose one large layer fits no stage."""
        large = layer("large", 2.2 * MS, units=0, parameters=8000)
        odd = work((*(layer(f"layer-{i}", 0.1 * MS, units=0) for i in range(3)), large))
        whole = predict(odd, site(), Way()).memory
        roomy, tight = (weigh(odd, site(memory=memory)).best.way for memory in (whole, int(0.6 * whole)))
        assert roomy == Way(4)
        assert tight == Way(4, mode="sharded")

    def test_some_ways_only(self) -> None:
        assert weigh(work(), site(), among=[Way(), Way(2)]).best.way == Way(2)


class TestTable:
    @pytest.fixture
    def choice(self) -> Choice:
        return weigh(work(), site(LINK), [CODED])

    def test_columns_add_up_and_stand_below_each_other(self, choice: Choice) -> None:
        lines = candidates_table(choice).splitlines()
        ends = [line.index("ms") + 2 for line in lines[:1]]
        assert lines[0].split() == ["plan", "ms", "compute", "communication", "waiting", "memory", "verdict"]
        for line in lines[1:10]:
            assert line[ends[0] - 1].isdigit()
            assert line[ends[0]] == " "
            shares = [int(word.rstrip("%")) for word in line.split() if word.endswith("%")]
            assert sum(shares) == pytest.approx(100, abs=2)
        assert lines[-1] == choice.why

    def test_exactly_one_is_chosen_and_one_device_is_always_there(self, choice: Choice) -> None:
        lines = candidates_table(choice, shown=2).splitlines()
        assert sum(line.endswith("chosen") for line in lines) == 1
        assert any(line.startswith("one device") for line in lines)
        assert any("more are left out" in line for line in lines)

    def test_refused_ways_say_why(self, choice: Choice) -> None:
        assert "does not divide: layer layer-0 has 64 outputs" in candidates_table(choice)


@pytest.mark.parametrize("way", [way for way in ways(work(), site()) if not considered(work(), site(), way).obstacle])
def test_every_way_is_a_valid_experiment(way: Way) -> None:
    placed = experiment(**{"actors": 4, "learner.batch_size": 32})
    made = with_changes(placed, way.settings)
    assert (made.learners, made.parallel.tensor, made.parallel.pipeline) == (way.data, way.tensor, way.pipeline)
    kind = {"all_reduce": "allreduce", "sharded": "sharded", "local": "local"}.get(way.mode, "server")
    assert made.parallel.update.kind == kind


@pytest.mark.parametrize(
    ("way", "words"),
    [
        (Way(), "one device"),
        (Way(2, 2), "data 2 x tensor 2"),
        (Way(pipeline=2, micro=4), "pipeline 2, 4 micro-batches"),
        (Way(3, mode="server_stale", servers=2, slack=2), "data 3, 2 servers stale 2"),
        (Way(2, mode="server_async", servers=1), "data 2, 1 server async"),
        (Way(2, mode="sharded"), "data 2, sharded"),
        (Way(2, mode="local", period=16), "data 2, averaged every 16"),
        (Way(2, compression=CODED), "data 2, top-k"),
    ],
)
def test_ways_have_plain_names(way: Way, words: str) -> None:
    assert str(way) == words
