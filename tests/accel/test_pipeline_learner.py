"""The pipeline's learner with kernels, as it is on a GPU: it counts what only the device knows, and resumes exactly."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("triton")

import qfleet.api as api
from qfleet.accel import choices
from qfleet.accel.hardware import Hardware
from qfleet.control.candidates import format_put_back
from qfleet.control.monitor import Callbacks
from qfleet.core.errors import QfleetError
from qfleet.experiment import Experiment, with_changes
from qfleet.presets import preset
from qfleet.presets.algorithms import apply
from qfleet.runtime import checkpoint

# By the interpreter NumPy computes what a GPU would, and remarks on each infinity.
pytestmark = pytest.mark.filterwarnings("ignore:.*(invalid value|divide by zero|overflow):RuntimeWarning")


@pytest.fixture(autouse=True)
def _gpu(monkeypatch):
    """Where there is no GPU, take this machine's CPU for one, on which the interpreter runs the kernels."""
    if torch.cuda.is_available():
        yield
        return
    monkeypatch.setattr(choices, "look", lambda device: Hardware("cuda", "some GPU", (9, 0)))
    monkeypatch.setattr(choices.steps, "supports", lambda optim, device: True)
    monkeypatch.setattr(choices, "is_small_mlp", lambda network, agent: True)
    with format_put_back():
        yield


def short(algo: str, **changes) -> Experiment:
    small = {
        "topology": "pipeline",
        "env_steps": 400,
        "evaluation": {"every": 200, "episodes": 2, "envs": 2, "test_episodes": 2, "target": None},
        "learner.learning_starts": 100,
        "learner.batch_size": 4,
        "learner.train_period": 32.0,
        "actor.envs": 4,
        "checkpoint.every": 150,
        "network.dense": 16,
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "accel.deterministic": torch.cuda.is_available(),
    }
    own = (
        {"agent.epochs": 1, "agent.minibatches": 2, "agent.rollout_length": 16}
        if algo == "pqn"
        else {"agent.head.quantiles": 5}
    )
    return with_changes(apply(preset("catch"), algo), {**small, **own, **changes})


def learned(run: api.Run) -> dict[str, bytes]:
    """What the last checkpoint holds of the learner."""
    last = checkpoint.complete(run.dir / "checkpoints")[-1]
    return {path.name: path.read_bytes() for path in sorted(last.glob("learner*"))}


@pytest.mark.parametrize("algo", ["qr", "pqn"])
def test_trap_15_cut_and_resumed_equals_uncut(algo, tmp_path):
    def stop(metrics, end):
        if metrics["env_steps"] >= 230:
            end()

    uncut = api.train(short(algo), seed=3, run_dir=tmp_path / "uncut")
    api.train(short(algo), seed=3, run_dir=tmp_path / "cut", callbacks=Callbacks(on_step=stop))
    resumed = api.resume(tmp_path / "cut")
    assert "own kernels" in uncut.summary["accel"]
    assert uncut.summary["updates"] == resumed.summary["updates"] > 7
    assert len(learned(uncut)) > 0
    assert learned(resumed) == learned(uncut)


@pytest.mark.parametrize(("algo", "noticed"), [("qr", 2), ("pqn", 1)])
def test_updates_that_are_not_finite_are_counted_and_stop_the_run(algo, noticed, tmp_path):
    with pytest.raises(QfleetError, match=r"\d updates in a row were not finite"):
        api.train(short(algo, **{"optim.lr": 1e30, "env_steps": 2000}), run_dir=tmp_path / "run")
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [event.get("kind") for event in events].count("skipped_update") == noticed
