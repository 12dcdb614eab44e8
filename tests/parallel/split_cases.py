"""Networks, batches and comparisons for split updates, in a module that child processes can import."""

from __future__ import annotations

import copy
import gc
import math
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parents[1] / "algo"))
from algo_cases import PIXELS, VECTOR, leaves, make_batch

from qfleet.algo.agent import HardTargetConfig, MunchausenConfig, ReplayAgent, SoftTargetConfig
from qfleet.algo.gradients import EagerGradient
from qfleet.algo.heads import CategoricalConfig, ImplicitQuantileConfig, QuantileConfig
from qfleet.algo.inputs import InputConfig
from qfleet.algo.networks import QNetwork, build_network
from qfleet.algo.optim import AdamConfig, RmspropConfig, SgdConfig
from qfleet.algo.steps import GradientStep
from qfleet.algo.torsos import CustomConfig, ImpalaConfig, MlpConfig, NatureConfig
from qfleet.algo.updates import ReplayUpdate
from qfleet.core.spec import PLAIN, EnvSpec, LeafSpec
from qfleet.core.types import Batch
from qfleet.parallel.mesh import Degrees, Mesh
from qfleet.parallel.pipeline import Pipeline
from qfleet.parallel.points import SplitPoints
from qfleet.parallel.split_update import SplitUpdate, Staging
from qfleet.parallel.splitting import split_network
from qfleet.parallel.whole import part_of

SMALL = EnvSpec(name="small", observations={PLAIN: LeafSpec(shape=(3, 20, 20), dtype="uint8", stack=3)}, actions=4)
CAMERAS = EnvSpec(
    name="cameras",
    observations={name: LeafSpec(shape=(2, 36, 36), dtype="uint8", stack=2) for name in ("left", "right")},
    actions=2,
)
BATCH = 8
FOLDER = "QFLEET_TEST_FOLDER"
"""Names the variable that tells the ranks where states are handed on."""


class Own(nn.Module):
    """A user's network that names its split points."""

    def __init__(self, spec: EnvSpec) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 5, stride=3), nn.SiLU(), nn.Conv2d(8, 6, 3, stride=2), nn.ReLU())
        self.turn = nn.Conv2d(6, 4, 1)
        self.rest = nn.Sequential(nn.Flatten(), nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 10))

    def forward(self, image: Tensor) -> Tensor:
        features: Tensor = self.rest(self.turn(self.stem(image)))
        return features

    def split_points(self) -> SplitPoints:
        return SplitPoints(
            parts=("stem", "turn", "rest"), pairs=(("stem.0", "stem.2"), ("rest.1", "rest.3")), lone=("turn",)
        )


class Views(nn.Module):
    """A user's network that writes to what its parts take and return, a view among them."""

    def __init__(self, spec: EnvSpec) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 4, 5, stride=5), nn.Flatten())
        self.rest = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(64, 10))

    def forward(self, image: Tensor) -> Tensor:
        return self.rest(self.first(image).mul_(2))  # type: ignore[no-any-return]

    def split_points(self) -> SplitPoints:
        return SplitPoints(parts=("first", "rest"))


class Anonymous(nn.Module):
    """A user's network that names nothing."""

    def __init__(self, spec: EnvSpec) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 8)

    def forward(self, vector: Tensor) -> Tensor:
        return self.layer(vector).relu()  # type: ignore[no-any-return]


