"""`qfleet plan` and `--plan`: what is shown, saved, followed and refused; the measurements themselves are made up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import TINY, command

from qfleet import api, planning, sharing
from qfleet.cli.main import main
from qfleet.control.measurements import LearnerCost, Measurements
from qfleet.control.plan import Plan
from qfleet.core.errors import ConfigError
from qfleet.experiment import Experiment

SMALL = (*TINY, "--learner.batch-size", "16", "--evaluation.target", "None")
COSTS = Measurements(
    env_tick=((4, 1e-3), (64, 16e-3)),
    act=((4, 1e-4), (64, 2e-4)),
    request_message=((4, 1e-4), (64, 1e-4)),
    actor_tick=((4, 1.2e-3), (64, 17e-3)),
    actor_cpu=((4, 1.2e-3), (64, 17e-3)),
    replay=5e-6,
    learners=(LearnerCost(device="cpu", threads=1, seconds=50e-6),),
    updates_per_step=0.125,
    batches_per_step=0.125,
    experience_message=((4, 1e-4), (1024, 2e-4)),
    batch_message=1e-4,
    wake=4e-5,
    cpu_share=1.0,
    row_bytes=64,
    batch_bytes=9216,
)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Experiment]:
    """Make measurements up on a machine of two cores; returns the experiments that were asked about."""
    asked: list[Experiment] = []

    def made_up(experiment: Experiment, *rest: Any) -> Measurements:
        asked.append(experiment)
        return COSTS

    machine = planning.resources.Resources(cpu="test", cores=2, memory=2**35, shared_memory=2**35)
    monkeypatch.setattr(planning, "_measured", made_up)
    monkeypatch.setattr(planning.resources, "look", lambda: machine)
    return asked


@pytest.mark.usefixtures("measured")
def test_a_plan_shows_roles_rates_bottleneck_and_reasons_and_starts_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = command(capsys, "plan", "mountaincar", "--placement", "processes", "--actors", "auto")
    assert said.code == 0
    for part in ("mountaincar (nstep), processes on 2 cores", "actor", "learner", "replay", "predicted", "steps/s",
                 "bottleneck", "actor.envs", "actor.unroll", "times as fast as inline"):  # fmt: skip
        assert part in said.out, part
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("measured")
def test_a_plan_shows_what_was_measured_in_a_persons_units(capsys: pytest.CaptureFixture[str]) -> None:
    said = command(capsys, "plan", "mountaincar", "--placement", "processes", "--actor.envs", "4")
    told = said.out[said.out.index("measured on this machine") :]
    for part in (
        "4,000 steps/s by 4 that do nothing else",
        "with what an actor does besides its network, 3,636 for a core's whole time",
        "4 observations: 0.10 ms on a core",
        "cpu: 0.40 ms an update",
        "0.33 GB/s of experience between processes, and 40 us each at both ends",
        "32.0 GiB free, 32.0 GiB in the folder for shared memory",
    ):
        assert part in told, part


@pytest.mark.usefixtures("measured")
def test_a_plan_for_several_gpus_shows_how_many_there_are_and_who_computes_on_each(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = [{"name": "a GPU", "memory": 2**36}, {"name": "another", "memory": 2**35}]
    machine = planning.resources.Resources(cpu="test", cores=2, memory=2**35, shared_memory=2**35, gpus=gpus)
    monkeypatch.setattr(planning.resources, "look", lambda: machine)
    said = command(capsys, "plan", "mountaincar", "--placement", "processes", "--actors", "auto")
    assert "processes on 2 cores and a GPU (the first of 2 GPUs)" in said.out
    assert "0 (a GPU, 64 GiB): nobody; 1 (another, 32 GiB): nobody" in said.out


@pytest.mark.usefixtures("measured")
def test_a_saved_plan_is_followed_to_the_number(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path, run = tmp_path / "plan.yaml", tmp_path / "run"
    assert command(capsys, "plan", "mountaincar", *SMALL, "--placement", "processes", "--save", str(path)).code == 0
    tree = yaml.safe_load(path.read_text())
    tree["settings"] |= {"actor.envs": 3, "actors": 2}
    path.write_text(yaml.safe_dump(tree))
    done = command(capsys, "train", "mountaincar", *SMALL, "--plan", str(path), "--run-dir", str(run))
    assert done.code == 0, done.err
    config = Experiment.from_yaml(run / "config.yaml")
    assert (config.placement, config.actors, config.actor.envs) == ("processes", 2, 3)
    assert Plan.from_yaml(run / "plan.yaml") == Plan.from_yaml(path)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["plan"]["settings"] == tree["settings"]
    assert "measurements" not in summary["plan"]
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert [event["text"] for event in events if event["event"] == "planned"]
    assert json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["bottleneck"]


def test_processes_are_planned_unless_actors_are_given_and_inline_never(
    measured: list[Experiment], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api.Session, "carry_out", lambda session: {})

    def trained(name: str, preset: str | Experiment = "mountaincar", **settings: Any) -> Experiment:
        api.train(preset, run_dir=tmp_path / name, **settings)
        return Experiment.from_yaml(tmp_path / name / "config.yaml")

    assert trained("inline", placement="inline", plan="auto", actors="auto").actors == 1
    assert trained("given", placement="processes", actors=2).actors == 2
    assert trained("whole", trained("other").replace(placement="processes", actors=3)).actors == 3
    assert measured == []
    assert not (tmp_path / "inline" / "plan.yaml").exists()
    assert trained("auto", placement="processes", actor={"envs": 5}).actor.envs == 5
    assert trained("asked", trained("one").replace(placement="processes"), plan="auto").placement == "processes"
    assert trained("anywhere", plan="auto").placement == "processes"
    assert len(measured) == 3
    assert (tmp_path / "auto" / "plan.yaml").exists()


@pytest.mark.usefixtures("measured")
def test_a_saved_plan_has_the_settings_that_it_was_made_for(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api.Session, "carry_out", lambda session: {})
    path, flags = tmp_path / "plan.yaml", ["--env.vectorisation", "async", "--network.hidden", "[7,7]"]
    saving = ["--placement", "processes", "--save", str(path)]
    assert command(capsys, "plan", "mountaincar", *flags, *saving).code == 0
    run = api.train("mountaincar", plan=path, run_dir=tmp_path / "run")
    config = Experiment.from_yaml(run.dir / "config.yaml")
    assert (config.env.vectorisation, config.network.hidden) == ("async", (7, 7))
    with pytest.raises(ConfigError, match="contradicts the plan"):
        api.train("mountaincar", plan=path, run_dir=tmp_path / "other", **{"env.vectorisation": "sync"})


@pytest.mark.parametrize(
    ("flags", "plan"),
    [
        ("", None),
        ("--plan auto", "auto"),
        ("--actors auto", "auto"),
        ("--placement processes", "auto"),
        ("--placement processes --actors auto", "auto"),
        ("--placement processes --actors 2", None),
        ("--placement processes --actors 2 --plan auto", "auto"),
        ("--placement processes --plan some.yaml", "some.yaml"),
    ],
)
def test_the_flags_say_what_is_planned(flags: str, plan: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def train(experiment: Experiment, **rest: Any) -> None:
        given.update(rest)
        raise ConfigError("far enough")

    monkeypatch.setattr(api, "train", train)
    main(["train", "mountaincar", "--quiet", *flags.split()])
    assert given["plan"] == plan
    assert ("actors" in given["fixed"]) == ("--actors 2" in flags)


@pytest.mark.usefixtures("measured")
def test_a_plan_that_does_not_fit_is_refused_and_nothing_is_left(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "plan.yaml"
    command(capsys, "plan", "mountaincar", "--placement", "processes", "--save", str(path))
    for words, said in (
        (("mountaincar", "--actors", "9"), "contradicts the plan"),
        (("acrobot",), "the plan is for mountaincar"),
    ):
        refused = command(capsys, "train", *words, "--plan", str(path), "--run-dir", str(tmp_path / "run"))
        assert refused.code == 2
        assert said in refused.err
        assert not (tmp_path / "run").exists()
    missing = command(
        capsys, "train", "mountaincar", "--plan", str(tmp_path / "none"), "--run-dir", str(tmp_path / "r")
    )
    assert missing.code == 2
    assert f"there is no plan {tmp_path / 'none'}; `qfleet plan PRESET --save" in missing.err
    folder = command(capsys, "train", "mountaincar", "--plan", str(tmp_path), "--run-dir", str(tmp_path / "r"))
    assert "cannot be read as a plan" in folder.err


@pytest.mark.usefixtures("measured")
def test_a_plan_that_shared_memory_is_too_small_for_says_what_the_run_would_say(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its text named neither `--shm-size` nor the variable that puts shared memory elsewhere."""
    machine = planning.resources.look().replace(shared_memory=5_000_000)
    monkeypatch.setattr(planning.resources, "look", lambda: machine)
    monkeypatch.setattr(sharing, "free_bytes", lambda: 5_000_000)
    settings = {"placement": "processes", "replay.capacity": 500_000}
    with pytest.raises(ConfigError, match=r"shared memory is too small.*--shm-size.*QFLEET_SHARED_MEMORY") as plan:
        api.train("mountaincar", run_dir=tmp_path / "plan", **settings)
    arranged = api.plan("mountaincar", **settings).settings
    with pytest.raises(ConfigError) as run:
        api.train("mountaincar", run_dir=tmp_path / "run", **settings, **arranged)
    assert str(plan.value) == str(run.value)


