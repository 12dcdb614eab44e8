"""The model directory: what is saved is what is loaded, and nothing else is ever loaded."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import safetensors.torch
import torch
from algo_cases import MIXED, STATES, VECTOR, leaves
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from qfleet.algo.agent import MunchausenConfig, ReplayAgent, RolloutAgent, TabularAgent
from qfleet.algo.flat import FlatParameters
from qfleet.algo.heads import CategoricalConfig, ImplicitQuantileConfig
from qfleet.algo.inputs import InputConfig
from qfleet.algo.model_io import DESCRIPTION, TENSORS, ModelConfigs, _digest, load_model, read_tensors, save_model
from qfleet.algo.networks import build_network
from qfleet.algo.policy import Policy
from qfleet.algo.torsos import CustomConfig, MlpConfig, SmallCnnConfig, TabularConfig
from qfleet.core.errors import CheckpointError, ConfigError
from qfleet.core.spec import PLAIN, EnvSpec


class Own(nn.Module):
    """A user's torso."""

    def __init__(self, spec: EnvSpec) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


CASES = {
    "dqn": (MlpConfig(hidden=(8,), input=InputConfig(scale=(0.1, 1 / 3, 5.0, 2.0))), ReplayAgent(), VECTOR),
    "rainbow": (
        MlpConfig(hidden=(8, 8)),
        ReplayAgent(double=True, noisy=True, dueling=True, head=CategoricalConfig(atoms=5)),
        VECTOR.replace(actions=6, action_shape=(2, 3), masked=True),
    ),
    "miqn": (
        SmallCnnConfig(channels=(4,), dense=8, spectral_norm=True, input=InputConfig(normalize=True, embedding=2)),
        ReplayAgent(munchausen=MunchausenConfig(), head=ImplicitQuantileConfig(cosines=4)),
        MIXED,
    ),
    "pqn": (MlpConfig(hidden=(8, 8), layer_norm=True), RolloutAgent(), VECTOR),
    "table": (TabularConfig(), TabularAgent(), STATES),
}


def save(directory, config, agent, spec, custom=None, seed=1):
    network = build_network(config, agent, spec, seed, custom)
    FlatParameters(network)  # as a learner holds it
    observations = {k: torch.from_numpy(np.asarray(v)) for k, v in leaves(spec, np.random.default_rng(0), 9).items()}
    network.observe(observations)
    save_model(directory, network, spec, ModelConfigs(network=config, agent=agent), {"reward_scale": 0.1})
    return network


@pytest.mark.parametrize("name", CASES)
def test_round_trip_is_exact(name, tmp_path):
    config, agent, spec = CASES[name]
    network = save(tmp_path / "model", config, agent, spec)
    model = load_model(tmp_path / "model")
    assert (model.spec, model.configs.network, model.configs.agent) == (spec, config, agent)
    assert model.extra == {"reward_scale": 0.1}
    ours, theirs = network.state_dict(), model.network.state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    observations = leaves(spec, np.random.default_rng(2), 7)
    raw = observations[PLAIN] if spec.plain else observations
    np.testing.assert_array_equal(Policy(network, spec).q(raw), Policy(model.network, spec).q(raw))
    assert set(read_tensors(tmp_path / "model")) == set(ours)


def test_the_same_model_is_the_same_bytes_and_leaves_nothing_beside(tmp_path):
    for name in ("a", "b", "a"):
        save(tmp_path / name, *CASES["rainbow"])
    for file in (TENSORS, DESCRIPTION):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    assert {path.name for path in (tmp_path / "a").iterdir()} == {TENSORS, DESCRIPTION}


def test_a_custom_network_demands_its_class_and_takes_no_other(tmp_path):
    network = save(tmp_path, CustomConfig(dense=5), ReplayAgent(), VECTOR, custom=Own)
    with pytest.raises(ConfigError, match=r"your own network class 'Own'.*network=Own"):
        load_model(tmp_path)
    model = load_model(tmp_path, Own)
    x = np.ones((2, 4), np.float32)
    np.testing.assert_array_equal(Policy(model.network, VECTOR).q(x), Policy(network, VECTOR).q(x))

    class Other(Own):
        def __init__(self, spec: EnvSpec) -> None:
            super().__init__(spec)
            self.layer = nn.Linear(4, 7)

    with pytest.raises(CheckpointError, match="does not fit its network"):
        load_model(tmp_path, Other)


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    directory = tmp_path_factory.mktemp("good")
    save(directory, *CASES["dqn"])
    return {file: (directory / file).read_bytes() for file in (TENSORS, DESCRIPTION)}


