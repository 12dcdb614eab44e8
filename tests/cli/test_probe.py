"""`qfleet probe`: what is tried, what may win, what is kept, and that later runs use it and say so."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import command
from torch import Tensor

from qfleet.accel import cache, choices
from qfleet.accel.choose import key_of
from qfleet.accel.hardware import Hardware, look
from qfleet.accel.precision import PRECISIONS
from qfleet.accel.table import EAGER, Settings
from qfleet.control import candidates, gradient_check, probe
from qfleet.core.usercode import UserCode
from qfleet.envs import env_spec
from qfleet.experiment import with_changes
from qfleet.presets import preset
from qfleet.presets.algorithms import apply
from qfleet.roles.fused import FusedSetup
from qfleet.roles.fused.choices import workload_of
from qfleet.setups import fused_setup

GAME = ("--env.kind", "tensor", "--env.game", "cartpole", "--network.hidden", "16", "16", "--device", "cpu")
QUICK = ("--seconds-per-candidate", "0.02")
H200 = Hardware("cuda", "NVIDIA H200", (9, 0))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    threads = torch.get_num_threads()
    monkeypatch.setenv("QFLEET_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(probe, "FACTORS", (2,))
    # Two threads on a busy machine wait for each other most of the time.
    monkeypatch.setattr(probe.os, "sched_getaffinity", lambda process: {0}, raising=False)
    yield
    torch.set_num_threads(threads)


def setup(base: str = "cartpole", algo: str = "dqn", **changes: Any) -> FusedSetup:
    game = {"env.kind": "tensor", "env.game": base.replace(":", "-"), "device": "cpu"}
    experiment = with_changes(apply(preset(base), algo), {**game, **changes})
    return fused_setup(experiment, env_spec(experiment.env), UserCode())


def probed(run: FusedSetup, clock: probe.Clock | None = None) -> probe.Report:
    return probe.probe(run, 0.02, clock or probe.Clock(180.0), lambda text: None)


def by_settings(report: probe.Report) -> dict[Settings, probe.Candidate]:
    return {candidate.settings: candidate for candidate in report.candidates}


# ---------------------------------------------------------------- the command


def test_a_probe_keeps_its_winner_and_the_next_run_uses_it_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = command(capsys, "probe", "cartpole", *QUICK, *GAME)
    assert outcome.code == 0, outcome.err
    for part in ("fp32, eager", "fp32, hand-written small network", "\n* ", "winner: ", "--actor.envs 32 gives"):
        assert part in outcome.out
    (entry,), complaint = cache.read()
    assert complaint == ""
    assert f"kept in {tmp_path / 'cache' / 'choices.json'}" in outcome.out
    few = ("--env-steps", "600", "--learner.learning-starts", "100", "--evaluation.episodes", "2", "--quiet")
    assert command(capsys, "train", "cartpole", "--run-dir", str(tmp_path / "run"), *few, *GAME).code == 0
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    (said,) = [event["text"] for event in events if event.get("kind") == "accel"]
    assert said.startswith(f"cpu: {entry.settings.words('cpu')} ({entry.why})")
    assert ("no CUDA: " in said) != torch.cuda.is_available()
    assert entry.why.startswith("probed on 20")


@pytest.mark.parametrize(
    ("words", "fragment"),
    [
        ("", "PRESET is missing"),
        ("cartpole catch", "'catch'"),
        ("cartpol", "Did you mean 'cartpole'?"),
        ("mountaincar", "runs as a pipeline, and probes time fused loops only"),
        ("minatar:breakout --topology pipeline", "runs as a pipeline"),
        ("minatar:breakout --seconds-per-candidate 0", "seconds_per_candidate"),
        ("minatar:breakout --second-per-candidate 1", "'--seconds-per-candidate'"),
        ("minatar:breakout --accel.precisio fp32", "'--accel.precision'"),
    ],
)
def test_bad_words_are_refused_in_one_line(words: str, fragment: str, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = command(capsys, "probe", *words.split())
    assert outcome.code == 2
    assert fragment in outcome.err
    assert "Traceback" not in outcome.err
    assert len(outcome.err.strip().splitlines()) == 1


def test_a_choice_that_cannot_be_kept_is_still_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("QFLEET_CACHE", str(tmp_path / "file"))
    outcome = command(capsys, "probe", "cartpole", *QUICK, *GAME)
    assert outcome.code == 0
    assert "winner: " in outcome.out
    assert "not kept: " in outcome.out


def test_doctor_shows_what_is_usable_shipped_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache.store({}, EAGER, "probed")
    text, found = command(capsys, "doctor").out, json.loads(command(capsys, "doctor", "--json").out)["accel"]
    assert (found["cached"]["path"], found["cached"]["complaint"]) == (str(tmp_path / "cache" / "choices.json"), "")
    assert len(found["cached"]["choices"]) == 1
    assert set(found["usable"]) == {"precision", "compile", "kernels", "graphs"}
    assert "ROCm, MPS, XPU: the device-agnostic code, untested" in text
    assert f"1 choices of `qfleet probe` in {tmp_path / 'cache'}" in text
    (tmp_path / "cache" / "choices.json").write_text("?")
    assert "is damaged" in command(capsys, "doctor").out


def test_doctor_shows_each_choice_and_what_it_is_for(capsys: pytest.CaptureFixture[str]) -> None:
    run = setup()
    cache.store(key_of(look(torch.device("cpu")), workload_of(run)), EAGER, "probed on 2026-11-15: 2 steps/s")
    text = command(capsys, "doctor").out
    assert f"replay agent, mlp on 4, {run.actor.envs} envs, " in text
    assert ": fp32, eager (probed on 2026-11-15: 2 steps/s)" in text


def test_doctor_promises_hand_written_networks_to_small_dense_ones_alone(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("the lines of a CPU")
    shipped = json.loads(command(capsys, "doctor", "--json").out)["accel"]["shipped"]
    assert shipped["small dense networks"].startswith("fp32, hand-written small network")
    assert shipped["all others"].startswith("fp32, eager")


# ---------------------------------------------------------------- what may win


def test_a_candidate_that_fails_is_listed_with_the_first_line_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    warm = probe._warm_loop

    def fail(run: FusedSetup) -> Any:
        if run.accel.kernels == "on":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.\nand much more")
        return warm(run)

    monkeypatch.setattr(probe, "_warm_loop", fail)
    outcome = command(capsys, "probe", "cartpole", *QUICK, *GAME)
    assert outcome.code == 0
    assert "OutOfMemoryError: CUDA out of memory. Tried to allocate 9 GiB.\n" in outcome.out
    assert "and much more" not in outcome.out
    assert cache.read()[0][0].settings == EAGER


def test_what_computes_another_gradient_cannot_win(monkeypatch: pytest.MonkeyPatch) -> None:
    right = gradient_check.gradient_of

    def wrong(run: FusedSetup, data: Any) -> Tensor:
        return right(run, data) * (1.001 if run.accel.kernels == "on" else 1.0)

    monkeypatch.setattr(probe, "gradient_of", wrong)
    report = probed(setup())
    out = by_settings(report)[Settings(kernels=True)]
    assert out.failure == "its gradient differs by 1.0e-03, more than 1e-04"
    assert not out.rates
    assert report.winner is report.candidates[0]


def test_when_the_eager_gradient_fails_nothing_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(run: FusedSetup, data: Any) -> Tensor:
        raise RuntimeError("no")

    monkeypatch.setattr(probe, "gradient_of", fail)
    report = probed(setup())
    assert report.winner is None
    assert all(candidate.failure for candidate in report.candidates)


def test_of_candidates_about_as_fast_the_plainest_wins() -> None:
    fast, plain = Settings(precision="bf16", compile=True), EAGER
    report = probe.Report(H200, [probe.Candidate(fast, rates=[102.0]), probe.Candidate(plain, rates=[100.0])])
    assert report.winner is report.candidates[1]
    report.candidates[0].rates = [110.0, 500.0, 109.0]
    assert report.winner is report.candidates[0]
    report.candidates[0].failure = "out"
    assert report.winner is report.candidates[1]


def test_the_time_is_kept_and_what_was_not_tried_is_said() -> None:
    ticking = count()
    report = probed(setup(), probe.Clock(1.0, now=lambda: float(next(ticking))))
    assert {candidate.failure for candidate in report.candidates} == {"not tried for lack of time"}
    assert report.winner is None
    slow = count()
    report = probed(setup(), probe.Clock(10.0, now=lambda: float(next(slow))))
    assert report.winner is not None
    assert report.untried[0] == "--actor.envs 32"


def test_more_environments_and_all_cores_are_suggestions_only(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []

    def rate(loop: Any, seconds: float) -> float:
        seen.append((loop.setup.actor.envs, torch.get_num_threads()))
        return 100.0

    torch.set_num_threads(1)
    monkeypatch.setattr(probe, "_rate", rate)
    monkeypatch.setattr(probe.os, "sched_getaffinity", lambda process: {0, 1, 2})
    report = probed(setup())
    assert [suggestion.change for suggestion in report.suggestions] == ["--actor.envs 32", "--threads 3"]
    assert seen[-2:] == [(32, 1), (16, 3)]
    assert torch.get_num_threads() == 1
    assert set(seen[:-2]) == {(16, 1)}


# ---------------------------------------------------------------- what is tried


def test_a_gpu_has_every_precision_with_and_without_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "look", lambda device: H200)
    monkeypatch.setattr(choices.steps, "supports", lambda optim, device: True)
    tried = candidates.candidates(replace(setup("minatar:breakout", "pqn"), device="cuda"))
    assert tried[0] == EAGER
    assert len(set(tried)) == len(tried)
    fast = [(one.precision, one.compile) for one in tried if one.graphs and one.kernels and not one.channels_last]
    assert set(fast) == {(name, compiled) for name in PRECISIONS for compiled in (True, False)}
    assert any(one.channels_last for one in tried)
    vectors = candidates.candidates(replace(setup("cartpole", "dqn"), device="cuda"))
    assert not any(one.channels_last for one in vectors)
    assert {one.graph_updates for one in vectors} == {0, *candidates.GRAPH_LENGTHS}


def test_what_cannot_be_used_is_tried_once_as_what_it_comes_down_to(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = replace(H200, obstacles=dict.fromkeys(("kernels", "compile"), "Triton is not installed"))
    monkeypatch.setattr(choices, "look", lambda device: bare)
    for algo in ("pqn", "dqn"):
        tried = candidates.candidates(replace(setup("cartpole", algo), device="cuda"))
        assert sorted(one.precision for one in tried) == sorted(PRECISIONS)


def test_explicit_settings_stay_in_all_but_the_eager_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "look", lambda device: H200)
    monkeypatch.setattr(choices.steps, "supports", lambda optim, device: True)
    run = replace(setup("cartpole", "pqn", **{"accel.precision": "tf32", "accel.compile": "off"}), device="cuda")
    first, *rest = candidates.candidates(run)
    assert first == EAGER
    assert {(one.precision, one.compile) for one in rest} == {("tf32", False)}


@pytest.mark.parametrize("base", ["cartpole", "catch"])
@pytest.mark.parametrize("algo", ["dqn", "rainbow", "iqn", "pqn", "munchausen"])
def test_rounded_formats_and_channels_last_stay_within_their_tolerance(
    base: str, algo: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the CPU's 16 bits, since the probe's own CPU candidates are all float32."""
    monkeypatch.setattr(choices, "look", lambda device: H200)
    run = setup(base, algo)
    data = gradient_check.sample_data(run)
    eager = gradient_check.gradient_of(candidates.with_settings(run, EAGER), data)
    assert eager.norm() > 0
    for settings in (Settings(precision="bf16"), Settings(precision="fp16"), Settings(channels_last=True)):
        gradient = gradient_check.gradient_of(candidates.with_settings(run, settings), data)
        found = gradient_check.difference(gradient, eager)
        assert found <= gradient_check.TOLERANCE[settings.precision]
        assert found > 0 or settings.precision == "fp32"


def test_channels_last_reaches_every_convolution() -> None:
    layers = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Conv2d(4, 4, 3))
    choices.keep_channels_last(layers)
    seen = []
    layers[2].register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].stride()))
    layers(torch.rand(2, 3, 8, 8))
    assert seen[0][1] == 1