TARGET = HardTargetConfig(period=2)
DOUBLE = ReplayAgent(dueling=True, double=True, n_step=3, target=TARGET)
PLAIN_AGENT = ReplayAgent(target=SoftTargetConfig(tau=0.1))
ADAM = AdamConfig(lr=1e-3, eps=1e-3, max_grad_norm=0.5)
MLP = MlpConfig(hidden=(16, 24, 12), activation="tanh")
CASES: dict[str, tuple[Any, ReplayAgent, EnvSpec, Any]] = {
    "nature": (NatureConfig(dense=64), DOUBLE, PIXELS, ADAM),
    "impala": (ImpalaConfig(channels=(4, 8), dense=16, pool=2), DOUBLE, SMALL, ADAM),
    "mlp": (MLP, DOUBLE, VECTOR, ADAM),
    "soft": (MLP, PLAIN_AGENT, VECTOR, SgdConfig(lr=0.1, momentum=0.9, max_grad_norm=None, l1=1e-4)),
    "own": (CustomConfig(dense=16), DOUBLE, SMALL, RmspropConfig(lr=1e-3, eps=1e-3)),
    "views": (CustomConfig(dense=16), DOUBLE, SMALL, ADAM),
    "anonymous": (CustomConfig(dense=16), DOUBLE, VECTOR, ADAM),
    "linear": (MlpConfig(hidden=()), PLAIN_AGENT, VECTOR, ADAM),
    "norm": (MlpConfig(hidden=(16, 8, 8), layer_norm=True), DOUBLE, VECTOR, ADAM),
    "categorical": (MLP, DOUBLE.model_copy(update={"head": CategoricalConfig(atoms=7)}), VECTOR, ADAM),
    "quantile": (MLP, PLAIN_AGENT.model_copy(update={"head": QuantileConfig(quantiles=5)}), VECTOR, ADAM),
    "munchausen": (MLP, PLAIN_AGENT.model_copy(update={"munchausen": MunchausenConfig()}), VECTOR, ADAM),
    "implicit": (MLP, PLAIN_AGENT.model_copy(update={"head": ImplicitQuantileConfig(taus=4, cosines=6)}), VECTOR, ADAM),
    "noisy": (MLP, DOUBLE.model_copy(update={"noisy": True}), VECTOR, ADAM),
    "statistics": (MLP.model_copy(update={"input": InputConfig(normalize=True)}), DOUBLE, VECTOR, ADAM),
}
CUSTOM = {"own": Own, "views": Views, "anonymous": Anonymous}


def network_of(case: str) -> QNetwork:
    config, agent, spec, _ = CASES[case]
    return build_network(config, agent, spec, seed=3, custom=CUSTOM.get(case))


def batch_of(case: str, seed: int) -> Batch:
    return make_batch(CASES[case][2], np.random.default_rng(seed), BATCH)


def unsplit(case: str) -> ReplayUpdate:
    """Return the update that others must equal."""
    _, agent, _, optim = CASES[case]
    online = network_of(case)
    step = GradientStep(online, optim, 100, None)
    return ReplayUpdate(agent, online, step, torch.Generator().manual_seed(5), EagerGradient)


def split(case: str, mesh: Mesh, staging: Staging | None = None, sharded: bool = False) -> SplitUpdate:
    _, agent, _, optim = CASES[case]
    parts = (agent, network_of(case), optim, torch.Generator().manual_seed(5), mesh, staging, 100)
    return SplitUpdate(*parts, sharded=sharded)


def own_rows(batch: Batch, mesh: Mesh) -> Batch:
    """Return the rows of a replica: every Nth."""
    rows = slice(mesh.place.data, None, mesh.degrees.data)
    arrays = {name: getattr(batch, name)[rows] for name in ("action", "reward", "discount", "weight", "index")}
    seen = {name: np.ascontiguousarray(leaf[rows]) for name, leaf in batch.observation.items()}
    following = {name: np.ascontiguousarray(leaf[rows]) for name, leaf in batch.next_observation.items()}
    copies = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    return replace(batch, observation=seen, next_observation=following, global_size=len(batch.action), **copies)


def distance(found: Any, expected: Any) -> float:
    """Return the norm of the difference, relative to the expected."""
    found, expected = torch.as_tensor(found), torch.as_tensor(expected)
    return float((found - expected).norm() / expected.norm().clamp(min=1e-30))


def first_of(update: SplitUpdate, mesh: Mesh) -> Tensor:
    """Return this rank's parameters as the first ranks that have them too have them."""
    local = update._step.flat.parameters
    whole = mesh.share_(update._whole.gather(local), "data", 0)
    return update._whole.scatter(whole, torch.zeros_like(local))


def run_updates(case: str, mesh: Mesh, staging: Staging | None, sharded: bool, steps: int = 5) -> dict[str, float]:
    """Return how far a split update is from an unsplit one: the worst of several steps."""
    expected, found = unsplit(case), split(case, mesh, staging, sharded)
    worst = dict.fromkeys(("gradient", "weights", "target", "priority", "loss", "norm", "drift"), 0.0)
    for seed in range(steps):
        batch = batch_of(case, seed)
        wanted, got = expected(batch), found(own_rows(batch, mesh))
        found.assemble()
        loss = mesh.sum_(got.metrics["loss"].clone(), "data")
        rows = slice(mesh.place.data, None, mesh.degrees.data)
        gradient = found._whole.gather(found._step.flat.gradients)
        distances = {
            "gradient": distance(gradient, expected.flat.gradients),
            "weights": distance(found.flat.to_numpy(), expected.flat.to_numpy()),
            "target": distance(found.target_flat.to_numpy(), expected.target_flat.to_numpy()),
            "priority": distance(got.priority, wanted.priority[rows]),
            "loss": distance(loss, wanted.metrics["loss"]),
            "norm": distance(got.metrics["grad_norm"], wanted.metrics["grad_norm"]),
            "drift": float(not torch.equal(found._step.flat.parameters, first_of(found, mesh))),
        }
        worst = {name: max(worst[name], value) for name, value in distances.items()}
    assert found.updates == expected.updates == steps
    return worst


