"""Signals and kills at awkward times: what was trained is kept, and the run can go on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from program_cases import fingerprint, short, stop_at

import qfleet
from qfleet import Callbacks
from qfleet.core.errors import ConfigError
from qfleet.interrupts import Interrupts
from qfleet.observe.sinks import read_jsonl
from qfleet.runtime import checkpoint


def interrupt_myself() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.01)  # the handler runs between two instructions of the main thread


def test_ctrl_c_in_the_middle_saves_and_says_so(tmp_path):
    def on_step(metrics, stop):
        if metrics["env_steps"] == 320:
            interrupt_myself()

    run = qfleet.train(short(), run_dir=tmp_path / "run", callbacks=Callbacks(on_step=on_step))
    assert run.summary["stopped_by"] == "interrupt"
    assert run.summary["eval"] is None
    assert run.summary["env_steps"] == 320
    assert qfleet.resume(run.dir).summary["stopped_by"] == "budget"


def test_ctrl_c_during_the_last_checkpoint_lets_it_finish(tmp_path):
    def on_checkpoint(metrics, stop):
        if metrics["env_steps"] >= 1200:
            interrupt_myself()

    run = qfleet.train(short(), run_dir=tmp_path / "run", callbacks=Callbacks(on_checkpoint=on_checkpoint))
    assert run.summary["stopped_by"] == "interrupt"
    assert run.summary["env_steps"] == 1200
    assert json.loads((run.dir / "summary.json").read_text())["eval"] is None


def test_ctrl_c_during_the_final_test_leaves_a_summary(tmp_path, monkeypatch):
    import qfleet.session as session

    real = session.play_here

    def interrupted(*arguments):
        interrupt_myself()
        return real(*arguments)

    monkeypatch.setattr(session, "play_here", interrupted)
    run = qfleet.train(short(), run_dir=tmp_path / "run")
    assert run.summary["stopped_by"] == "interrupt"
    assert run.summary["eval"] is None


def test_two_quick_signals_count_as_one(tmp_path):
    def on_step(metrics, stop):
        if metrics["env_steps"] == 320:
            interrupt_myself()
            interrupt_myself()

    run = qfleet.train(short(), run_dir=tmp_path / "run", callbacks=Callbacks(on_step=on_step))
    assert run.summary["stopped_by"] == "interrupt"
    assert [path.name for path in checkpoint.complete(run.dir / "checkpoints")] == ["000000000320"]


def test_a_request_that_comes_while_a_run_falls_back_is_heeded_when_it_goes_on():
    interrupts = Interrupts()
    interrupts.ignore()
    assert not interrupts.ask()
    interrupts.heed()
    assert interrupts.ask()
    assert interrupts.ask()
    assert interrupts.count == 1, "a run that is being ended is left in peace"


def test_a_run_killed_before_its_first_checkpoint_begins_anew(tmp_path):
    script = textwrap.dedent(
        f"""
        import os, signal, sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        import qfleet
        from program_cases import short

        def on_step(metrics, stop):
            if metrics["env_steps"] >= 300:
                os.kill(os.getpid(), signal.SIGKILL)

        qfleet.train(short(), seed=4, run_dir="run", callbacks=qfleet.Callbacks(on_step=on_step))
        """
    )
    killed = subprocess.run([sys.executable, "-c", script], cwd=tmp_path)
    assert killed.returncode == -signal.SIGKILL
    uncut = qfleet.train(short(), seed=4, run_dir=tmp_path / "uncut")
    assert fingerprint(qfleet.resume(tmp_path / "run")) == fingerprint(uncut)
    said = [event for event in read_jsonl(tmp_path / "run" / "events.jsonl") if event.get("kind") == "anew"]
    assert len(said) == 1
    assert "begins anew at step 0" in said[0]["text"]
    assert all(event.get("kind") != "anew" for event in read_jsonl(uncut.dir / "events.jsonl"))


def test_a_run_that_lost_its_patience_goes_on_when_resumed(tmp_path):
    hopeless = {"evaluation.patience": 2, "evaluation.every": 100, "optim.lr": 1e-12, "learner.evaluated": "online"}
    run = qfleet.train(short(env_steps=3000, **hopeless), run_dir=tmp_path / "run")
    resumed = qfleet.resume(run.dir)
    assert resumed.summary["env_steps"] >= run.summary["env_steps"] + 100


def test_a_budget_behind_the_run_is_refused_and_not_written(tmp_path):
    run = qfleet.train(short(), run_dir=tmp_path / "run")
    before = (run.dir / "config.yaml").read_text()
    with pytest.raises(ConfigError, match="behind"):
        qfleet.resume(run.dir, env_steps=500)
    assert (run.dir / "config.yaml").read_text() == before


def test_a_bad_configuration_found_while_running_keeps_what_there_is(tmp_path):
    def on_step(metrics, stop):
        if metrics["env_steps"] >= 300:
            raise ConfigError("too late")

    with pytest.raises(ConfigError):
        qfleet.train(short(), run_dir=tmp_path / "run", callbacks=Callbacks(on_step=on_step))
    assert (tmp_path / "run" / "events.jsonl").is_file()


@pytest.mark.usefixtures("written_at_once")
def test_checkpoints_come_by_time_too_and_change_nothing(tmp_path):
    long = {"env_steps": 8000, "checkpoint.every": 10**6}  # so that several times pass on a fast machine, too
    often = qfleet.train(short(**long, **{"checkpoint.every_s": 0.05}), seed=6, run_dir=tmp_path / "often")
    seldom = qfleet.train(short(**long), seed=6, run_dir=tmp_path / "seldom")
    made = [event for event in read_jsonl(often.dir / "events.jsonl") if event["event"] == "checkpoint"]
    assert len(made) > 3
    assert fingerprint(often) == fingerprint(seldom)


def test_other_placements_stand_still_while_they_are_saved_and_after_the_end(tmp_path):
    """What the summary and the checkpoint say is what was trained; nothing goes on during the final test."""
    run = qfleet.train(
        short(env_steps=100_000, placement="processes"), run_dir=tmp_path / "run", callbacks=stop_at(1500)
    )
    last = checkpoint.complete(run.dir / "checkpoints")[-1]
    assert run.summary["env_steps"] == int(last.name[:12])
    resumed = qfleet.resume(run.dir, env_steps=3000)
    assert resumed.summary["resume_grade"] == "episode"
    assert 3000 <= resumed.summary["env_steps"] < 3200
    owed = (resumed.summary["env_steps"] - 200) / 4
    assert abs(resumed.summary["updates"] - owed) <= 16
