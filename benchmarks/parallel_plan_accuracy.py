"""Compares what the parallel planner predicts with what groups of real processes do: seconds of one update.

    python benchmarks/parallel_plan_accuracy.py [--seconds 1] [--rounds 2] [--json FILE]

Each network and batch is timed layer by layer, links between processes of this machine are timed, and then every plan
is carried out with gloo: data-parallel ranks, each with its part of the batch and the run's own update, and networks
that are split by tensor or pipeline. All of it is done in so many rounds; of a piece the fastest counts, of a plan the
round in which other programs kept the fewest cores busy, which is shown: where they left fewer cores than the plan has
ranks, by more than a tenth of a core, the row does not count. A plan counts as predicted if it is within 20 %, the
choice as good if it takes at most 10 % longer than the best that was measured.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import psutil
import torch

from qfleet.accel.config import AccelConfig
from qfleet.algo.agent import ReplayAgent
from qfleet.algo.networks import NetworkConfig, build_network
from qfleet.algo.optim import AdamConfig
from qfleet.algo.torsos import MlpConfig, NatureConfig
from qfleet.control import resources
from qfleet.control.parallel_layers import measure_layers
from qfleet.control.parallel_links import LocalRanks, measure_links
from qfleet.control.parallel_measured import site_of
from qfleet.control.parallel_parts import Fabric, Handling, Link, Site, Way, Work
from qfleet.control.parallel_samples import quiet, sample
from qfleet.control.parallel_ways import Candidate, considered, weigh
from qfleet.core.spec import PLAIN, EnvSpec, LeafSpec
from qfleet.core.tensors import TensorBatch
from qfleet.core.usercode import UserCode
from qfleet.parallel.gradsync import GradientGroup
from qfleet.parallel.mesh import Degrees, Mesh
from qfleet.parallel.split_update import SplitUpdate, Staging
from qfleet.roles.joining import Joining
from qfleet.roles.learner_setup import LearnerConfig, LearnerSetup
from qfleet.roles.learning import build_learning

DEGREES = (1, 2, 3, 4)
WAYS = (*(Way(data) for data in DEGREES), Way(tensor=2), Way(pipeline=2, micro=2))
WITHIN, GOOD, WANTED = 0.20, 1.10, 8
DISTURBED = 0.1
"""Cores that other programs may take away from a plan that counts."""
ROUND_S = 0.1
"""Ranks look whether the time is over about this often."""
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Ran:
    """What came of a plan that was carried out."""

    seconds: float
    """Of an update, in quiet moments."""
    others: float
    """Cores that other programs kept busy meanwhile."""


@dataclass(frozen=True)
class Case:
    """A network and a batch."""

    name: str
    spec: EnvSpec
    network: NetworkConfig
    batch: int

    def setup(self) -> LearnerSetup:
        """Return what its learners are built from."""
        return LearnerSetup(
            learner=LearnerConfig(batch_size=self.batch),
            network=self.network,
            agent=ReplayAgent(double=True),
            optim=AdamConfig(),
            spec=self.spec,
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
        )


def _spec(name: str, shape: tuple[int, ...], dtype: str, stack: int = 1) -> EnvSpec:
    return EnvSpec(name=name, observations={PLAIN: LeafSpec(shape=shape, dtype=dtype, stack=stack)}, actions=6)


PIXELS, VECTOR = _spec("pixels", (4, 84, 84), "uint8", stack=4), _spec("vector", (8,), "float32")
CASES = (
    Case("Nature, batch 32", PIXELS, NatureConfig(), 32),
    Case("Nature, batch 128", PIXELS, NatureConfig(), 128),
    Case("MLP 1024-1024, batch 1024", VECTOR, MlpConfig(hidden=(1024, 1024)), 1024),
    Case("MLP 128-128, batch 128", VECTOR, MlpConfig(hidden=(128, 128)), 128),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=1.0, help="of each plan in each round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    multiprocessing.set_start_method("forkserver")
    multiprocessing.set_forkserver_preload(["torch", "qfleet.roles.learning", "qfleet.parallel.split_update"])
    links, works, measured = _quietest(options.seconds, options.rounds)
    site = replace(site_of("cpu", resources.look(), links), ranks=max(DEGREES))
    rows: list[dict[str, Any]] = []
    for case in CASES:
        tried = [considered(works[case.name], site, way) for way in WAYS]
        rows += [_row(case, one, measured[case.name, one.way], site.cores) for one in tried]
    _show(rows)
    choices = [_chosen(case, works[case.name], site, measured) for case in CASES]
    quiet_rows = [row for row in rows if not row["disturbed"]]
    near = sum(abs(row["ratio"] - 1) <= WITHIN for row in quiet_rows)
    print(f"{near} of {len(quiet_rows)} undisturbed plans within {WITHIN:.0%}, {WANTED} are wanted;", end=" ")
    print(f"{len(rows) - len(quiet_rows)} were disturbed;", end=" ")
    print(f"{sum(one['good'] for one in choices)} of {len(choices)} choices within 10 % of the best measured")
    if options.json:
        options.json.write_text(json.dumps({"plans": rows, "choices": choices}, indent=1) + "\n")


def _quietest(seconds: float, rounds: int) -> tuple[LocalRanks, dict[str, Work], dict[tuple[str, Way], Ran]]:
    """Return links, works and the seconds of every plan, each from the quietest round."""
    links: list[LocalRanks] = []
    works: dict[str, list[Work]] = {}
    measured: dict[tuple[str, Way], list[Ran]] = {}
    for _ in range(rounds):
        links.append(measure_links())
        for case in CASES:
            works.setdefault(case.name, []).append(measure_layers(case.setup()))
            for way in WAYS:
                measured.setdefault((case.name, way), []).append(run_plan(case, way, seconds))
    best = {key: min(ran, key=lambda one: one.others) for key, ran in measured.items()}
    return _least_links(links), {name: _least_work(found) for name, found in works.items()}, best


def _least_links(found: list[LocalRanks]) -> LocalRanks:
    """Return each link and each slowdown as it was best."""

    def least(kind: str) -> tuple[tuple[int, Link], ...]:
        rows = zip(*(getattr(one.fabric, kind) for one in found), strict=True)
        return tuple(
            (row[0][0], Link(max(link.bandwidth for _, link in row), min(link.latency for _, link in row)))
            for row in rows
        )

    slow = tuple(
        (row[0][0], min(factor for _, factor in row)) for row in zip(*(f.slowdown for f in found), strict=True)
    )
    handled = [one.handling for one in found]
    handling = Handling(min(one.layer for one in handled), min(one.micro_batch for one in handled))
    return LocalRanks(Fabric(least("reduce"), least("gather")), slow, handling)


def _least_work(found: list[Work]) -> Work:
    """Return the work with each size of an update as it was fastest; its layers from the fastest round."""
    update = tuple(
        (row[0][0], min(seconds for _, seconds in row)) for row in zip(*(f.update for f in found), strict=True)
    )
    fastest = min(found, key=lambda work: work.update[-1][1])
    return replace(fastest, update=update, spread=0.0)  # of quiet moments


def run_plan(case: Case, way: Way, seconds: float) -> Ran:
    """Carry a plan out."""
    result: Any = multiprocessing.Queue()
    with tempfile.TemporaryDirectory() as directory:
        meet = f"file://{directory}/meet"
        ranks = [
            multiprocessing.Process(target=_rank, args=(case, way, rank, meet, seconds, result))
            for rank in range(way.ranks)
        ]
        for rank in ranks:
            rank.start()
        told = [result.get(timeout=TIMEOUT_S + 10 * seconds) for _ in ranks]
        for rank in ranks:
            rank.join()
    first = next(one for one in told if one["rank"] == 0)
    own = sum(one["cpu"] for one in told)
    return Ran(first["seconds"], max(0.0, (first["busy"] - own) / first["wall"]))


def _busy() -> float:
    """Return the seconds that all cores of this machine have been busy."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0))