@pytest.mark.usefixtures("measured")
def test_a_full_directory_is_refused_before_anything_is_measured(
    measured: list[Experiment], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "config.yaml").write_text("")
    refused = command(capsys, "train", "mountaincar", "--placement", "processes", "--run-dir", str(tmp_path))
    assert refused.code == 2
    assert measured == []


def test_a_fused_loop_and_a_cluster_have_nothing_to_plan(
    measured: list[Experiment], capsys: pytest.CaptureFixture[str]
) -> None:
    said = command(capsys, "plan", "cartpole", "--device", "cpu")
    assert said.code == 0
    assert "qfleet probe cartpole" in said.out
    refused = command(capsys, "plan", "mountaincar", "--placement", "ray")
    assert refused.code == 2
    assert "plans are for one machine" in refused.err
    assert measured == []


def test_bad_words_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in ((("plan",), "PRESET is missing"), (("plan", "cartpole", "x"), "unexpected 'x'"),
                        (("plan", "mountaincar", "--sav", "x"), "--save"),
                        (("train", "mountaincar", "--actors", "many"), "--actors")):  # fmt: skip
        refused = command(capsys, *words)
        assert refused.code == 2
        assert said in refused.err


def test_python_plans_by_name_and_takes_nested_settings_as_fixed(measured: list[Experiment]) -> None:
    plan = api.plan("mountaincar", placement="processes", actors="auto", actor={"envs": 5})
    assert plan.settings["actor.envs"] == 5
    assert measured[0].actors == 1
    with pytest.raises(ConfigError, match="actors"):
        api.plan("mountaincar", actors="many")


@pytest.mark.parametrize(
    "words", ["atari:pong --simulate actors=20,learners=4", "--simulate actors=20,learners=4 atari:pong"]
)
def test_the_preset_may_stand_before_or_behind_the_flags(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(experiment: Experiment, simulate: str, **_: Any) -> str:
        return f"{experiment.preset} {simulate}"

    monkeypatch.setattr(api, "plan_learners", told)
    assert main(["plan", *words.split()]) == 0
    assert capsys.readouterr().out == "atari:pong actors=20,learners=4\n"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--several --save FILE", "'--save' keeps the arrangement of roles: not with --several"),
        ("--simulate actors=2,learners=2 --save FILE", "'--save' keeps the arrangement of roles"),
        ("--several --simulate actors=2,learners=2", "give one of them"),
    ],
)
def test_what_cannot_be_had_together_is_refused_before_anything_is_measured(
    flags: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "cartpole", "--algo", "dqn", *flags.split()]) == 2
    assert words in capsys.readouterr().err
