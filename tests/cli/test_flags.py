"""Every setting of every preset and kind as text and back: as config.yaml, and as flags."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import command
from hypothesis import given, settings
from hypothesis import strategies as st

from qfleet.cli.flags import Given, flag_of, split_words
from qfleet.cli.overrides import HIDDEN, override, visible_settings
from qfleet.core.errors import ConfigError
from qfleet.experiment import Experiment, parse_experiment
from qfleet.presets import preset
from qfleet.presets.algorithms import ALGORITHMS, apply
from qfleet.presets.registry import PRESETS

REPLAY, ROLLOUT = {"agent.kind": "replay"}, {"agent.kind": "rollout", "learner.evaluated": "online"}
KINDS: list[dict[str, str]] = [
    *({"optim.kind": kind} for kind in ("sgd", "adagrad", "rmsprop", "adam", "adamw")),
    *({"optim.schedule.kind": kind} for kind in ("constant", "linear", "cosine", "plateau")),
    *({"network.kind": kind} for kind in ("mlp", "nature", "impala", "small_cnn", "custom")),
    *({"agent.head.kind": kind} for kind in ("scalar", "categorical", "quantile", "implicit_quantile")),
    *({"agent.target.kind": kind} for kind in ("hard", "soft")),
    *({"replay.sampler.kind": kind} for kind in ("uniform", "prioritised")),
    *({"replay.storage.kind": kind} for kind in ("ram", "mapped", "lz4")),
    *({"exploration.kind": kind} for kind in ("epsilon_greedy", "ladder")),
    {"exploration.kind": "none", "agent.noisy": "True"},
    *({"inference.kind": kind} for kind in ("local", "served", "adaptive")),
    *({"learner.weights.kind": kind} for kind in ("none", "bf16", "int8", "delta")),
    {"env.kind": "atari", "env.game": "pong"},
    {"env.kind": "envpool", "env.id": "Pong-v5"},
    {"env.kind": "gym", "env.id": "CartPole-v1"},
    {"env.kind": "tensor", "env.game": "cartpole"},
    REPLAY,
    ROLLOUT,
    {"agent.kind": "tabular", "network.kind": "tabular", "learner.evaluated": "online"},
    {"agent.munchausen": "on", "agent.double": "False"},
    *(
        {"parallel.update.kind": kind, "learners": "2", "placement": "processes"}
        for kind in ("allreduce", "sharded", "server", "local")
    ),
    *(
        {"parallel.compression.kind": kind, "learners": "2", "placement": "processes"}
        for kind in ("none", "fp16", "bf16", "int8", "sign", "topk", "powersgd")
    ),
]


def flagged(experiment: Experiment, flags: dict[str, str]) -> Experiment:
    words = list(itertools.chain.from_iterable((flag_of(name), text) for name, text in flags.items()))
    return override(experiment, split_words(words)[1], own=())[0]


def as_flags(experiment: Experiment) -> list[Given]:
    """Return a flag for every setting of an experiment."""
    flags = []
    for setting in visible_settings(experiment):
        value = setting.default
        if isinstance(value, list | tuple):
            texts = tuple(str(part) for part in value) or ("[]",)
        elif isinstance(value, dict):
            texts = tuple(str(part) for pair in value.items() for part in pair)
        else:
            texts = (str(value),)
        if texts:
            flags.append(Given(flag_of(setting.name), texts))
    return flags


def same_but_name(a: Experiment, b: Experiment) -> bool:
    return a.model_dump(exclude=set(HIDDEN)) == b.model_dump(exclude=set(HIDDEN))


def known_experiments() -> list[Experiment]:
    made = [make() for make in PRESETS.values()]
    made += [flagged(preset("cartpole"), kinds) for kinds in KINDS]
    return made + [apply(preset("cartpole"), name) for name in ALGORITHMS]


def test_the_kinds_here_are_all_kinds_there_are() -> None:
    listed = {(name, kind) for kinds in KINDS for name, kind in kinds.items() if name.endswith("kind")}
    for setting in visible_settings(preset("cartpole")):
        if setting.name.endswith("kind"):
            assert {(setting.name, kind) for kind in setting.annotation.__args__} <= listed


def test_config_yaml_of_every_preset_kind_and_algorithm_reloads_to_the_same() -> None:
    for experiment in known_experiments():
        assert parse_experiment(yaml.safe_load(experiment.to_yaml()), "test") == experiment


def test_flags_for_every_setting_of_every_preset_kind_and_algorithm_give_the_same() -> None:
    for experiment in known_experiments():
        rebuilt, _ = override(preset("cartpole"), as_flags(experiment), own=())
        assert same_but_name(rebuilt, experiment)


@settings(deadline=None, max_examples=25)
@given(
    lr=st.floats(1e-12, 1e3),
    hidden=st.lists(st.integers(1, 4096), max_size=4),
    seed=st.integers(0, 2**63 - 1),
    betas=st.tuples(*[st.floats(0, 1, exclude_max=True)] * 2),
    clip=st.none() | st.floats(1e-300, 1e300),
    double=st.booleans(),
    order=st.randoms(use_true_random=False),
)
def test_flag_values_arrive_exactly_in_any_order(
    lr: float, hidden: list[int], seed: int, betas: tuple[float, float], clip: float | None, double: bool, order: Any
) -> None:
    flags = [
        Given("--optim.lr", (repr(lr),)),
        Given("--network.hidden", tuple(map(str, hidden)) or ("()",)),
        Given("--seed", (str(seed),)),
        Given("--optim.betas", tuple(map(repr, betas))),
        Given("--optim.max-grad-norm", (repr(clip),)),
        Given("--agent.double", (str(double),)),
        Given("--optim.kind", ("adamw",)),
    ]
    order.shuffle(flags)
    experiment, changes = override(preset("cartpole"), flags, own=())
    assert (experiment.optim.kind, experiment.optim.lr, experiment.seed) == ("adamw", lr, seed)
    assert experiment.network.hidden == tuple(hidden)  # type: ignore[union-attr]
    assert experiment.optim.betas == betas  # type: ignore[union-attr]
    assert experiment.optim.max_grad_norm == clip
    assert experiment.agent.double is double  # type: ignore[union-attr]
    assert len(changes) == len(flags)
    assert parse_experiment(yaml.safe_load(experiment.to_yaml()), "test") == experiment


@pytest.mark.parametrize(
    "words",
    ["--optim.lr 5e-4", "--optim.lr=5e-4", "--optim.lr=0.0005"],
)
def test_both_ways_to_write_a_value(words: str) -> None:
    assert override(preset("cartpole"), split_words(words.split())[1], own=())[0].optim.lr == 5e-4


@pytest.mark.parametrize("words", ["64 32", "64,32", "[64, 32]", "(64,32)"])
def test_all_ways_to_write_several_values(words: str) -> None:
    texts = tuple(words.split()) if words == "64 32" else (words,)
    experiment, _ = override(preset("cartpole"), [Given("--network.hidden", texts)], own=())
    assert experiment.network.hidden == (64, 32)  # type: ignore[union-attr]


def test_dashes_and_underscores_mean_the_same() -> None:
    base = preset("cartpole")
    assert flagged(base, {"agent.n_step": "5"}) == override(base, [Given("--agent.n_step", ("5",))], own=())[0]


def test_negative_numbers_are_values_and_not_flags() -> None:
    loose, given = split_words(["--agent.munchausen.clip", "-0.5", "--target", "-1e3", "--x", "-.5"])
    assert loose == []
    assert [flag.texts for flag in given] == [("-0.5",), ("-1e3",), ("-.5",)]


def test_a_value_with_dashes_goes_behind_an_equals_sign() -> None:
    experiment, _ = override(preset("cartpole"), split_words(["--track.wandb=--my-project"])[1], own=())
    assert experiment.track.wandb == "--my-project"


def test_settings_of_an_optional_section_switch_it_on() -> None:
    experiment = flagged(preset("cartpole"), {"agent.munchausen.alpha": "0.5", "agent.double": "False"})
    assert experiment.agent.munchausen.alpha == 0.5  # type: ignore[union-attr]
    assert flagged(experiment, {"agent.munchausen": "None"}).agent.munchausen is None  # type: ignore[union-attr]


def test_naming_the_present_kind_changes_nothing() -> None:
    assert flagged(preset("cartpole"), {"agent.target.kind": "soft"}) == preset("cartpole")


def test_another_kind_begins_with_its_own_defaults() -> None:
    experiment = flagged(preset("cartpole"), {"optim.kind": "rmsprop", "optim.momentum": "0.5"})
    assert (experiment.optim.kind, experiment.optim.lr) == ("rmsprop", 1e-3)
    assert experiment.optim.momentum == 0.5  # type: ignore[union-attr]


def test_a_new_kind_brings_sections_of_its_own_that_can_be_set_at_once() -> None:
    experiment = flagged(preset("cartpole"), {"optim.kind": "adamw", "optim.schedule.warmup": "5"})
    assert (experiment.optim.kind, experiment.optim.schedule.kind) == ("adamw", "constant")
    assert experiment.optim.schedule.warmup == 5


def test_fields_that_tell_what_an_experiment_is_cannot_be_set() -> None:
    for name in HIDDEN:
        with pytest.raises(ConfigError, match="unknown flag"):
            flagged(preset("cartpole"), {name: "1"})


@pytest.mark.parametrize("path", ["", "runs/a\0b"])
@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["train", "cartpole", "--run-dir", "{}"], "--run-dir"),
        (["train", "cartpole", "--run-dir={}"], "--run-dir"),
        (["train", "cartpole", "--seeds", "2", "--run-dir", "{}"], "--run-dir"),
        (["resume", "{}"], "RUN_DIR"),
        (["eval", "{}"], "RUN_DIR"),
        (["eval", "run", "--record", "{}"], "--record"),
        (["compare", "run", "{}"], "RUNS"),
        (["compare", "run", "--output", "{}"], "--output"),
    ],
)
def test_a_path_that_is_empty_or_holds_a_nul_byte_is_refused(
    words: list[str],
    named: str,
    path: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = command(capsys, *(word.replace("{}", path) for word in words))
    assert (outcome.code, outcome.out) == (2, "")
    assert f"'{named}'" in outcome.err
    assert "should be a path" in outcome.err
    assert not list(tmp_path.iterdir())
