"""Times fused loops on the device: learned steps a second, warm-up, and recorded against eager results.

    python benchmarks/gpu/fused.py [--parts equal cartpole minatar dqn] [--seconds 5] [--shipped]

With `--shipped` only the settings that a run without a probe takes, else also the other formats, compiled and not.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch

from qfleet.algo.agent import RolloutAgent
from qfleet.algo.torsos import MlpConfig
from qfleet.core.usercode import UserCode
from qfleet.envs import env_spec
from qfleet.experiment import Experiment, with_changes
from qfleet.presets import preset
from qfleet.presets.algorithms import apply
from qfleet.roles.fused.loop import Loop
from qfleet.roles.fused.replay_loop import ReplayLoop
from qfleet.roles.fused.rollout_loop import RolloutLoop
from qfleet.setups import fused_setup

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def build(experiment: Experiment, **changes: Any) -> Loop:
    experiment = with_changes(experiment, {"device": DEVICE, **changes})
    setup = fused_setup(experiment, env_spec(experiment.env), UserCode())
    return RolloutLoop(setup) if isinstance(experiment.agent, RolloutAgent) else ReplayLoop(setup)


def cartpole_pqn(envs: int, ticks: int, epochs: int, minibatches: int, width: int = 128) -> Experiment:
    experiment = with_changes(
        apply(preset("cartpole"), "pqn"),
        {"env.kind": "tensor", "env.game": "cartpole", "env.reward_scale": 0.005, "env_steps": 10**9},
    )
    agent = RolloutAgent(gamma=0.995, rollout_length=ticks, epochs=epochs, minibatches=minibatches)
    network = MlpConfig(hidden=(width, width), layer_norm=True, input=experiment.network.input)
    return with_changes(experiment, {"agent": agent, "network": network, "actor.envs": envs})


def rate(loop: Loop, seconds: float) -> tuple[float, float, float]:
    """Return (warm-up seconds, learned steps a second, updates a second)."""
    began = time.perf_counter()
    for _ in range(6):
        loop.advance()
    synchronise()
    warm = time.perf_counter() - began
    steps, updates, began = loop.steps, loop.update.updates, time.perf_counter()
    while time.perf_counter() - began < seconds:
        loop.advance()
    synchronise()
    spent = time.perf_counter() - began
    return warm, (loop.steps - steps) / spent, (loop.update.updates - updates) / spent


def synchronise() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def show(what: str, loop: Loop, seconds: float) -> None:
    warm, steps, updates = rate(loop, seconds)
    rates = f"{steps:14,.0f} steps/s  {updates:10,.0f} updates/s"
    print(f"{what:64} warm-up {warm:5.2f} s  {rates}  [{loop.choices.description}]")


def equal() -> None:
    """The recorded loop does what the eager one does."""
    for name, experiment in {
        "pqn cartpole": cartpole_pqn(64, 16, 2, 4),
        "pqn breakout": with_changes(preset("minatar:breakout"), {"actor.envs": 32}),
        "dqn catch": with_changes(
            apply(preset("catch"), "prioritised"), {"env.kind": "tensor", "env.game": "catch", "actor.envs": 16}
        ),
    }.items():
        loops = [build(experiment, **{"accel.graphs": graphs}) for graphs in ("on", "off")]
        for loop in loops:
            for _ in range(8):
                loop.advance()
        weights = [loop.update.flat.parameters for loop in loops]
        difference = (weights[0] - weights[1]).abs().max().item()
        counts = [(loop.steps, loop.update.updates) for loop in loops]
        print(f"equal: {name:20} largest difference of weights {difference:.2e}, steps and updates {counts}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=["equal", "cartpole", "minatar", "dqn"])
    parser.add_argument("--games", nargs="+", default=["breakout"])
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--shipped", action="store_true")
    options = parser.parse_args()
    if "equal" in options.parts:
        equal()
    ways = [{}]
    if not options.shipped:
        ways += [
            {"accel.precision": precision, "accel.compile": compiled}
            for compiled in ("off", "on")
            for precision in ("tf32", "bf16")
        ]
    if "cartpole" in options.parts:
        for envs, ticks, epochs, minibatches in ((4096, 32, 2, 8), (16384, 16, 1, 4)):
            what = f"pqn cartpole {envs} x {ticks}, {epochs} epochs of {minibatches}"
            for way in ways:
                show(what, build(cartpole_pqn(envs, ticks, epochs, minibatches), **way), options.seconds)
    if "minatar" in options.parts:
        for game in options.games:
            for envs in (512, 4096):
                changes = {"actor.envs": envs, "agent.minibatches": 16 if envs < 1024 else 32}
                for way in ways:
                    loop = build(preset(f"minatar:{game}"), **changes, **way)
                    show(f"pqn {game} {envs} x 32", loop, options.seconds)
    if "dqn" in options.parts:
        game = {"env.kind": "tensor", "env.game": "minatar-breakout", "network.kind": "small_cnn"}
        experiment = with_changes(apply(preset("catch"), "prioritised"), game)
        show(
            "double dqn breakout, prioritised, batch 64",
            build(experiment, **{"replay.capacity": 200_000}),
            options.seconds,
        )


if __name__ == "__main__":
    main()