def _write(directory, files):
    directory.mkdir(exist_ok=True)
    for file, content in files.items():
        (directory / file).write_bytes(content)
    return directory


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_a_flipped_bit_or_a_cut_is_refused_or_harmless(good, tmp_path_factory, data):
    file = data.draw(st.sampled_from([TENSORS, DESCRIPTION]))
    content = bytearray(good[file])
    if data.draw(st.booleans()):
        place = data.draw(st.integers(0, len(content) - 1))
        content[place] ^= 1 << data.draw(st.integers(0, 7))
    else:
        content = content[: data.draw(st.integers(0, len(content) - 1))]
    directory = _write(tmp_path_factory.getbasetemp() / "damaged", {**good, file: bytes(content)})
    if file == DESCRIPTION and _same_json(bytes(content), good[DESCRIPTION]):
        assert load_model(directory).configs.network == CASES["dqn"][0]
        return
    with pytest.raises(CheckpointError, match=re.escape(str(directory))):
        load_model(directory)


def _same_json(first, second):
    """Whether only white space differs."""
    try:
        return json.loads(first) == json.loads(second)
    except ValueError:
        return False


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({DESCRIPTION: b"{}"}, "is not the description of a qfleet model"),
        ({DESCRIPTION: b"[1, 2]"}, "is not the description of a qfleet model"),
        ({DESCRIPTION: b"\x80\x04pickle"}, "model.json is damaged"),
        ({DESCRIPTION: b"[" * 100_000}, "model.json is damaged"),
        ({DESCRIPTION: b'{"format": "qfleet-model", "version": 99}'}, "install a newer qfleet"),
        ({DESCRIPTION: b'{"format": "qfleet-model", "version": 1}'}, "does not have the hash"),
        ({DESCRIPTION: b'{"format": "qfleet-model", "version": "x"}'}, "its version is 'x'"),
        ({TENSORS: b""}, "model.safetensors is damaged, or belongs to another"),
    ],
)
def test_foreign_and_newer_files_are_refused_by_name(good, tmp_path, files, words):
    with pytest.raises(CheckpointError, match=words) as error:
        load_model(_write(tmp_path / "model", {**good, **files}))
    assert str(tmp_path) in str(error.value)


def test_weights_of_another_run_are_refused(good, tmp_path):
    foreign = safetensors.torch.save({"x": torch.zeros(3)})
    with pytest.raises(CheckpointError, match="belongs to another"):
        load_model(_write(tmp_path / "model", {**good, TENSORS: foreign}))


def test_a_missing_model_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"model.json cannot be read: No such file"):
        load_model(tmp_path / "nowhere")


def _hashed(description):
    """Return a description as the file that has the right hash."""
    description = {key: value for key, value in description.items() if key != "sha256"}
    return json.dumps({**description, "sha256": _digest(description)}).encode()


@pytest.mark.parametrize("key", ["tensors_sha256", "spec", "network", "agent", "custom_class", "extra"])
def test_a_well_hashed_description_without_an_entry_is_refused_by_name(good, tmp_path, key):
    description = json.loads(good[DESCRIPTION])
    del description[key]
    directory = _write(tmp_path / "model", {**good, DESCRIPTION: _hashed(description)})
    for read in (load_model, read_tensors):
        with pytest.raises(CheckpointError, match=rf"model\.json is damaged: it has no '{key}'") as error:
            read(directory)
        assert str(directory) in str(error.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[(key, value) for key in ("spec", "network", "agent", "extra") for value in (3, [1], "x", None)],
        ("network", {"kind": "other"}),
        ("agent", {"kind": "replay", "gama": 0.9}),
        ("spec", {"name": "x"}),
    ],
)
def test_a_well_hashed_description_with_a_foreign_entry_is_refused_by_name(good, tmp_path, key, value):
    text = _hashed({**json.loads(good[DESCRIPTION]), key: value})
    with pytest.raises(CheckpointError, match=rf"model\.json .*{key}") as error:
        load_model(_write(tmp_path / "model", {**good, DESCRIPTION: text}))
    assert "pydantic" not in str(error.value)
