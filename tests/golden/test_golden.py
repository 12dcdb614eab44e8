"""Files that earlier versions wrote can still be read: configuration, model and checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from make import OBSERVATIONS

import qfleet

HERE = Path(__file__).parent
VERSIONS = sorted(path.name for path in HERE.iterdir() if (path / "config.yaml").is_file())


def test_there_is_one_for_the_present_version():
    assert ".".join(qfleet.__version__.split(".")[:2]) in VERSIONS


@pytest.mark.parametrize("version", VERSIONS)
def test_an_old_model_answers_as_it_did(version):
    answers = np.array(json.loads((HERE / version / "answers.json").read_text()), np.float32)
    assert np.allclose(qfleet.load(HERE / version).q(OBSERVATIONS), answers, atol=1e-6)


@pytest.mark.parametrize("version", VERSIONS)
def test_an_old_run_goes_on(version, tmp_path):
    shutil.copytree(HERE / version, tmp_path / "run")
    run = qfleet.resume(tmp_path / "run", env_steps=600)
    assert run.summary["env_steps"] in (600, 601)  # both environments step at a time, and one may only begin an episode
    assert run.summary["updates"] > 50
