"""Updates of which each replica keeps its part only, on real process groups, equal those of one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from split_cases import CASES, batch_of, load_state, network_of, save_state, split, state_distances, unsplit
from split_role import Job
from split_runs import Results, check, compare
from torch import nn

from qfleet.core.errors import ConfigError
from qfleet.parallel.mesh import Degrees
from qfleet.parallel.splitting import check_split
from qfleet.parallel.whole import part_of

TWO, THREE, BOTH = Degrees(data=2), Degrees(data=3), Degrees(data=2, tensor=2)
NETWORKS = ("nature", "impala", "mlp", "own")
OTHERS = ("categorical", "quantile", "munchausen", "noisy", "views", "anonymous", "linear")


def job(degrees: Degrees, what: str, case: str) -> Job:
    return Job(degrees, what, case, sharded=True)


TWO_RANKS = (
    *(job(TWO, what, case) for what in ("double", "updates") for case in (*NETWORKS, "soft", "norm")),
    *(job(TWO, "updates", case) for case in OTHERS),
    job(TWO, "skip", "mlp"),
    job(TWO, "memory", "nature"),
    job(TWO, "chain", "mlp"),
)
THREE_RANKS = (
    *(job(THREE, what, case) for what in ("double", "updates") for case in ("nature", "mlp", "own")),
    job(THREE, "skip", "mlp"),
    job(THREE, "memory", "nature"),
    job(THREE, "chain", "mlp"),
)
FOUR_RANKS = (
    *(job(BOTH, what, case) for what in ("double", "updates") for case in ("mlp", "own", "norm")),
    job(BOTH, "skip", "mlp"),
    job(BOTH, "chain", "mlp"),
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
def three_ranks(two_ranks: Results, folder: Path) -> Results:
    return compare(3, THREE_RANKS, folder)


@pytest.fixture(scope="module")
def four_ranks(three_ranks: Results, folder: Path) -> Results:
    return compare(4, FOUR_RANKS, folder)


@pytest.mark.xdist_group("sharded")
@pytest.mark.parametrize("job", TWO_RANKS, ids=str)
def test_two_ranks_equal_one(job: Job, two_ranks: Results) -> None:
    check(job, two_ranks)


@pytest.mark.slow
@pytest.mark.xdist_group("sharded")
@pytest.mark.parametrize("job", THREE_RANKS, ids=str)
def test_three_ranks_whose_rows_are_not_even_equal_one(job: Job, three_ranks: Results) -> None:
    check(job, three_ranks)


@pytest.mark.slow
@pytest.mark.xdist_group("sharded")
@pytest.mark.parametrize("job", FOUR_RANKS, ids=str)
def test_shards_of_tensor_parts_equal_one_rank(job: Job, four_ranks: Results) -> None:
    check(job, four_ranks)


@pytest.mark.slow
@pytest.mark.xdist_group("sharded")
def test_checkpoint_of_sharded_groups_is_continued_by_one_rank(four_ranks: Results, folder: Path) -> None:
    state, count = load_state(folder)
    assert count == 8, "one rank, two, three and 2 x 2 made two updates each"
    update, expected = unsplit("mlp"), unsplit("mlp")
    update.load_state_dict(state)
    for seed in range(count + 2):
        expected(batch_of("mlp", seed))
    for seed in (count, count + 1):
        update(batch_of("mlp", seed))
    assert max(state_distances(update.state_dict(), expected.state_dict()).values()) < 1e-5


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=3),
    st.integers(1, 5),
    st.integers(1, 3),
    st.sampled_from([None, 0, 1, 2]),
)
def test_parts_of_all_ranks_are_each_entry_once(shape: list[int], data: int, tensor: int, dim: int | None) -> None:
    dim = None if dim is None or dim >= len(shape) else dim
    if dim is not None:
        shape[dim] *= tensor
    degrees, seen = Degrees(data, 1, tensor), torch.zeros(shape)
    for rank in range(degrees.size):
        place = degrees.place(rank)
        part = part_of(tuple(shape), dim, degrees, place)
        if dim is not None or place.tensor == 0:
            seen[part] += 1
        assert part[0].stop - part[0].start <= -(-shape[0] // data)
    assert bool((seen == 1).all())


class Scalar(nn.Module):
    """A user's network with a parameter that has no rows."""

    def __init__(self, spec: Any) -> None:
        super().__init__()
        self.scale, self.layer = nn.Parameter(torch.tensor(1.0)), nn.Linear(4, 8)

    def forward(self, vector: torch.Tensor) -> torch.Tensor:
        return self.scale * self.layer(vector)  # type: ignore[no-any-return]


def test_what_has_no_rows_is_refused_by_name() -> None:
    network = network_of("mlp")
    network.torso.body = Scalar(None)
    with pytest.raises(ConfigError, match=r"parameter 'torso.body.scale' has none: make it a contiguous vector"):
        check_split(network, TWO, sharded=True)


def test_statistics_of_inputs_are_refused(tmp_path: Path) -> None:
    assert CASES["statistics"]
    with pytest.raises(ConfigError, match="learns its statistics from one replica"):
        split("statistics", FakeMesh(), sharded=True)  # type: ignore[arg-type]


class FakeMesh:
    degrees, place = TWO, Degrees(0, 0, 0)
