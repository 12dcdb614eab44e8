"""Times one update of a small dense network on one core: plain torch, qfleet's eager gradient, qfleet's own gradient.

    python benchmarks/small_updates.py [--rounds 20] [--json FILE]

The candidates take turns in one process; each figure is the best round in CPU time, so that other load counts little.
Updates begin with tensors: sampling is not timed. Ratios are to plain torch (dqn_onefile.py, pqn_eager.py).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from qfleet.accel.mlp import MlpForward, MlpGradient
from qfleet.algo.agent import ReplayAgent, RolloutAgent, SoftTargetConfig
from qfleet.algo.gradients import DeepAgent, EagerGradient, GradientFactory
from qfleet.algo.inputs import InputConfig
from qfleet.algo.networks import build_network
from qfleet.algo.optim import AdamConfig
from qfleet.algo.rollouts import RolloutTensors
from qfleet.algo.torsos import MlpConfig
from qfleet.algo.updates import ReplayUpdate, RolloutUpdate, build_update
from qfleet.core.spec import PLAIN, EnvSpec, LeafSpec
from qfleet.core.tensors import TensorBatch

ROOT = Path(__file__).resolve().parent.parent
BATCH, TAU, SCALE = 128, 0.03, (1 / 2.4, 1 / 2, 1 / 0.21, 1 / 2)
CARTPOLE = EnvSpec(name="CartPole", observations={PLAIN: LeafSpec(shape=(4,), dtype="float32")}, actions=2)
GRADIENTS: dict[str, GradientFactory] = {"qfleet eager": EagerGradient, "qfleet mlp": MlpGradient}
ROUND_S = 0.05
Work = Callable[[], object]


def load(path: Path) -> ModuleType:
    """Import a file that is in no package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build(agent: DeepAgent, config: MlpConfig, gradient: GradientFactory) -> ReplayUpdate | RolloutUpdate:
    network, optim = build_network(config, agent, CARTPOLE, seed=0), AdamConfig(lr=5e-4, eps=1e-8)
    update = build_update(agent, network, optim, torch.Generator().manual_seed(0), gradient=gradient)
    assert isinstance(update, ReplayUpdate | RolloutUpdate)
    return update


def random_batch() -> TensorBatch:
    observation, following = ({PLAIN: torch.randn(BATCH, 4)} for _ in range(2))
    action, reward, discount = torch.randint(2, (BATCH,)), torch.rand(BATCH), torch.full((BATCH,), 0.97)
    return TensorBatch(observation, action, reward, discount, following, torch.ones(BATCH), None, None, BATCH)


def double_dqn() -> dict[str, Work]:
    """A Double-DQN update of 4-128-128-2 with a soft target, batch 128."""
    page = load(ROOT / "examples/reference/dqn_onefile.py")
    batch = random_batch()
    plain = page.Batch(
        batch.observation[PLAIN], batch.action, batch.reward, batch.discount, batch.next_observation[PLAIN]
    )
    online, target = (page.QNetwork(4, 2, 128, [1 / each for each in SCALE]) for _ in range(2))
    adam = torch.optim.Adam(online.parameters(), lr=5e-4, fused=True)

    def update() -> None:
        loss = page.td_loss(online, target, plain, double=True)
        adam.zero_grad()
        loss.backward()
        adam.step()
        page.update_target(online, target, TAU)

    agent, config = (
        ReplayAgent(double=True, target=SoftTargetConfig(tau=TAU)),
        MlpConfig(input=InputConfig(scale=SCALE)),
    )
    ours = {name: build(agent, config, gradient) for name, gradient in GRADIENTS.items()}
    return {"plain torch": update, **{name: lambda own=own: own.learn(batch) for name, own in ours.items()}}


def pqn_minibatches() -> dict[str, Work]:
    """Two PQN minibatches of 128, network 4-256-256-2 with layer normalisation."""
    page = load(ROOT / "benchmarks/pqn_eager.py")
    batches = [random_batch() for _ in range(2)]
    network = page.build_network(4, 2)
    adam = torch.optim.Adam(network.parameters(), lr=5e-4, fused=True)
    data = RolloutTensors(
        {PLAIN: torch.cat([batch.observation[PLAIN] for batch in batches])},
        torch.cat([batch.action for batch in batches]),
        torch.cat([batch.reward for batch in batches]),
    )

    def update() -> None:
        for chosen in torch.randperm(2 * BATCH).tensor_split(2):
            page.learn_minibatch(network, adam, data.observation[PLAIN][chosen], data.action[chosen], data.goal[chosen])

    agent, config = RolloutAgent(epochs=1, minibatches=2), MlpConfig(hidden=(256, 256), layer_norm=True)
    ours = {name: build(agent, config, gradient) for name, gradient in GRADIENTS.items()}
    return {"plain torch": update, **{name: lambda own=own: own.learn(data) for name, own in ours.items()}}


def acting(rows: int) -> dict[str, Work]:
    """Values of some observations, network 4-128-128-2."""
    update = build(ReplayAgent(), MlpConfig(input=InputConfig(scale=SCALE)), MlpGradient)
    observation, fast = {PLAIN: torch.randn(rows, 4)}, MlpForward(update.online)

    def eager() -> None:
        with torch.inference_mode():
            update.online.q(observation)

    return {"qfleet eager": eager, "qfleet mlp": lambda: fast.q(observation)}


def best_times(candidates: dict[str, Work], rounds: int) -> dict[str, float]:
    """Microseconds of one call of each, taken in turns."""
    best = dict.fromkeys(candidates, float("inf"))
    for work in candidates.values():
        work()
    for _ in range(rounds):
        for name, work in candidates.items():
            start, calls = time.process_time(), 0
            while (spent := time.process_time() - start) < ROUND_S:
                for _ in range(5):
                    work()
                calls += 5
            best[name] = min(best[name], 1e6 * spent / calls)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    parts = {
        "Double DQN update, 128-128, batch 128": double_dqn(),
        "2 PQN minibatches, 256-256 LayerNorm, batch 128": pqn_minibatches(),
        "acting, 128-128, 1 observation": acting(1),
        "acting, 128-128, 16 observations": acting(16),
    }
    results = {}
    print("| work | candidate | us | times as fast |\n|---|---|---|---|")
    for work, candidates in parts.items():
        results[work] = best = best_times(candidates, options.rounds)
        first = next(iter(best.values()))
        for name, spent in best.items():
            print(f"| {work} | {name} | {spent:,.0f} | {first / spent:.2f} |", flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