@dataclass(frozen=True)
class Member:
    """One rank of a plan that is carried out."""

    learn: Callable[[TensorBatch], object]
    first: Callable[[float], float]
    """Returns to every rank what the first one has."""
    close: Callable[[], None]
    part: int
    """Which of the parts of the batch it learns from."""


def _whole(case: Case, way: Way, rank: int, meet: str) -> Member:
    """Return a rank that has the whole network."""
    setup = case.setup()
    group = GradientGroup(rank, way.data, meet, TIMEOUT_S) if way.data > 1 else None
    joining = Joining(setup.parallel, group, setup.seed) if group else None
    update: Any = build_learning(setup, "learner", joining).update
    if group is None:
        return Member(update.learn, lambda value: value, lambda: None, 0)
    return Member(update.learn, lambda value: group.all_gather(torch.tensor([value]))[0].item(), group.close, rank)


def _split(case: Case, way: Way, rank: int, meet: str) -> Member:
    """Return a rank that has its share of the network."""
    setup, degrees = case.setup(), Degrees(way.data, way.pipeline, way.tensor)
    mesh = Mesh(degrees, rank, way.ranks, meet, "cpu", TIMEOUT_S)
    network = build_network(setup.network, setup.agent, setup.spec, seed=0)
    update = SplitUpdate(setup.agent, network, setup.optim, torch.Generator(), mesh, Staging(micro_batches=way.micro))

    def first(value: float) -> float:
        return mesh.sum_(torch.tensor([value * (rank == 0)]), "data", "pipeline", "tensor").item()

    return Member(update.learn, first, mesh.close, mesh.place.data)


