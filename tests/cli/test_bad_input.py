"""Five hundred mutated command lines and configuration files: each refused in one line that names what is wrong."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import annotated_types
import numpy as np
import pytest
import yaml
from commands import Outcome, command, real_command
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from qfleet import api
from qfleet.cli.flags import flag_of
from qfleet.cli.overrides import ALIASES, visible_settings
from qfleet.cli.settings import Setting
from qfleet.cli.train import TrainOptions
from qfleet.core.config import kind_of, models_in
from qfleet.experiment import Experiment
from qfleet.presets import preset
from qfleet.presets.registry import PRESETS
from qfleet.session import Session

LETTERS = "abcdefghijklmnopqrstuvwxyz"
BASE = preset("cartpole")
SETTINGS = {setting.name: setting for setting in visible_settings(BASE)}
KNOWN = {*SETTINGS, *ALIASES, *TrainOptions.model_fields}


@pytest.fixture(autouse=True)
def _nothing_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a run was started")

    monkeypatch.setattr(api, "train", started)
    monkeypatch.setattr(Session, "carry_out", started)
    monkeypatch.chdir(tmp_path)


def assert_refused(outcome: Outcome, case: object, *fragments: str) -> None:
    shown = f"{case}\n{outcome}"
    assert outcome.code == 2, shown
    assert outcome.out == "", shown
    assert outcome.err.startswith("error: "), shown
    for leaked in ("Traceback", "pydantic", "https://", "tyro", "internal error", "╭"):
        assert leaked not in outcome.err, shown
    for fragment in fragments:
        assert fragment in outcome.err, f"{fragment!r} is not in:\n{shown}"


def assert_flags_refused(capsys: pytest.CaptureFixture[str], words: list[str], *fragments: str) -> Outcome:
    outcome = command(capsys, "train", "cartpole", "--run-dir", "runs/x", *words)
    assert_refused(outcome, words, *fragments)
    assert not list(Path().iterdir()), f"{words} left something behind"
    return outcome


def mutate(name: str, rng: np.random.Generator) -> str:
    """Return the name with one typing error: a letter left out, doubled, exchanged or replaced."""
    places = [i for i, letter in enumerate(name) if letter.isalpha()]
    at = int(rng.choice(places))
    letter = LETTERS[rng.integers(26)]
    variants = (
        name[:at] + name[at + 1 :],
        name[:at] + name[at] + name[at:],
        name[:at] + name[at + 1 : at + 2] + name[at] + name[at + 2 :],
        name[:at] + letter + name[at + 1 :],
    )
    return variants[rng.integers(4)]


def distance(a: str, b: str) -> int:
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        previous, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, previous + (x != y))
    return row[-1]


def a_value(setting: Setting) -> list[str]:
    value = setting.default
    if isinstance(value, list | tuple):
        return [str(part) for part in value] or ["1.0"]
    return [str(value)] if not isinstance(value, dict) else ["a", "1"]


def fields(model: type[BaseModel], tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield the dotted name and the pydantic field of every setting."""
    for name, field in model.model_fields.items():
        members = models_in(field.annotation)
        if not members:
            yield f"{prefix}{name}", field
        elif tree[name] is not None:
            chosen = next(m for m in members if kind_of(m) == tree[name].get("kind"))
            yield from fields(chosen, tree[name], f"{prefix}{name}.")


def out_of_range() -> list[tuple[str, str]]:
    """Return (setting, text) of a value just outside each bound of each number."""
    found = []
    for name, field in fields(Experiment, BASE.model_dump(mode="json")):
        whole = int in (field.annotation, *get_args(field.annotation))
        step = 1 if whole else 0.5
        for bound in field.metadata:
            match bound:
                case annotated_types.Gt(gt=limit) | annotated_types.Lt(lt=limit):
                    found.append((name, str(limit)))
                case annotated_types.Ge(ge=limit):
                    found.append((name, str(limit - step)))
                case annotated_types.Le(le=limit):
                    found.append((name, str(limit + step)))
        if not whole and float in (field.annotation, *get_args(field.annotation)):
            found += [(name, "nan"), (name, "inf")]
    return [(name, text) for name, text in found if name in SETTINGS]


def suggested(outcome: Outcome) -> str:
    match = re.search(r"Did you mean '(.*)'\?", outcome.err)
    assert match is not None, outcome
    return match[1]


