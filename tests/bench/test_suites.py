"""The suites of speed with tiny settings: they run, and their figures are what they say they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from qfleet.algo.gradients import EagerGradient
from qfleet.algo.steps import GradientStep
from qfleet.bench import envs, fused, learner, nature
from qfleet.bench.table import Row
from qfleet.cli.main import main
from qfleet.core.spec import PLAIN

CPU = torch.device("cpu")
ON_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="looks at what a CPU is measured by")


def per_second(figure: str) -> float:
    return float(figure.split()[0].replace(",", ""))


def test_a_game_is_stepped_beside_its_own_package():
    rows = envs.measure(["cartpole", "maze", "minatar-freeway"], [1, 8], seconds=0.02)
    assert [row.what.split(" environments")[0] for row in rows[:2]] == ["cartpole, 1", "cartpole, 8"]
    assert all(per_second(row.ours) > 0 for row in rows)
    assert "Gymnasium" in rows[0].peer
    assert rows[0].ratio == pytest.approx(per_second(rows[0].ours) / per_second(rows[0].peer), rel=0.05)
    assert rows[2].peer == ""
    assert rows[2].ratio is None


def test_every_game_is_measured():
    assert len(envs.GAMES) == 9
    assert {game for game in envs.GAMES if envs.peer_of(game) is None} >= {"maze", "catch"}


def test_ticks_that_only_begin_an_episode_are_no_steps():
    player = envs.Player(envs.make_tensor_env(envs.TensorConfig(game="catch")), 4, torch.Generator())
    for _ in range(50):
        player.tick(lambda _: torch.zeros(4, 3), torch.ones(()))
    assert envs._valid_share(player) == pytest.approx(float(player.steps) / 50, rel=0.02)
    assert float(player.steps) < 200


@ON_CPU
def test_small_updates_stand_beside_plain_torch():
    rows = learner.measure(rounds=1, round_s=0.01)
    assert len(rows) == 2
    for row in rows:
        assert "plain torch" in row.peer
        assert row.ratio == pytest.approx(per_second(row.ours) / per_second(row.peer), rel=0.05)


def weights(network: torch.nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in network.parameters()])


def test_the_plain_update_is_the_one_that_ours_makes():
    batch = learner.random_batch()
    plain = learner.PlainDoubleDqn(batch)
    agent = learner.ReplayAgent(double=True, target=learner.SoftTargetConfig(tau=learner.TAU))
    ours = learner._build(agent, learner.MlpConfig(hidden=(128, 128)), torch.Generator())
    for mine, theirs in ((ours.online, plain.online), (ours.target, plain.target)):
        for parameter, other in zip(mine.parameters(), theirs.parameters(), strict=True):
            parameter.data.copy_(other.data)
    for _ in range(3):
        plain()
        ours.learn(batch)
    torch.testing.assert_close(weights(ours.online), weights(plain.online), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(weights(ours.target), weights(plain.target), rtol=1e-4, atol=1e-6)


def test_the_loops_are_set_up_as_the_eager_ones():
    pqn, dqn = fused.cartpole_pqn(32, 64, 4, 16, width=256), fused.cartpole_dqn()
    assert (pqn.actor.envs, pqn.agent.rollout_length, pqn.agent.epochs, pqn.agent.minibatches) == (32, 64, 4, 16)
    assert (pqn.network.hidden, pqn.network.layer_norm) == ((256, 256), True)
    assert (dqn.actor.envs, dqn.learner.batch_size, dqn.learner.train_period) == (16, 128, 4)
    assert (dqn.agent.n_step, dqn.agent.double, dqn.network.hidden) == (3, True, (128, 128))


@ON_CPU
def test_loops_without_their_scripts_have_no_peer(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fused, "WARM_UP", 1)
    rows = fused.measure(rounds=1, seconds=0.01)
    assert [row.ratio for row in rows] == [None] * 3
    assert [row.met for row in rows] == [None] * 3
    assert all(per_second(row.ours) > 0 for row in rows)


@ON_CPU
def test_loops_stand_beside_the_scripts(monkeypatch):
    monkeypatch.setattr(fused, "loop_rate", lambda loop, seconds: 3000.0)
    monkeypatch.setattr(fused, "run_peer", lambda python, script, *words: _fixed_peer(script))
    monkeypatch.setattr(fused, "peer_python", lambda environment: Path("python"))
    rows = fused.measure(rounds=2)
    assert [row.ratio for row in rows] == [3.0, 1.5, 6.0]
    assert [row.met for row in rows] == [True, False, True]


def _fixed_peer(script: str) -> dict[str, float]:
    if script == "sb3_pace.py":
        return {"steps_per_s": 500.0}
    assert Path(script).is_file()
    return {"steps_per_s": 1000.0 if "pqn" in script else 2000.0}


def test_a_full_grid_of_noise_is_learned_from():
    grid = nature.filled_grid(24, 2, torch.Generator().manual_seed(1))
    assert int(grid.ticks) >= 24
    assert len(set(grid.priorities.tree.leaves.tolist())) > 20  # priorities differ
    update = nature.build(EagerGradient, GradientStep, grid.generator)
    learning = nature.Learning(grid, update, batch=2, at_once=2, recorded=False)
    before = grid.priorities.tree.leaves.clone()
    learning()
    assert update.updates == 2
    assert bool(torch.isfinite(learning.latest.metrics["loss"]))
    assert 1 <= int((grid.priorities.tree.leaves != before).sum()) <= 4
    nature.Sampling(grid, 3, at_once=1, recorded=False)()
    assert grid.sample(3, 0.5).batch.observation[PLAIN].shape == (3, 4, 84, 84)


def test_the_command_writes_its_rows(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(envs, "measure", lambda: [Row("steps", "7 /s")])
    assert main(["bench", "envs", "--json", str(tmp_path / "rows.json")]) == 0
    assert json.loads((tmp_path / "rows.json").read_text())["suites"]["envs"][0]["ours"] == "7 /s"
    assert "| steps | 7 /s |" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--json"], ["--json", "-"], ["--json", "--table", "{}"]])
def test_the_command_prints_its_rows_where_no_file_is_named(words, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(envs, "measure", lambda: [Row("steps", "7 /s")])
    assert main(["bench", "envs", *(word.format(tmp_path / "table.md") for word in words)]) == 0
    assert json.loads(capsys.readouterr().out)["suites"]["envs"][0]["ours"] == "7 /s"
    assert (tmp_path / "table.md").exists() == ("--table" in words)


@pytest.mark.parametrize(("figure", "met"), [(5_000.0, True), (4_999.0, False)])
def test_a_floor_is_met_or_not(figure, met):
    row = learner._floor("updates", figure, "updates/s", 5_000, 10_000)
    assert row.met is met
    assert row.goal == "at least 5,000, aim 10,000"
