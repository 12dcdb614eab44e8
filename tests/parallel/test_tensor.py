"""Which layers are split by channels, and which networks are refused."""

from __future__ import annotations

from typing import Any

import pytest
from split_cases import CAMERAS, MLP, PLAIN_AGENT, SMALL, VECTOR, Anonymous, Own, network_of

from qfleet.algo.agent import ReplayAgent
from qfleet.algo.networks import QNetwork, build_network
from qfleet.algo.recurrent import MemoryConfig
from qfleet.algo.torsos import CustomConfig, MlpConfig, NatureConfig
from qfleet.core.errors import ConfigError
from qfleet.parallel.mesh import Degrees
from qfleet.parallel.points import SplitPoints, widths
from qfleet.parallel.splitting import check_split
from qfleet.parallel.stages import plan_cut
from qfleet.parallel.tensor import check_widths


def own_network(points: SplitPoints) -> QNetwork:
    class Renamed(Own):
        def split_points(self) -> SplitPoints:
            return points

    return build_network(CustomConfig(dense=16), PLAIN_AGENT, SMALL, seed=0, custom=Renamed)


def names(case: Any, pipeline: int = 1) -> tuple[list[tuple[str, str]], list[str]]:
    network = network_of(case) if isinstance(case, str) else case
    found = widths(network, plan_cut(network, pipeline).stages)
    return [(first[0], second[0]) for first, second in found.pairs], [name for name, _ in found.lone]


def test_convolutions_and_dense_layers_are_paired_in_their_order() -> None:
    pairs, lone = names("nature")
    images = "torso.body.images.0"
    assert pairs[0] == (f"{images}.0", f"{images}.2")
    assert lone == [f"{images}.4"]
    streams = [(f"head.streams.{name}.0", f"head.streams.{name}.2") for name in ("advantage", "value")]
    assert pairs[1:] == streams


def test_residual_blocks_are_pairs_and_convolutions_before_pooling_stand_alone() -> None:
    pairs, lone = names("impala")
    assert lone == ["torso.body.images.0.0", "torso.body.images.0.4"]
    assert ("torso.body.images.0.2.layers.1", "torso.body.images.0.2.layers.3") in pairs


def test_normalised_layers_are_no_pairs_and_the_last_layer_of_a_head_is_left_whole() -> None:
    pairs, lone = names("norm")
    assert pairs == []
    assert "head.streams.advantage.0" in lone
    assert "head.streams.advantage.3" not in lone


def test_noisy_heads_are_left_whole() -> None:
    pairs, lone = names("noisy")
    assert not [name for name in [*(layer for pair in pairs for layer in pair), *lone] if name.startswith("head")]


def test_no_pair_spans_two_stages() -> None:
    for case in ("nature", "impala", "mlp"):
        for degree in (2, 3):
            network = network_of(case)
            cut = plan_cut(network, degree)
            for first, second in widths(network, cut.stages).pairs:
                homes = [
                    i
                    for i, layers in enumerate(cut.stages)
                    for name, _ in layers
                    for layer in (first[0], second[0])
                    if f"{layer}.".startswith(f"{name}.")
                ]
                assert len(set(homes)) <= 1, (case, degree, first[0])


def test_every_image_of_several_is_split() -> None:
    network = build_network(NatureConfig(dense=8), PLAIN_AGENT, CAMERAS, seed=0)
    pairs, _ = names(network)
    assert ("torso.body.images.1.0", "torso.body.images.1.2") in pairs


def test_degree_that_does_not_divide_names_the_layer_and_what_would_work() -> None:
    network = network_of("mlp")
    found = widths(network, plan_cut(network, 1).stages)
    check_widths(network, found, 2)
    with pytest.raises(ConfigError, match=r"tensor 3 does not divide the 16 outputs of .*layers\.0'; tensor 1, 2, 4"):
        check_widths(network, found, 3)


@pytest.mark.parametrize(
    ("points", "message"),
    [
        (SplitPoints(pairs=(("stem.0", "rest.1"),)), "are no pair: the first has 8 outputs, the second 16 inputs"),
        (SplitPoints(lone=("stem.1",)), r"'torso.body.module.stem.1' \(SiLU\) cannot be split"),
        (SplitPoints(lone=("trunk",)), "Renamed.split_points.* names 'trunk', which it has no submodule of"),
    ],
)
def test_split_points_that_cannot_be_are_refused(points: SplitPoints, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_split(own_network(points), Degrees(tensor=2))


def test_pair_in_two_stages_is_refused() -> None:
    points = SplitPoints(parts=("stem", "turn", "rest"), pairs=(("stem.2", "turn"),))
    with pytest.raises(ConfigError, match="cannot be in two pipeline stages"):
        check_split(own_network(points), Degrees(pipeline=4, tensor=2))


@pytest.mark.parametrize(
    ("config", "agent", "message"),
    [
        (MLP.model_copy(update={"dropout": 0.1}), PLAIN_AGENT, "cannot split dropout .*set network.dropout to 0"),
        (MLP.model_copy(update={"spectral_norm": True}), PLAIN_AGENT, "a state besides its parameters"),
        (MLP, ReplayAgent(memory=MemoryConfig()), "cannot split a network with memory"),
    ],
)
def test_networks_that_cannot_be_split_are_refused(config: MlpConfig, agent: ReplayAgent, message: str) -> None:
    network = build_network(config, agent, VECTOR, seed=0)
    for degrees in (Degrees(tensor=2), Degrees(pipeline=2)):
        with pytest.raises(ConfigError, match=message):
            check_split(network, degrees)
    check_split(network, Degrees(data=2))


def test_tied_parameters_are_refused() -> None:
    network = network_of("mlp")
    streams: Any = network.head.streams  # type: ignore[union-attr]
    streams.advantage[0].weight = streams.value[0].weight
    with pytest.raises(ConfigError, match="tied parameters"):
        check_split(network, Degrees(tensor=2))


def test_network_without_split_points_is_refused_with_what_to_write() -> None:
    network = build_network(CustomConfig(), PLAIN_AGENT, VECTOR, seed=0, custom=Anonymous)
    with pytest.raises(ConfigError, match=r"names no layer.*split_points\(\) that names pairs"):
        check_split(network, Degrees(tensor=2))
    check_split(network, Degrees(pipeline=2))