def test_150_misspelt_flags_get_the_nearest_flag(capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(150)
    cases = ((name, mutate(name, rng)) for name in iter(lambda: str(rng.choice(sorted(KNOWN))), ""))
    for name, wrong in islice((case for case in cases if case[1] not in KNOWN), 150):
        words = [flag_of(wrong), *(a_value(SETTINGS[name]) if name in SETTINGS else ["1"])]
        outcome = assert_flags_refused(capsys, words, f"'{flag_of(wrong)}'")
        hint = suggested(outcome).removeprefix("--").replace("-", "_")
        assert hint == name or distance(hint, wrong) <= distance(name, wrong), outcome


def test_100_misspelt_names_in_a_configuration_file_get_the_nearest_name(capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(101)
    run = Path("run")
    run.mkdir()
    names = sorted(name for name in SETTINGS if not name.endswith("kind"))
    for name in rng.choice(names, 100).tolist():
        *path, last = name.split(".")
        tree = BASE.model_dump(mode="json")
        group = tree
        for key in path:
            group = group[key]
        wrong = next(wrong for wrong in iter(lambda word=last: mutate(word, rng), "") if wrong not in group)
        group[wrong] = group.pop(last)
        (run / "config.yaml").write_text(yaml.safe_dump(tree))
        dotted = ".".join([*path, wrong])
        outcome = command(capsys, "resume", "run")
        assert_refused(outcome, dotted, "run/config.yaml", f"unknown setting '{dotted}'")
        assert distance(suggested(outcome), wrong) <= distance(last, wrong), outcome
    assert {path.name for path in run.iterdir()} <= {"config.yaml", ".lock", ".request"}


def test_120_values_of_the_wrong_type(capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(120)
    typed = [
        setting
        for setting in SETTINGS.values()
        if str not in (setting.annotation, *get_args(setting.annotation)) and get_origin(setting.annotation) is not dict
    ]
    for setting in (typed[i] for i in rng.integers(len(typed), size=120)):
        wrong = str(rng.choice(["abc", "1.2.3", "12x", "truee", "[1", "zz 9"]))
        flag = flag_of(setting.name)
        outcome = assert_flags_refused(capsys, [flag, wrong], f"'{flag}'", f"'{wrong}'", "should be ")
        if get_origin(setting.annotation) is Literal:
            assert all(str(choice) in outcome.err for choice in get_args(setting.annotation))


def test_every_bound_of_every_number(capsys: pytest.CaptureFixture[str]) -> None:
    cases = out_of_range()
    assert len(cases) >= 60
    for name, text in cases:
        element = ".0" if get_origin(SETTINGS[name].annotation) is tuple else ""
        assert_flags_refused(capsys, [f"{flag_of(name)}={text}"], f"'{name}{element}'", "should be ")


def test_every_unknown_kind_gets_the_nearest_kind(capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(5)
    for setting in SETTINGS.values():
        if not setting.name.endswith("kind"):
            continue
        for kind in get_args(setting.annotation):
            wrong = mutate(kind, rng)
            if wrong in get_args(setting.annotation):
                continue
            flag = flag_of(setting.name)
            outcome = assert_flags_refused(capsys, [flag, wrong], f"'{flag}'", f"'{wrong}'", "Did you mean")
            assert distance(suggested(outcome), wrong) <= distance(kind, wrong)


def test_every_flag_without_its_value(capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(6)
    for name in SETTINGS:
        flag = flag_of(name)
        words = [flag] if rng.random() < 0.5 else [flag, "--quiet"]
        assert_flags_refused(capsys, words, f"'{flag}' needs a value")


CONTRADICTIONS: list[tuple[str, tuple[str, ...]]] = [
    ("--agent.kind tabular --learner.evaluated online", ("agent.kind", "network.kind")),
    ("--network.kind tabular", ("network.kind", "agent.kind")),
    ("--agent.kind rollout --learner.evaluated online --replay.sampler.kind prioritised", ("replay.sampler.kind",)),
    ("--agent.kind rollout", ("learner.evaluated",)),
    ("--agent.kind rollout --learner.evaluated online --normalise-rewards True", ("normalise_rewards",)),
    ("--learner.batch-size 70000", ("learner.batch_size", "replay.capacity")),
    ("--learner.learning-starts 60000", ("learner.learning_starts", "replay.capacity")),
    ("--env-steps 100", ("env_steps", "learner.learning_starts")),
    ("--exploration.kind none", ("exploration.kind", "agent.noisy")),
    ("--learners 2 --topology fused --placement ray", ("learners", "placement")),
    ("--strict True --placement processes", ("strict", "placement")),
    ("--address auto", ("address", "placement")),
    ("--agent.munchausen on", ("agent", "munchausen", "double")),
    ("--agent.loss mse --agent.head.kind quantile", ("loss", "mse", "quantile")),
    ("--network.input.normalize True", ("scale", "normalize")),
    ("--target 3 --evaluation.target 3", ("--target", "--evaluation.target")),
    ("--seed 1 --seed 2", ("--seed",)),
    ("--env.kind atari", ("env.game",)),
    ("--optim.kind sgd --optim.betas 0.9 0.99", ("--optim.betas", "optim.kind", "adam")),
    ("--replay.sampler.alpha 0.5", ("--replay.sampler.alpha", "replay.sampler.kind", "prioritised")),
    ("--seed 1 2", ("--seed 1", "'2'")),
    ("--quiet True", ("--quiet",)),
    ("--agent.munchausen None --agent.munchausen.alpha 0.5", ("--agent.munchausen.alpha",)),
    ("--seeds 0", ("seeds",)),
    ("--seeds abc", ("--seeds", "abc")),
    ("--actor.groups 9 --actor.envs 8", ("actor.groups 9 exceeds actor.envs 8",)),
    ("--algo rainbo", ("algo", "rainbo", "'rainbow'")),
    ("-s 3", ("-s",)),
]


@pytest.mark.parametrize(("words", "fragments"), CONTRADICTIONS, ids=[words for words, _ in CONTRADICTIONS])
def test_contradictions(words: str, fragments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert_flags_refused(capsys, words.split(), *fragments)


def test_misspelt_presets_and_commands_get_the_nearest_name(capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(7)
    for name in [*PRESETS] * 2:
        wrong = mutate(name, rng)
        if wrong not in PRESETS:
            outcome = command(capsys, "train", wrong)
            assert_refused(outcome, wrong, wrong, "Did you mean")
    for verb in ("train", "resume", "eval", "compare", "presets", "doctor"):
        assert_refused(command(capsys, verb[:-1] + "x"), verb, f"'{verb}'")
    assert not list(Path().iterdir())


DAMAGED = {
    "empty": "",
    "a number": "3",
    "a list": "- 1\n- 2\n",
    "not YAML": "env: [1, 2",
    "tabs": "env:\n\tid: x",
    "an object": "!!python/object/apply:os.system ['true']",
    "a date": "seed: 2001-99-99",
    "no environment": "seed: 1",
    "a section without kind": "env: {id: CartPole-v1}",
    "a section that is a number": "env: 3",
    "another format": "format: 99\nenv: {kind: gym, id: CartPole-v1}",
    "binary": "\x00\x01",
}


@pytest.mark.parametrize("what", DAMAGED)
@pytest.mark.parametrize("verb", ["resume", "eval"])
def test_a_damaged_configuration_file_is_named(what: str, verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("run").mkdir()
    Path("run/config.yaml").write_text(DAMAGED[what])
    assert_refused(command(capsys, verb, "run"), what, "run/config.yaml")


def test_a_configuration_file_cut_anywhere_is_refused_or_complete(capsys: pytest.CaptureFixture[str]) -> None:
    Path("run").mkdir()
    text = BASE.to_yaml()
    required = text.index("game: cartpole")
    for end in np.random.default_rng(8).integers(1, required, 30):
        Path("run/config.yaml").write_text(text[:end])
        assert_refused(command(capsys, "resume", "run"), text[:end], "run/config.yaml")


@pytest.mark.parametrize(
    ("words", "fragment"),
    [
        ("eval", "RUN_DIR"),
        ("eval a b", "'b'"),
        ("eval nowhere", "nowhere"),
        ("eval x --episodes 0", "'episodes'"),
        ("eval x --episodes many", "'--episodes'"),
        ("eval x --episods 3", "'--episodes'"),
        ("eval x --jsn", "'--json'"),
        ("eval x --seed -1", "'seed'"),
        ("eval x --record film.mp4", "film.mp4"),
        ("eval x --record nowhere/film.gif", "nowhere"),
        ("resume", "RUN_DIR"),
        ("resume nowhere", "nowhere"),
        ("resume x --env-steps -5", "'env_steps'"),
        ("resume x --env-step 5", "'--env-steps'"),
        ("resume x --actors 2", "'--actors'. Usage: qfleet resume RUN_DIR"),
        ("resume x --actors 2", "all other settings are the run's own"),
        ("resume x --learners 0", "'learners'"),
        ("resume x --parallel.tensor 2", "x holds no run"),
        ("compare", "usage"),
        ("compare a --out b.png", "'--output'"),
        ("doctor --jason", "'--json'"),
        ("doctor now", "'now'"),
        ("presets now", "'now'"),
        ("presets --now", "'--now'"),
        ("compare nowhere", "nowhere"),
        ("compare .", "holds no run"),
        ("train", "PRESET"),
        ("train --seed 1 cartpole", "PRESET"),
        ("train cartpole catch", "'catch'"),
    ],
)
def test_bad_words_of_every_command(words: str, fragment: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(command(capsys, *words.split()), words, fragment)
    assert not list(Path().iterdir())


REAL = {
    "train": "PRESET",
    "trainn cartpole": "'train'",
    "train --seed 1": "PRESET",
    "train cartpole -x": "'-x'",
    "train cartpole --seeds none": "'--seeds'",
    "eval --episodes": "'--episodes'",
    "compare": "usage",
    "train cartpol --run-dir runs/x": "'cartpole'",
    "train cartpole --run-dir runs/x --optim.lrr 1": "'--optim.lr'",
    "train cartpole --run-dir runs/x --optim.lr -1": "'optim.lr'",
}


def test_ten_real_commands_are_refused(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        outcomes = list(pool.map(lambda words: real_command(words.split(), tmp_path), REAL))
    for (words, fragment), outcome in zip(REAL.items(), outcomes, strict=True):
        assert_refused(outcome, words, fragment)
    assert not list(tmp_path.iterdir())
