"""Where networks are cut into stages, and which cuts and micro-batches are refused."""

from __future__ import annotations

import pytest
from split_cases import CAMERAS, PLAIN_AGENT, SMALL, VECTOR, Anonymous, Own, network_of
from torch import nn

from qfleet.algo.networks import build_network
from qfleet.algo.torsos import CustomConfig, MlpConfig, NatureConfig
from qfleet.core.errors import ConfigError
from qfleet.core.spec import EnvSpec
from qfleet.parallel.pipeline import check_micro_batches
from qfleet.parallel.points import SplitPoints
from qfleet.parallel.stages import plan_cut, widths_between


@pytest.mark.parametrize("case", ["nature", "impala", "mlp", "own"])
def test_every_layer_is_in_one_stage_in_order(case: str) -> None:
    network = network_of(case)
    whole = [name for name, _ in plan_cut(network, 1).stages[0]]
    for degree in (2, 3):
        cut = plan_cut(network, degree)
        assert [name for layers in cut.stages for name, _ in layers] == whole
        assert len(cut.stages) == degree
        assert all(cut.stages[:-1]), "the last stage has the head, the others need layers"
        assert len(widths_between(cut)) == degree


def test_cut_makes_the_costliest_stage_cheap() -> None:
    wide = MlpConfig(hidden=(256, 256, 8, 8, 8))
    network = build_network(wide, PLAIN_AGENT, VECTOR, seed=0)
    cut = plan_cut(network, 3)
    assert cut.stages[1][0][0] == "torso.body.layers.2", "256 x 256 alone outweighs the rest"
    assert len(cut.stages[1]) == 2


def test_shapes_between_stages() -> None:
    network = network_of("nature")
    cut = plan_cut(network, 4)
    assert cut.shapes[1:] == [(32, 20, 20), (64, 9, 9), (3136,)]
    assert widths_between(cut) == [12800, 5184, 3136, 3136]


def test_more_stages_than_layers_are_refused_with_what_would_work() -> None:
    with pytest.raises(ConfigError, match=r"pipeline 5 needs 4 places to cut, and the network names 3: .* 1 or 2 or 3"):
        plan_cut(network_of("nature"), 5)
    shallow = build_network(MlpConfig(hidden=(8,)), PLAIN_AGENT, VECTOR, seed=0)
    with pytest.raises(ConfigError, match="names 0: pipeline 1 would work"):
        plan_cut(shallow, 2)


def test_what_names_no_layers_is_cut_before_the_head_only() -> None:
    for network in (
        build_network(NatureConfig(dense=8), PLAIN_AGENT, CAMERAS, seed=0),
        build_network(CustomConfig(), PLAIN_AGENT, VECTOR, seed=0, custom=Anonymous),
    ):
        assert [[name for name, _ in layers] for layers in plan_cut(network, 2).stages] == [["torso"], []]
        with pytest.raises(ConfigError, match=r"pipeline 1 or 2 would work; .*split_points\(\)"):
            plan_cut(network, 3)


def test_micro_batches_must_suit_the_schedule() -> None:
    check_micro_batches(1, 4, "gpipe")
    check_micro_batches(4, 4, "1f1b")
    with pytest.raises(ConfigError, match="3 micro-batches are too few for 4 stages with the schedule '1f1b': use 4"):
        check_micro_batches(3, 4, "1f1b")
    with pytest.raises(ConfigError, match="use 1 or more"):
        check_micro_batches(0, 2, "gpipe")


@pytest.mark.parametrize("parts", [("stem", "rest"), ("turn", "rest")])
def test_parts_that_are_not_the_whole_forward_are_refused(parts: tuple[str, ...]) -> None:
    class Forgetful(Own):
        def __init__(self, spec: EnvSpec) -> None:
            super().__init__(spec)
            self.turn = nn.Conv2d(6, 6, 1)
            self.rest[1] = nn.Linear(24, 12)

        def split_points(self) -> SplitPoints:
            return SplitPoints(parts=parts)

    network = build_network(CustomConfig(), PLAIN_AGENT, SMALL, seed=0, custom=Forgetful)
    with pytest.raises(ConfigError, match=r"do not do what forward\(\) does"):
        plan_cut(network, 2)
