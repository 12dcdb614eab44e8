"""`qfleet.train(..., algo=NAME)` trains with that algorithm, as the command line's `--algo` does."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from program_cases import short

import qfleet
from qfleet.core.errors import ConfigError
from qfleet.experiment import Experiment
from qfleet.presets import preset
from qfleet.presets.algorithms import apply

FEW = {"env_steps": 600, "evaluation": {"every": 600, "episodes": 1, "test_episodes": 1, "target": None}}


@pytest.mark.parametrize("given", ["cartpole", preset("cartpole")])
def test_the_algorithm_is_applied_and_not_only_named(given: str | Experiment, tmp_path: Path) -> None:
    changes = {**FEW, "network.hidden": [8], "optim.lr": 5e-3}
    run = qfleet.train(given, algo="pqn", run_dir=tmp_path / "run", device="cpu", **changes)
    saved = yaml.safe_load((run.dir / "config.yaml").read_text())
    wanted = apply(preset("cartpole"), "pqn")
    assert run.summary["algo"] == saved["algo"] == "pqn"
    assert saved["agent"] == wanted.agent.model_dump(mode="json")
    assert saved["network"]["layer_norm"] is True
    assert saved["optim"]["lr"] == 5e-3  # other changes come after the algorithm's own


def test_an_algorithm_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"algo 'rainbo' is unknown.*Did you mean 'rainbow'"):
        qfleet.train(short(), algo="rainbo", run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()
