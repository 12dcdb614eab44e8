"""The fused loop: learned steps a second, on a CPU beside plain eager loops, on a GPU beside what was aimed at.

The eager loops are scripts of the repository, which are kept as they are. Both sides take turns; the median counts.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from qfleet.algo.agent import RolloutAgent, SoftTargetConfig
from qfleet.algo.exploration import EpsilonGreedyConfig
from qfleet.algo.optim import AdamConfig
from qfleet.algo.torsos import MlpConfig
from qfleet.bench.peers import SCRIPTS, peer_python, run_peer
from qfleet.bench.table import Row
from qfleet.bench.timing import synchronise
from qfleet.core.usercode import UserCode
from qfleet.envs import env_spec
from qfleet.experiment import Experiment, with_changes
from qfleet.presets import preset
from qfleet.presets.algorithms import apply
from qfleet.roles.fused.loop import Loop
from qfleet.roles.fused.replay_loop import ReplayLoop
from qfleet.roles.fused.rollout_loop import RolloutLoop
from qfleet.setups import fused_setup

PQN, DQN = Path("benchmarks/pqn_eager.py"), Path("examples/reference/dqn_onefile.py")
SB3 = SCRIPTS / "sb3_pace.py"
WARM_UP = 6
"""Pieces of a loop that are not timed: GPUs compile and record in them."""


def measure(peers: Path | None = None, rounds: int = 3, seconds: float = 4.0, peer_steps: int = 30_000) -> list[Row]:
    """Measure what the device at hand is for; `peers` is the environment of Stable-Baselines3."""
    if torch.cuda.is_available():
        return _on_gpu(seconds)
    python = peer_python(peers)
    return [
        _beside(
            "PQN CartPole, 32 x 64, 4 epochs of 16, MLP 256-256 with LayerNorm",
            cartpole_pqn(32, 64, 4, 16, width=256),
            PQN,
            lambda: _eager_rate(PQN, "--env-steps", str(peer_steps)),
            2.0,
            rounds,
            seconds,
        ),
        _beside(
            "DQN CartPole, 16 environments, one update of batch 128 in 4 steps",
            cartpole_dqn(),
            DQN,
            lambda: _eager_rate(DQN, "--env-steps", str(peer_steps // 3), "--evaluate-every", str(10**9)),
            2.5,
            rounds,
            seconds,
        ),
        _beside(
            "DQN CartPole, 16 environments, one update of batch 128 in 10 steps",
            with_changes(cartpole_dqn(), {"learner.train_period": 10}),
            SB3 if python is not None else Path(),
            lambda: float(run_peer(python or Path(), SB3.name, "--env-steps", str(peer_steps // 3))["steps_per_s"]),
            6.0,
            rounds,
            seconds,
        ),
    ]


def cartpole_pqn(envs: int, ticks: int, epochs: int, minibatches: int, width: int) -> Experiment:
    """Return PQN on CartPole at the settings of the eager loop but for sizes."""
    experiment = apply(preset("cartpole"), "pqn")
    agent = RolloutAgent(gamma=0.99, q_lambda=0.95, rollout_length=ticks, epochs=epochs, minibatches=minibatches)
    return with_changes(
        experiment,
        {
            "env.reward_scale": 0.1,
            "env_steps": 10**10,
            "agent": agent,
            "network": MlpConfig(hidden=(width, width), layer_norm=True),
            "optim": AdamConfig(lr=2.5e-4, max_grad_norm=10.0),
            "actor.envs": envs,
        },
    )


def cartpole_dqn() -> Experiment:
    """Return DQN on CartPole at the settings of the one-page program."""
    return with_changes(
        preset("cartpole"),
        {
            "env.reward_scale": 0.002,
            "env_steps": 10**8,
            "evaluation.every": 10**8,
            "agent.gamma": 0.99,
            "agent.target": SoftTargetConfig(tau=0.03),
            "exploration": EpsilonGreedyConfig(start=1.0, end=0.05, steps=2_000),
            "learner.train_period": 4,
            "learner.learning_starts": 256,
            "optim": AdamConfig(lr=5e-4),
        },
    )


def build_loop(experiment: Experiment) -> Loop:
    """Return the fused loop of an experiment."""
    setup = fused_setup(experiment, env_spec(experiment.env), UserCode())
    return RolloutLoop(setup) if isinstance(experiment.agent, RolloutAgent) else ReplayLoop(setup)


def loop_rate(loop: Loop, seconds: float) -> float:
    """Return the learned steps a second of a loop, after its warm-up."""
    for _ in range(WARM_UP):
        loop.advance()
    synchronise()
    steps, began = loop.steps, time.perf_counter()
    while (spent := time.perf_counter() - began) < seconds or loop.steps == steps:
        loop.advance()
        synchronise()
    return (loop.steps - steps) / spent


def _beside(
    what: str,
    experiment: Experiment,
    script: Path,
    eager: Callable[[], float],
    goal: float,
    rounds: int,
    seconds: float,
) -> Row:
    """Put our loop beside an eager one where its script is."""
    there, ours, theirs = script.is_file(), [], []
    for done in range(rounds):
        ours.append(_best_threads(experiment, seconds))
        _say(f"{what}, round {done + 1} of {rounds}: {ours[-1]:,.0f} steps/s")
        if there:
            theirs.append(eager())
            _say(f"  {script.name}: {theirs[-1]:,.0f} steps/s")
    rate, peer = statistics.median(ours), statistics.median(theirs) if theirs else None
    ratio = rate / peer if peer else None
    return Row(
        what=what,
        ours=f"{rate:,.0f} steps/s",
        peer=f"{peer:,.0f} steps/s ({script.name})" if peer else "",
        ratio=ratio,
        goal=f"ratio {goal:g}",
        met=None if ratio is None else ratio >= goal,
    )


def _say(text: str) -> None:
    """Tell whoever waits what was just measured; the table comes at the end, on the other stream."""
    print(text, file=sys.stderr, flush=True)


def _best_threads(experiment: Experiment, seconds: float) -> float:
    """Return the rate at the better of one thread and all cores, as the eager loop has it."""
    before, rates = torch.get_num_threads(), []
    try:
        for threads in sorted({1, os.cpu_count() or 1}):
            torch.set_num_threads(threads)
            rates.append(loop_rate(build_loop(experiment), seconds))
    finally:
        torch.set_num_threads(before)
    return max(rates)


def _eager_rate(script: Path, *words: str) -> float:
    return float(run_peer(Path(sys.executable), str(script.resolve()), *words)["steps_per_s"])


def _on_gpu(seconds: float) -> list[Row]:
    breakout = with_changes(
        preset("minatar:breakout"), {"env_steps": 10**10, "actor.envs": 4096, "agent.minibatches": 32}
    )
    works = (
        ("PQN CartPole, 4096 x 32, 2 epochs of 8, MLP 128-128", cartpole_pqn(4096, 32, 2, 8, width=128), 10.5, 25),
        ("PQN CartPole, 16384 x 16, 1 epoch of 4, MLP 128-128", cartpole_pqn(16384, 16, 1, 4, width=128), 10.5, 25),
        ("PQN MinAtar Breakout, 4096 x 32, 2 epochs of 32", breakout, 2, 5),
    )
    rows = []
    for what, experiment, floor, goal in works:
        _say(what)
        rate = loop_rate(build_loop(experiment), seconds) / 1e6
        text = f"at least {floor:g} M, aim {goal:g} M"
        rows.append(Row(what, f"{rate:.2f} M learned steps/s", goal=text, met=rate >= floor))
    return rows
