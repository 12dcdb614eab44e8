"""Ctrl-C, whenever it comes: exit code 130, nothing lost that was saved, and no blame for what it broke."""

from __future__ import annotations

import contextlib
import ctypes
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from commands import TINY, command, environment, real_command, start_words

from qfleet import api
from qfleet.cli import errors
from qfleet.core.errors import CheckpointError, ConfigError
from qfleet.runtime import checkpoint


def test_an_interrupt_before_the_run_is_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(api, "train", interrupt)
    outcome = command(capsys, "train", "cartpole", "--quiet")
    assert (outcome.code, outcome.out) == (130, "")
    assert "Traceback" not in outcome.err


def test_an_interrupt_that_went_through_a_string_being_executed_is_130(tmp_path: Path) -> None:
    """The interpreter ended by SIGINT after `python -m qfleet` had told of it and returned."""
    (tmp_path / "cut.py").write_text("def short():\n    exec('raise KeyboardInterrupt')\n")
    done = real_command(["train", "cut:short"], tmp_path)
    assert (done.code, done.err) == (130, "interrupted\n")


def _failing_import(*args: Any, **kwargs: Any) -> None:
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt as error:
        raise ImportError("cannot load module more than once per process") from error


def _dropped_interrupt(*args: Any, **kwargs: Any) -> Path:
    """As in the initialisation of torch, which then leaves a numpy without its functions behind."""
    with contextlib.suppress(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    return Path("never-made")


def _dropped_and_unforeseen(*args: Any, **kwargs: Any) -> None:
    _dropped_interrupt()
    raise AttributeError("module 'numpy' has no attribute 'logical_or'")


def _dropped_and_refused(*args: Any, **kwargs: Any) -> None:
    _dropped_interrupt()
    raise ConfigError("CartPole-v1 cannot be made: module 'numpy' has no attribute 'logical_or'")


@pytest.mark.parametrize("fail", [_failing_import, _dropped_and_unforeseen, _dropped_and_refused])
@pytest.mark.parametrize("place", ["train", "default_run_dir"])
def test_what_an_interrupt_breaks_while_modules_are_imported_is_an_interrupt(
    fail: Any, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(api, place, fail)
    options = ("--run-dir", str(tmp_path)) if place == "train" else ()
    outcome = command(capsys, "train", "cartpole", "--quiet", *options)
    assert (outcome.code, outcome.out, outcome.err) == (130, "", "interrupted: nothing was saved\n")
    assert not list(tmp_path.iterdir())
    assert signal.getsignal(signal.SIGINT) is before
    assert command(capsys, "train", "cartpol").code == 2, "the interrupt of an earlier command is over"


def test_an_interrupt_that_got_lost_takes_effect_before_the_run_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(api, "default_run_dir", _dropped_interrupt)
    outcome = command(capsys, "train", "cartpole", "--quiet")
    assert (outcome.code, outcome.out, outcome.err) == (130, "", "interrupted: nothing was saved\n")
    assert not list(tmp_path.iterdir())


def test_an_interrupt_that_comes_in_a_callback_from_c_ends_the_command_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """numba's compiler has such callbacks; a run was planned, trained and finished although it was told to end."""
    call_back = ctypes.CFUNCTYPE(None)(lambda: signal.raise_signal(signal.SIGTERM))
    shown = sys.unraisablehook

    def plan_slowly(*args: Any, **kwargs: Any) -> None:
        call_back()
        time.sleep(60)

    monkeypatch.setattr(api, "train", plan_slowly)
    outcome = command(capsys, "train", "cartpole", "--quiet", "--run-dir", str(tmp_path))
    assert (outcome.code, outcome.out, outcome.err) == (130, "", "interrupted: nothing was saved\n")
    assert sys.unraisablehook is shown


def test_an_interrupt_that_got_lost_while_a_run_was_planned_comes_again_and_does_not_cut_closing_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    closed = []

    def plan_slowly(*args: Any, **kwargs: Any) -> None:
        _dropped_interrupt()
        try:
            time.sleep(60)
        finally:
            time.sleep(0.5)  # five times as long as an interrupt takes to come again
            closed.append(True)

    monkeypatch.setattr(errors, "_LOST_S", 0.1)
    monkeypatch.setattr(api, "train", plan_slowly)
    outcome = command(capsys, "train", "cartpole", "--quiet", "--run-dir", str(tmp_path))
    assert (outcome.code, outcome.out, outcome.err) == (130, "", "interrupted: nothing was saved\n")
    assert closed


def test_an_error_that_was_meant_for_the_user_is_shown_although_an_interrupt_led_to_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unsaved(*args: Any, **kwargs: Any) -> None:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            raise CheckpointError("the checkpoint cannot be written: no space left") from None

    monkeypatch.setattr(api, "train", unsaved)
    outcome = command(capsys, "train", "cartpole", "--quiet")
    assert outcome.code == 3
    assert "no space left" in outcome.err


def test_ctrl_c_saves_and_resume_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "r"
    words = ["train", "cartpole", "--run-dir", str(run), *TINY, "--checkpoint.every", "1000000"]
    words[words.index("1200")] = "50000000"
    with subprocess.Popen(
        start_words([*words, "--track.every-s", "0.1"]),
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment(),
    ) as process:  # fmt: skip
        try:
            _wait_for_steps(run, process)
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130, err
    assert f"qfleet resume {run}" in err
    assert "Traceback" not in err
    (saved,) = checkpoint.complete(run / "checkpoints")
    steps = int(saved.name)
    outcome = command(capsys, "resume", str(run), "--env-steps", str(steps + 1000))
    assert outcome.code == 0, outcome
    summary = json.loads((run / "summary.json").read_text())
    assert summary["stopped_by"] == "budget"
    assert steps + 1000 <= summary["env_steps"] < steps + 2000


def _wait_for_steps(run: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and process.poll() is None:
        metrics = run / "metrics.jsonl"
        if metrics.is_file() and metrics.stat().st_size > 0:
            return
        time.sleep(0.05)
    raise AssertionError(f"the run did not begin: {process.poll()}")
