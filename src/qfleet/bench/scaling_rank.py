"""One rank of a learner group that makes whole updates with the others: how many a second, and what it sends."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qfleet.accel.config import AccelConfig
from qfleet.algo.agent import ReplayAgent
from qfleet.algo.networks import NetworkConfig
from qfleet.algo.optim import AdamConfig
from qfleet.algo.torsos import MlpConfig, NatureConfig
from qfleet.algo.updates import ReplayUpdate
from qfleet.core.spec import PLAIN, EnvSpec, LeafSpec
from qfleet.core.tensors import TensorBatch
from qfleet.core.usercode import UserCode
from qfleet.parallel.gradsync import GradientGroup
from qfleet.parallel.plan import ParallelConfig
from qfleet.roles.joining import Joining
from qfleet.roles.learner_setup import LearnerConfig, LearnerSetup
from qfleet.roles.learning import build_learning

BATCH = 32
"""Transitions of one rank in each update."""
TIMEOUT_S = 60.0
NETWORKS: dict[str, tuple[NetworkConfig, EnvSpec]] = {
    "nature": (
        NatureConfig(),
        EnvSpec(name="frames", observations={PLAIN: LeafSpec(shape=(4, 84, 84), dtype="uint8", stack=4)}, actions=6),
    ),
    "mlp": (
        MlpConfig(hidden=(128, 128)),
        EnvSpec(name="vector", observations={PLAIN: LeafSpec(shape=(4,), dtype="float32")}, actions=2),
    ),
}
_STEADY: dict[str, dict[str, Any]] = {"topk": {"warmup": 0}}
"""Settings with which a compression does from the start what it does for most of a run."""
_WARMUPS, _TRIED, _FEWEST = 3, 3, 5
"""Updates before anything is timed, those that say how long one takes, and the fewest of a round."""
ROUNDS = 3
"""The fastest counts, and the fewest bytes: other programs only ever slow ranks down or make TCP send things twice."""


@dataclass(frozen=True)
class Job:
    """What ranks are to do for about so many seconds."""

    network: str
    compression: str = "none"
    seconds: float = 2.0


@dataclass(frozen=True)
class Done:
    """What came of a job."""

    updates_per_s: float
    counted_bytes: float
    """That this rank sent for each update, by its own count; headers are not in it."""
    wire_bytes: float
    """That left the interface for each update, by the kernel's count; 0 where none was named."""
    cpu_s: float
    """Seconds of CPU time that an update took this rank: much less than it lasted means waiting, or other programs."""


def run_rank(rank: int, size: int, rendezvous: str, jobs: Sequence[Job], interface: str = "") -> list[Done]:
    """Carry out jobs with the other ranks, with one thread; every rank calls this with the same jobs.

    `interface` is the network interface whose bytes are counted: all that leave it are counted, whoever sent them.
    """
    torch.set_num_threads(1)
    if size == 1:
        return [_carry_out(job, rank, 1, None, interface) for job in jobs]
    group = GradientGroup(rank, size, rendezvous, TIMEOUT_S)
    try:
        return [_carry_out(job, rank, size, group, interface) for job in jobs]
    finally:
        group.close()


def _carry_out(job: Job, rank: int, size: int, group: GradientGroup | None, interface: str) -> Done:
    setup = learner_setup(job, size)
    joining = None if group is None else Joining(setup.parallel, group, setup.seed)
    update = build_learning(setup, "learner", joining).update
    assert isinstance(update, ReplayUpdate)
    batch = random_batch(setup.spec, size, torch.Generator().manual_seed(rank))

    def spent(updates: int) -> tuple[float, float]:
        began, cpu = time.perf_counter(), time.process_time()
        for _ in range(updates):
            update.learn(batch)
        return (time.perf_counter() - began) / updates, (time.process_time() - cpu) / updates

    spent(_WARMUPS)
    updates = max(_FEWEST, int(job.seconds / ROUNDS / _agreed(group, spent(_TRIED)[0])))
    times, wire = [], []
    for _ in range(ROUNDS):
        before = _counted_in_quiet(group, interface)
        times.append(spent(updates))
        wire.append((_counted_in_quiet(group, interface) - before) / updates)
    seconds, cpu_s = min(times)
    if joining is None:
        return Done(1 / seconds, 0.0, 0.0, cpu_s)
    joining.meet(update, update.updates)  # a sum that differs between ranks would be no result
    return Done(1 / seconds, joining.metrics()["gradient_bytes"], min(wire), cpu_s)


def learner_setup(job: Job, size: int) -> LearnerSetup:
    """Return what each of so many ranks is built from: Double DQN, as a run on a CPU builds it."""
    network, spec = NETWORKS[job.network]
    compression = {"kind": job.compression, **_STEADY.get(job.compression, {})}
    return LearnerSetup(
        learner=LearnerConfig(batch_size=BATCH * size),
        network=network,
        agent=ReplayAgent(double=True),
        optim=AdamConfig(),
        spec=spec,
        seed=0,
        total_updates=10**6,
        evaluate_every=10**6,
        env_steps=10**6,
        device="cpu",
        group=None,
        warm_start=None,
        warm_start_part="all",
        code=UserCode(),
        accel=AccelConfig(),
        parallel=ParallelConfig.model_validate({"compression": compression}),
    )


def random_batch(spec: EnvSpec, ranks: int, generator: torch.Generator) -> TensorBatch:
    """Return one rank's transitions of nothing in particular."""
    leaf = spec.observations[PLAIN]

    def frames() -> dict[str, Tensor]:
        values = torch.randint(0, 256, (BATCH, *leaf.shape), generator=generator)
        return {PLAIN: values.to(torch.uint8) if leaf.dtype == "uint8" else values / 128 - 1}

    action, reward = torch.randint(spec.actions, (BATCH,), generator=generator), torch.rand(BATCH, generator=generator)
    ones = torch.ones(BATCH)
    return TensorBatch(frames(), action, reward, 0.99 * ones, frames(), ones, None, None, BATCH * ranks)


def _agreed(group: GradientGroup | None, value: float) -> float:
    """Return what rank 0 has; waits for all ranks."""
    return value if group is None else group.all_gather(torch.tensor([value], dtype=torch.float64))[0].item()


def _counted_in_quiet(group: GradientGroup | None, interface: str) -> int:
    """Return the bytes that have left an interface, read while every rank waits."""
    _agreed(group, 0.0)
    count = bytes_sent(interface) if interface else 0
    _agreed(group, 0.0)
    return count


def bytes_sent(interface: str, read: Callable[[], str] = Path("/proc/self/net/dev").read_text) -> int:
    """Return the bytes that have left an interface of this process's network namespace."""
    lines = (line.partition(":") for line in read().splitlines())
    return next(int(counts.split()[8]) for name, _, counts in lines if name.strip() == interface)