class InDouble(nn.Module):
    """Inputs in double precision."""

    def __init__(self, inputs: Any) -> None:
        super().__init__()
        self.inputs, self.shapes = inputs, inputs.shapes

    def forward(self, observation: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: leaf.double() for name, leaf in self.inputs(observation).items()}


def run_double(case: str, mesh: Mesh, staging: Staging | None, sharded: bool) -> dict[str, float]:
    """Return how far outputs and gradients are from those of the unsplit network, in double precision.

    Replicas have rows of their own where they are sharded: only then do gradients come summed.
    """
    whole = network_of(case).double()
    torso: Any = whole.torso
    torso.inputs = InDouble(torso.inputs)
    observation = {
        name: torch.from_numpy(leaf) for name, leaf in leaves(CASES[case][2], np.random.default_rng(1), BATCH).items()
    }
    part = split_network(copy.deepcopy(whole), mesh, sharded=sharded)
    expected = whole.head(whole.torso(observation))
    factors = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    (expected * factors).sum().backward()  # type: ignore[no-untyped-call]
    if part.stage is None:
        own = slice(mesh.place.data, None, mesh.degrees.data) if sharded else slice(None)
        expected, factors = expected[own], factors[own]
        output = part.network.head(part.network.torso({name: leaf[own] for name, leaf in observation.items()}))
        (output * factors).sum().backward()
        modules: list[nn.Module] = [part.network]
    else:
        assert staging is not None
        pipeline = Pipeline(part.stage, part.cut, mesh, staging.micro_batches, staging.schedule)
        features = pipeline.forward(observation)
        pipeline.backward(observation, lambda given, rows: (part.network.head(given) * factors[rows]).sum())
        output = None if features is None else part.network.head(features)
        modules = [part.stage, part.network.head]
    gradients = {name: parameter.grad for name, parameter in whole.named_parameters()}
    held = [p for module in modules for layer in module.modules() for p in layer.parameters(recurse=False)]
    degrees, worst = Degrees(mesh.degrees.data if sharded else 1, 1, mesh.degrees.tensor), 0.0
    for name, parameter in zip(part.share.names, held, strict=True):
        wanted, found = gradients[name], parameter.grad
        assert wanted is not None, name
        assert found is not None, name
        wanted = wanted[part_of(tuple(wanted.shape), part.split.get(name), degrees, mesh.place)]
        local = found.to_local() if isinstance(found, DTensor) else found
        assert local.shape == wanted.shape, name
        worst = max([worst, *(local - wanted).abs().flatten().tolist()])
    forward = 0.0 if output is None else float((output.detach() - expected.detach()).abs().max())
    return {"forward": forward, "backward": worst}


def run_skip(case: str, mesh: Mesh, staging: Staging | None, sharded: bool) -> dict[str, float]:
    """Return what an update with one infinite reward, in one replica, does on this rank: it must do nothing."""
    update = split(case, mesh, staging, sharded)
    update(own_rows(batch_of(case, 0), mesh))
    before = update.state_dict()
    batch = batch_of(case, 1)
    reward = batch.reward.copy()
    reward[0] = np.inf
    result = update(own_rows(replace(batch, reward=reward), mesh))
    after = update.state_dict()
    same = all(
        torch.equal(before["step"]["optim"]["moments"][name], value)
        for name, value in after["step"]["optim"]["moments"].items()
    )
    same &= bool(np.array_equal(before["step"]["weights"], after["step"]["weights"]))
    return {"skipped": float(result.skipped), "made": float(result.updates), "same": float(same)}


