"""The commands from end to end: what they print, what they leave behind, and their exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import TINY, command, real_command

from qfleet import api
from qfleet.cli.main import VERBS, main
from qfleet.cli.train import _COMMON
from qfleet.experiment import Experiment
from qfleet.presets import preset
from qfleet.presets.algorithms import ALGORITHMS
from qfleet.presets.registry import PRESETS
from qfleet.runtime.rundir import RunDir


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small finished run."""
    path = tmp_path_factory.mktemp("cli") / "run"
    assert main(["train", "cartpole", "--run-dir", str(path), "--quiet", *TINY]) == 0
    return path


def test_the_overview_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["--help"], ["-h"]):
        outcome = command(capsys, *words)
        assert outcome.code == 0
        assert all(f"  {verb} " in outcome.out for verb in VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_every_command_has_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = command(capsys, verb, "--help")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.startswith(f"usage: qfleet {verb}")


def test_help_of_a_preset_shows_its_values_grouped_by_section(capsys: pytest.CaptureFixture[str]) -> None:
    outcome = command(capsys, "train", "cartpole", "--help")
    assert outcome.code == 0
    text, rate = " ".join(outcome.out.split()), preset("cartpole").optim.lr
    for part in ("optim options", "agent.target options", "--optim.lr FLOAT", f"(default: {rate})", "--seeds INT"):
        assert part in text
    assert "{sgd,adagrad,rmsprop,adam,adamw}" in text


def test_every_flag_of_the_short_help_exists(capsys: pytest.CaptureFixture[str]) -> None:
    listed = {word for line in _COMMON.splitlines() if line.startswith("  --") for word in line.split()[:1]}
    assert len(listed) == 14
    page = command(capsys, "train", "cartpole", "--help").out
    assert all(f"  {flag} " in page or f"  {flag}\n" in page for flag in listed - {"--target"})


def test_help_and_refusals_of_names_do_not_load_torch() -> None:
    script = (
        "import sys; from qfleet.cli.main import main\n"
        "for words in ('--help', 'train --help', 'eval --help', 'trainn', 'train', 'eval'): main(words.split())\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60).returncode == 0


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(capsys, "--version").out.startswith("qfleet ")


def test_presets_lists_presets_and_algorithms(capsys: pytest.CaptureFixture[str]) -> None:
    outcome = command(capsys, "presets")
    assert outcome.code == 0
    assert all(f"  {name} " in outcome.out for name in [*PRESETS, *ALGORITHMS])


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    text, data = command(capsys, "doctor"), command(capsys, "doctor", "--json")
    assert (text.code, data.code) == (0, 0)
    findings = json.loads(data.out)
    assert findings["versions"]["python"] in text.out
    assert findings["hardware"]["cores"] >= 1
    assert findings["extras"]["media"]["present"] in (True, False)
    assert all(place["path"] for place in findings["writable"].values())


def test_train_leaves_a_complete_run(run_dir: Path) -> None:
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["stopped_by"] == "budget"
    assert summary["env_steps"] >= 1200
    experiment = Experiment.from_yaml(run_dir / "config.yaml")
    assert (experiment.network.hidden, experiment.env_steps) == ((32, 32), 1200)  # type: ignore[union-attr]


def test_train_says_what_came_of_it_and_what_to_do_next(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = command(capsys, "train", "cartpole", "--run-dir", str(tmp_path / "r"), "--target", "1e6", *TINY)
    assert outcome.code == 4
    assert "target not reached" in outcome.out
    assert "mean of 6 test episodes" in outcome.out
    assert f"qfleet eval {tmp_path / 'r'}" in outcome.out


def test_an_experiment_of_ones_own_is_found_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my_experiments.py").write_text(
        "from qfleet.presets import preset\ndef pole(): return preset('cartpole')"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    assert command(capsys, "train", "my_experiments:pole", "--quiet", "--run-dir", "r", *TINY).code == 0
    assert (tmp_path / "r" / "summary.json").is_file()


def test_a_closed_pipe_is_no_error(tmp_path: Path) -> None:
    line = f"'{sys.executable}' -m qfleet presets 2>err | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout == "0\n"
    assert (tmp_path / "err").read_text() == ""


def test_quiet_says_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("train", "cartpole", "--quiet", "--run-dir", str(tmp_path / "r"), "--target", "1")
    outcome = command(capsys, *words, "--evaluation.in-a-row", "1", *TINY)
    assert (outcome.code, outcome.out, outcome.err) == (0, "", "")


def test_several_seeds_give_an_aggregate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    top = tmp_path / "runs"
    outcome = command(capsys, "train", "cartpole", "--seeds", "2", "--seed", "7", "--run-dir", str(top), *TINY)
    assert outcome.code == 0
    summary = json.loads((top / "summary.json").read_text())
    each = [json.loads((top / f"seed-{seed}" / "summary.json").read_text())["eval"]["mean"] for seed in (7, 8)]
    assert summary["seeds"] == [7, 8]
    assert summary["eval"]["scores"] == each
    assert summary["eval"]["mean"] == pytest.approx(sum(each) / 2)
    low, high = summary["eval"]["ci95"]
    assert low <= summary["eval"]["mean"] <= high
    assert "IQM" in outcome.out
    again = command(capsys, "train", "cartpole", "--seeds", "2", "--seed", "8", "--run-dir", str(top), *TINY)
    assert again.code == 2
    assert "seed-8 already holds a run" in again.err
    compared = command(capsys, "compare", str(top), "--output", str(tmp_path / "curves.png"))
    assert compared.code == 0
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_eval_prints_scores_on_fresh_seeds(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = command(capsys, "eval", str(run_dir), "--episodes", "6", "--json")
    assert outcome.code == 0
    result = json.loads(outcome.out)
    assert len(result["returns"]) == result["episodes"] == 6
    assert result["returns"] == api.evaluate(run_dir, episodes=6).tolist()
    assert result["mean"] == pytest.approx(sum(result["returns"]) / 6)
    text = command(capsys, "eval", "--episodes", "6", str(run_dir))
    assert "mean of 6 episodes" in text.out


def test_eval_records_a_film_of_its_first_episode(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = pytest.importorskip("PIL.Image")
    film = tmp_path / "film.gif"
    outcome = command(capsys, "eval", str(run_dir), "--episodes", "1", "--record", str(film), "--json")
    assert outcome.code == 0
    result = json.loads(outcome.out)
    assert result["recording"]["score"] == result["returns"][0]
    with image.open(film) as picture:
        assert picture.format == "GIF"
        assert 1 < picture.n_frames <= result["recording"]["steps"] + 1
    assert [path.name for path in tmp_path.iterdir()] == ["film.gif"]


def test_a_second_run_in_the_same_directory_is_refused(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (run_dir / "config.yaml").read_bytes()
    outcome = command(capsys, "train", "cartpole", "--run-dir", str(run_dir), "--seed", "5")
    assert outcome.code == 2
    assert f"qfleet resume {run_dir}" in outcome.err
    assert (run_dir / "config.yaml").read_bytes() == before


def test_a_folder_of_runs_is_no_run_directory(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = command(capsys, "train", "maze", "--run-dir", str(run_dir.parent))
    assert outcome.code == 2
    assert f"is a folder of runs, {run_dir.name} among them" in outcome.err
    assert not (run_dir.parent / "config.yaml").exists()


def test_a_run_directory_in_use_is_refused(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunDir.existing(run_dir):
        outcome = command(capsys, "resume", str(run_dir))
    assert outcome.code == 2
    assert "in use" in outcome.err


BROKEN = """
import gymnasium as gym, numpy as np
class Broken(gym.Env):
    def __init__(self, render_mode=None): pass
    observation_space = gym.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gym.spaces.Discrete(2)
    def reset(self, seed=None, options=None):
        super().reset(seed=seed); self.t = 0; return np.zeros(4, np.float32), {}
    def step(self, action):
        self.t += 1
        if self.t == 9: raise RuntimeError("the robot fell over")
        return np.zeros(4, np.float32), 1.0, False, False, {}
gym.register("Broken-v0", Broken)
"""


def test_an_environments_own_error_is_shown_with_its_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken_env.py").write_text(BROKEN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    outcome = command(
        capsys, "train", "cartpole", "--run-dir", "r", "--env.kind", "gym", "--env.id", "broken_env:Broken-v0", *TINY
    )
    assert outcome.code == 3
    assert "the robot fell over" in outcome.err
    assert "Traceback" not in outcome.err
    assert "internal error" not in outcome.err


def test_an_environment_whose_constructor_raises_is_refused_and_leaves_no_run_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "switched_off.py").write_text(
        "import gymnasium as gym\nclass Off(gym.Env):\n    def __init__(self): raise OSError('no robot here')\n"
        "gym.register('Off-v0', Off)"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for words in (("cartpole", "--env.kind", "gym", "--env.id", "switched_off:Off-v0"), ("gym:switched_off:Off-v0",)):
        outcome = command(capsys, "train", *words, "--run-dir", "r")
        assert outcome.code == 2, outcome
        assert "Off-v0 cannot be made: OSError: no robot here" in outcome.err
        assert "internal error" not in outcome.err
        assert not (tmp_path / "r").exists()


def test_an_environment_that_does_not_exist_leaves_no_run_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = command(
        capsys, "train", "cartpole", "--run-dir", str(tmp_path / "r"), "--env.kind", "gym", "--env.id", "CartPole-v9"
    )
    assert outcome.code == 2
    assert "'CartPole-v1'" in outcome.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("debug", [False, True])
def test_an_internal_error_is_one_line_with_its_traceback_in_a_file(
    debug: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*args: Any, run_dir: Path, **kwargs: Any) -> None:
        run_dir.mkdir()
        raise ZeroDivisionError("never seen before")

    monkeypatch.setattr(api, "train", fail)
    if debug:
        monkeypatch.setenv("QFLEET_DEBUG", "1")
    outcome = command(capsys, "train", "cartpole", "--run-dir", str(tmp_path / "r"), "--quiet")
    assert outcome.code == 3
    assert "internal error in " in outcome.err
    assert "ZeroDivisionError: never seen before" in outcome.err
    assert ("Traceback" in outcome.err) == debug
    assert "Traceback" in (tmp_path / "r" / "crash.txt").read_text()


def test_python_dash_m(tmp_path: Path) -> None:
    outcome = real_command(["--version"], tmp_path)
    assert outcome.code == 0
    assert outcome.out.startswith("qfleet ")


def test_resuming_a_finished_run_says_how_to_train_further(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run"
    assert command(capsys, "train", "cartpole", "--run-dir", str(path), "--quiet", *TINY).code == 0
    outcome = command(capsys, "resume", str(path))
    assert outcome.code == 0
    assert f"nothing was left to do; to train further: qfleet resume {path} --env-steps " in outcome.out
    assert "eta      -" not in outcome.out
    longer = command(capsys, "resume", str(path), "--env-steps", "1600")
    assert "nothing was left" not in longer.out


def test_a_run_that_reached_its_target_is_told_a_budget_above_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run"
    early = ("--env-steps", "100000", "--target", "1", "--evaluation.in-a-row", "1")
    command(capsys, "train", "cartpole", "--run-dir", str(path), "--quiet", *TINY[2:], *early)
    outcome = command(capsys, "resume", str(path))
    assert f"nothing was left to do; to train further: qfleet resume {path} --env-steps 200000" in outcome.out


def test_the_first_compilation_of_loops_is_announced(tmp_path: Path) -> None:
    script = (
        "import os; os.environ['NUMBA_CACHE_DIR'] = 'empty'\n"
        "from qfleet.core.announcing import heard_by\n"
        "with heard_by(print):\n"
        "    from qfleet.core.compiling import cached\n"
        "    [cached('int64(int64)')(lambda x, y=y: x + y) for y in range(2)]\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["compiling loops for this processor, once: seconds to a minute"], done.stderr