def _rank(case: Case, way: Way, rank: int, meet: str, seconds: float, result: Any) -> None:
    """Learn with one part of the batch for some seconds; rank 0 tells how long an update took."""
    torch.set_num_threads(1)
    member = (_split if way.tensor * way.pipeline > 1 else _whole)(case, way, rank, meet)
    rows = len(range(member.part, case.batch, way.data))
    batch = replace(sample(case.spec, rows, torch.device("cpu")), size=case.batch)
    for _ in range(3):
        began = time.perf_counter()
        member.learn(batch)
    calls = int(member.first(max(1.0, ROUND_S / (time.perf_counter() - began))))
    spent: list[float] = []
    over, start, busy, cpu = 0.0, time.perf_counter(), _busy(), time.process_time()
    while not over:
        began = time.perf_counter()
        for _ in range(calls):
            member.learn(batch)
        spent.append((time.perf_counter() - began) / calls)
        over = member.first(float(time.perf_counter() > start + seconds and len(spent) > 2))
    told = {"rank": rank, "seconds": quiet(spent), "wall": time.perf_counter() - start}
    result.put({**told, "cpu": time.process_time() - cpu, "busy": _busy() - busy})
    member.close()


def _row(case: Case, one: Candidate, ran: Ran, cores: float) -> dict[str, Any]:
    predicted = one.cost.seconds if one.cost else math.nan
    return {
        "network": case.name,
        "plan": str(one.way),
        "predicted_ms": 1e3 * predicted,
        "measured_ms": 1e3 * ran.seconds,
        "ratio": predicted / ran.seconds,
        "others": ran.others,
        "disturbed": ran.others > max(0.0, cores - one.way.ranks) + DISTURBED,
    }


def _show(rows: list[dict[str, Any]]) -> None:
    print("| network | plan | predicted ms | measured ms | predicted / measured | cores of others |")
    print("|---" * 6 + "|")
    for row in rows:
        figures = [f"{row[name]:.2f}" for name in ("predicted_ms", "measured_ms", "ratio", "others")]
        print(f"| {' | '.join([row['network'], row['plan'], *figures])} |")


def _chosen(case: Case, work: Work, site: Site, measured: dict[tuple[str, Way], Ran]) -> dict[str, Any]:
    """Return which of the plans that were carried out the planner takes, and how far it is from the best."""
    choice = weigh(work, site, among=WAYS)
    times = measured[case.name, choice.best.way].seconds / min(measured[case.name, way].seconds for way in WAYS)
    print(f"{case.name}: {choice.best.way} takes {times:.2f} times as long as the best measured. {choice.why}")
    return {"network": case.name, "chosen": str(choice.best.way), "times": times, "good": times <= GOOD}


if __name__ == "__main__":
    main()
