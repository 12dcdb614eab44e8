"""How a fused replay loop divides its work: pieces end where something is due, debts are paid in bounded ones."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from role_cases import Edge

from qfleet.accel.choices import Choices
from qfleet.accel.graphs import Recording
from qfleet.core.errors import ConfigError
from qfleet.core.role import DONE
from qfleet.core.types import Evaluated
from qfleet.core.usercode import UserCode
from qfleet.envs import env_spec
from qfleet.experiment import with_changes
from qfleet.presets import preset
from qfleet.presets.algorithms import apply
from qfleet.roles.fused import Fused, FusedHandles, FusedSetup, evaluation, loop
from qfleet.roles.fused.replay_loop import LONGEST, TICKS, UPDATES, ReplayLoop
from qfleet.setups import fused_setup

SMALL = {
    "device": "cpu",
    "network.hidden": [8],
    "learner.batch_size": 4,
    "learner.learning_starts": 100,
    "evaluation": {"episodes": 1, "max_episode_steps": 20, "target": None},
}


def setup(algo: str = "dqn", **changes: Any) -> FusedSetup:
    experiment = with_changes(apply(preset("cartpole"), algo), {**SMALL, **changes})
    return fused_setup(experiment, env_spec(experiment.env), UserCode())


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let loops proceed as they do where they are recorded, though every call is eager."""

    class Eager(Recording):
        def __init__(self, work: Any, generators: Any, enabled: bool) -> None:
            super().__init__(work, generators, enabled=False)

    monkeypatch.setattr(loop, "Recording", Eager)
    monkeypatch.setattr(evaluation, "Recording", Eager)
    monkeypatch.setattr(Choices, "recorded", True)


def role(run: FusedSetup) -> tuple[Fused, dict[str, Edge]]:
    edges = {name: Edge() for name in ("events", "env_steps", "updates", "samples")}
    return Fused(run, FusedHandles(**edges)), edges


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("period", [0.3, 4.0, 64.0])
@pytest.mark.parametrize("envs", [1, 8])
def test_a_recorded_run_ends_at_its_budget_with_the_updates_it_owes(period: float, envs: int) -> None:
    budget = {"env_steps": 1500, "evaluation.every": 10**6, "actor.envs": envs, "learner.train_period": period}
    run = ReplayLoop(setup(**budget))
    while not run.over:
        run.advance()
    assert 1500 <= run.steps < 1500 + envs
    wanted = (run.steps - 100) / period
    assert wanted - 1 <= run.update.updates <= wanted + 2 * max(envs / period, 1)


