"""Split updates on real process groups equal unsplit ones, for each network, mesh and schedule."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from split_cases import batch_of, load_state, save_state, state_distances, unsplit
from split_role import Job
from split_runs import Results, check, compare

from qfleet.parallel.mesh import Degrees
from qfleet.parallel.split_update import Staging

DATA, PIPELINE, TENSOR = Degrees(data=2), Degrees(pipeline=2), Degrees(tensor=2)
BOTH, REPLICAS = Degrees(pipeline=2, tensor=2), Degrees(data=2, tensor=2)
STAGED_REPLICAS = Degrees(data=2, pipeline=2)
GPIPE, ONE_EACH, AT_ONCE = Staging(4, "gpipe"), Staging(4, "1f1b"), Staging(1, "gpipe")
NETWORKS = ("nature", "impala", "mlp", "own")


def staging_of(degrees: Degrees) -> Staging | None:
    return Staging(2, "1f1b") if degrees.pipeline > 1 else None


TWO_RANKS = (
    *(Job(TENSOR, what, case) for what in ("double", "updates") for case in (*NETWORKS, "soft", "norm")),
    *(Job(TENSOR, "updates", case) for case in ("categorical", "implicit", "noisy", "statistics")),
    Job(TENSOR, "skip", "mlp"),
    *(Job(PIPELINE, "double", case, ONE_EACH) for case in NETWORKS),
    *(Job(PIPELINE, "double", case, GPIPE) for case in ("mlp", "own")),
    *(Job(PIPELINE, "updates", case, ONE_EACH) for case in (*NETWORKS, "categorical", "munchausen", "noisy")),
    *(Job(PIPELINE, "updates", case, how) for case, how in (("quantile", GPIPE), ("implicit", AT_ONCE))),
    Job(PIPELINE, "updates", "statistics", GPIPE),
    Job(PIPELINE, "skip", "mlp", GPIPE),
    *(Job(DATA, "updates", case) for case in ("mlp", "own")),
    Job(TENSOR, "chain", "mlp"),
    Job(PIPELINE, "chain", "mlp", ONE_EACH),
    Job(TENSOR, "desert", "mlp"),
)
FOUR_RANKS = (
    *(Job(BOTH, "double", case, ONE_EACH) for case in ("mlp", "own")),
    *(Job(BOTH, "updates", case, ONE_EACH) for case in ("mlp", "own")),
    Job(BOTH, "skip", "mlp", ONE_EACH),
    Job(BOTH, "chain", "mlp", ONE_EACH),
    *(Job(REPLICAS, "updates", case) for case in ("mlp", "own")),
    Job(REPLICAS, "skip", "mlp"),
    Job(STAGED_REPLICAS, "updates", "mlp", Staging(2, "1f1b")),
)
LONG_STAGES = tuple(Job(PIPELINE, "double", case, GPIPE) for case in NETWORKS)
LONG = tuple(
    Job(degrees, what, case, staging_of(degrees))
    for degrees in (BOTH, REPLICAS, STAGED_REPLICAS)
    for what in ("double", "updates", "skip")
    for case in (*NETWORKS, "soft", "norm", "noisy")
    if (degrees, what) != (STAGED_REPLICAS, "double")
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def two_ranks(folder: Path) -> Results:
    update = unsplit("mlp")
    for seed in range(2):
        update(batch_of("mlp", seed))
    save_state(folder, update.state_dict(), 2)
    return compare(2, TWO_RANKS, folder)


@pytest.fixture(scope="module")
def four_ranks(two_ranks: Results, folder: Path) -> Results:
    return compare(4, FOUR_RANKS, folder)


@pytest.mark.xdist_group("split")
@pytest.mark.parametrize("job", TWO_RANKS, ids=str)
def test_two_ranks_equal_one(job: Job, two_ranks: Results) -> None:
    check(job, two_ranks)


@pytest.mark.xdist_group("split")
@pytest.mark.parametrize("job", FOUR_RANKS, ids=str)
def test_four_ranks_equal_one(job: Job, four_ranks: Results) -> None:
    check(job, four_ranks)


@pytest.mark.xdist_group("split")
def test_checkpoint_of_other_plans_is_continued_by_one_rank(four_ranks: Results, folder: Path) -> None:
    state, count = load_state(folder)
    assert count == 8, "one rank, tensor 2, pipeline 2 and 2 x 2 made two updates each"
    update, expected = unsplit("mlp"), unsplit("mlp")
    update.load_state_dict(state)
    for seed in range(count + 2):
        expected(batch_of("mlp", seed))
    for seed in (count, count + 1):
        update(batch_of("mlp", seed))
    assert max(state_distances(update.state_dict(), expected.state_dict()).values()) < 1e-5
    assert torch.is_tensor(state["step"]["optim"]["moments"]["exp_avg"])


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "jobs"), [(2, LONG_STAGES), (4, LONG)], ids=["two", "four"])
def test_every_network_on_every_mesh(ranks: int, jobs: tuple[Job, ...], tmp_path: Path) -> None:
    results = compare(ranks, jobs, tmp_path)
    for job in jobs:
        check(job, results)