def run_chain(case: str, mesh: Mesh, staging: Staging | None, sharded: bool) -> dict[str, float]:
    """Go on from the state that the last mesh left in the folder, two updates, and leave the new one there."""
    folder = Path(os.environ[FOLDER])
    state, count = load_state(folder)
    update = split(case, mesh, staging, sharded)
    update.load_state_dict(state)
    torch.distributed.barrier()  # nobody writes before all have read
    for seed in range(count, count + 2):
        update(own_rows(batch_of(case, seed), mesh))
    saved = update.state_dict()
    if mesh.place == Degrees(0, 0, 0):
        save_state(folder, saved, count + 2)
    torch.distributed.barrier()
    expected = unsplit(case)
    for seed in range(count + 2):
        expected(batch_of(case, seed))
    return state_distances(saved, expected.state_dict())


def state_distances(found: dict[str, Any], expected: dict[str, Any]) -> dict[str, float]:
    """Return how far apart the states of two updates are."""
    moments, wanted = found["step"]["optim"]["moments"], expected["step"]["optim"]["moments"]
    assert moments.keys() == wanted.keys()
    return {
        "weights": distance(found["step"]["weights"], expected["step"]["weights"]),
        "target": distance(found["target"], expected["target"]),
        "count": float(found["step"]["count"] != expected["step"]["count"]),
        "generator": float(not torch.equal(found["generator"], expected["generator"])),
        **{name: distance(moments[name], value) for name, value in wanted.items()},
    }


def save_state(folder: Path, state: dict[str, Any], count: int) -> None:
    torch.save({"state": state, "count": count}, folder / "state.pt")


def load_state(folder: Path) -> tuple[dict[str, Any], int]:
    kept = torch.load(folder / "state.pt", weights_only=False)
    return kept["state"], kept["count"]


def run_desert(case: str, mesh: Mesh, staging: Staging | None, sharded: bool) -> dict[str, float]:
    """Return how long the first rank waits for one that has left before it is told."""
    update = split(case, mesh, staging, sharded)
    update(batch_of(case, 0))
    if mesh.place != Degrees(0, 0, 0):
        mesh.close()
        return {"seconds": 0.0}
    began, told = time.monotonic(), False
    try:
        update(batch_of(case, 1))
    except ConnectionError as error:
        told = "rank 0 of 2: an update failed, another rank may be gone" in str(error)
    return {"seconds": time.monotonic() - began if told else math.inf}


def run_memory(case: str, mesh: Mesh, staging: Staging | None, sharded: bool) -> dict[str, float]:
    """Return what a rank keeps between updates, in parts of what it takes to keep the network's parameters once.

    `share` are parameters and gradients of both networks and the optimiser's averages; `beside` is everything else,
    less the whole networks for publishing, each with its gradients. `gathered` is what an update collects.
    """
    before = live_bytes()
    update = split(case, mesh, staging, sharded)
    for seed in range(2):
        update(own_rows(batch_of(case, seed), mesh))
    with mock.patch.object(
        _fsdp_param_group, "foreach_all_gather", wraps=_fsdp_param_group.foreach_all_gather
    ) as calls:
        update(own_rows(batch_of(case, 2), mesh))
    layers = [parameter.sharded_param for call in calls.call_args_list for parameter in call.args[0]]
    gathered = sum(parameter.numel() for parameter in layers) / update.flat.parameters.numel()
    del layers, calls
    moments = [value for value in update._step.optim._torch.state_dict()["state"][0].values() if value.ndim]
    share = [update._step.flat.parameters, update._step.flat.gradients, update._target_local.parameters]
    share += [update._target_local.gradients, *moments]
    once = update.flat.parameters.nbytes
    own = sum(tensor.nbytes for tensor in share)
    beside = (live_bytes() - before - own) / once - 4
    return {"share": own / once, "beside": beside, "gathered": gathered, "notes": float(notes(update))}


def live_bytes() -> int:
    """Return the bytes of all float32 memory that tensors of this process have."""
    gc.collect()
    tensors = [one for one in gc.get_objects() if issubclass(type(one), Tensor) and not isinstance(one, DTensor)]
    storages = [one.untyped_storage() for one in tensors if one.dtype == torch.float32]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def notes(update: SplitUpdate) -> int:
    """Return how many notes torch keeps of passes that have no way back any more."""
    units = [unit for part in (update._part, update._target_part) for unit in part.network.modules()]
    groups = [fully_shard.state(unit)._fsdp_param_group for unit in units if isinstance(unit, FSDPModule)]  # type: ignore[attr-defined]
    kept = [[group._post_forward_indices, group.comm_ctx.post_forward_order] for group in groups if group is not None]
    return sum(len(one) for both in kept for one in both)