@pytest.mark.usefixtures("recorded")
def test_a_recorded_run_is_evaluated_when_that_is_due() -> None:
    run, edges = role(setup(**{"env_steps": 4000, "evaluation.every": 500, "learner.train_period": 16.0}))
    while run.step() is not DONE:
        pass
    at = [event.env_steps for event in edges["events"].queue if isinstance(event, Evaluated)]
    assert [steps // 500 for steps in at] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert all(steps % 500 < 16 for steps in at)


@pytest.mark.usefixtures("recorded")
def test_a_recorded_piece_is_long_where_nothing_is_due() -> None:
    free = {"env_steps": 10**6, "evaluation.every": 10**6, "learner.train_period": 8.0}
    run = ReplayLoop(setup(**free))
    while not run.update.updates:
        run.advance()
    assert run.advance().updates >= UPDATES - 8


@pytest.mark.usefixtures("recorded")
def test_exploration_and_importance_weights_move_within_a_recorded_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    free = {"env_steps": 4000, "evaluation.every": 10**6, "exploration.steps": 2000, "exploration.end": 0.0}
    run, seen = ReplayLoop(setup("prioritised", **free)), []
    tick = run.tick
    monkeypatch.setattr(run, "tick", lambda: (seen.append((run._epsilon[0].item(), run._beta.item())), tick())[1])
    while run.steps < 2100:
        run.advance()
    moving = [pair for pair in seen if 0 < pair[0] < 0.9]
    epsilons, betas = zip(*moving, strict=True)
    assert len(moving) > 80
    assert all(0 <= before - after < 0.03 for before, after in pairwise(epsilons))
    assert all(0 <= after - before < 0.03 for before, after in pairwise(betas))


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("changes", [{"learner.train_period": 5000.0, "actor.envs": 1}, {"actor.envs": 4096}])
def test_no_recording_is_long_whatever_the_ratio_of_ticks_and_updates(changes: dict[str, Any]) -> None:
    run = ReplayLoop(setup(**{"env_steps": 10**6, "evaluation.every": 10**6, **changes}))
    cycles, ticked = [], []
    run._cycling = lambda: cycles.append(1)  # type: ignore[assignment]
    act = run._act
    run._acting = lambda: (ticked.append(1), act())  # type: ignore[assignment]
    while run.steps < 300:
        before = len(ticked)
        run.advance()
        assert len(ticked) - before <= TICKS
    assert not cycles
    assert max(run._cycle_ticks, run._cycle_updates) > LONGEST


@pytest.mark.parametrize("way", ["eager", "recorded"])
def test_trap_13_a_debt_is_paid_in_bounded_pieces_before_anything_is_acted(
    way: str, request: pytest.FixtureRequest
) -> None:
    if way == "recorded":
        request.getfixturevalue("recorded")
    changes = {"learner.train_period": 1 / 64, "actor.envs": 16, "env_steps": 116, "evaluation.every": 10**6}
    run, pieces = ReplayLoop(setup(**changes)), []
    while not run.over:
        pieces.append(run.advance())
    assert max(piece.updates for piece in pieces) <= UPDATES
    assert run.update.updates == (run.steps - 100) * 64
    assert sum(piece.steps > 0 and piece.updates > 0 for piece in pieces) <= 2


def test_trap_13_learning_begins_without_a_debt_where_windows_were_not_complete() -> None:
    # 512 environments have made ten thousand steps before the first window of 20 steps is complete.
    wide = {"actor.envs": 512, "agent.n_step": 20, "env_steps": 12_000, "learner.train_period": 4.0}
    run, bursts = ReplayLoop(setup(**wide)), []
    settle = run._settle

    def noted() -> None:
        before = run._tried
        settle()
        bursts.append((run.steps, run._tried - before))

    run._settle = noted  # type: ignore[method-assign]
    while not run.over:
        run.advance()
    assert max(updates for _, updates in bursts) <= 512 / 4
    assert min(steps for steps, updates in bursts if updates) > 10_000
    assert run.update.updates == (run.steps - 21 * 512) // 4


def test_updates_that_never_end_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"learner\.train_period' = 1e-09: should be greater"):
        setup(**{"learner.train_period": 1e-9})


def test_a_run_without_any_update_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"learner\.train_period 2000\.0 exceeds the 900 steps"):
        setup(**{"learner.train_period": 2000.0, "env_steps": 1000})


def test_metrics_after_a_resume_are_of_what_comes_after_it() -> None:
    changes = {"env_steps": 9000, "evaluation.every": 10**6, "exploration.steps": 3000, "exploration.end": 0.25}
    uncut, _ = role(setup(**changes))
    while uncut._loop.steps < 4000:
        uncut.step()
    uncut.metrics()
    resumed, _ = role(setup(**changes))
    resumed.load_state_dict(uncut.state_dict())
    now = resumed.metrics()
    assert (now["epsilon"], now["episodes"]) == (pytest.approx(0.25), uncut.metrics()["episodes"])
    assert "episode_return" not in now
    finished = resumed._loop.player.finished.clone()
    uncut.step(), resumed.step()
    while torch.equal(resumed._loop.player.finished, finished):
        uncut.step(), resumed.step()
    assert resumed.metrics() == pytest.approx(uncut.metrics())
