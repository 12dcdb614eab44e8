"""Batches go up and results come back in order and whole, however the device's two queues run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from fake_link import COMPUTING, COPYING, FakeLink
from hypothesis import given, settings
from hypothesis import strategies as st

from qfleet.accel.graphs import Recording
from qfleet.accel.returning import Returning
from qfleet.accel.staging import SLOTS, Staging
from qfleet.accel.transfers import CudaLink
from qfleet.algo.batch import to_tensors
from qfleet.core.tensors import TensorBatch
from qfleet.core.types import Batch

CPU = torch.device("cpu")


def as_it_is(work: Callable[[], object]) -> Callable[[], object]:
    """No recording."""
    return work


def numbered_batch(number: int, size: int = 3, masked: bool = False) -> Batch:
    """A batch each of whose values tells its number."""
    mask = np.full((size, 2), number % 2 == 0) if masked else None
    return Batch(
        observation={"image": np.full((size, 2, 2), number, np.uint8), "place": np.full(size, number, np.float32)},
        action=np.full(size, number),
        reward=np.full(size, number + 0.5, np.float32),
        discount=np.full(size, 0.9, np.float32),
        next_observation={"image": np.full((size, 2, 2), number + 1, np.uint8), "place": np.zeros(size, np.float32)},
        weight=np.linspace(0, 1, size, dtype=np.float32),
        index=np.arange(size),
        generation=np.zeros(size, np.int64),
        mask=mask,
        next_mask=mask,
        global_size=2 * size,
    )


def parts(batch: TensorBatch) -> dict[str, torch.Tensor]:
    """The batch's tensors as they are now."""
    whole = {**{f"next {name}": leaf for name, leaf in batch.next_observation.items()}, **batch.observation}
    others = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    whole |= {name: part for name, part in others.items() if isinstance(part, torch.Tensor)}
    return {name: part.clone() for name, part in whole.items()}


def spoil(batch: Batch) -> None:
    """What the sender does with a message's memory when it was acknowledged."""
    for array in (*batch.observation.values(), *batch.next_observation.values(), batch.action, batch.reward):
        array.fill(99)


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        part.dtype == other[name].dtype and torch.equal(part, other[name]) for name, part in one.items()
    )


MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("stage"), st.sampled_from([3, 5]), st.booleans()),
        st.tuples(st.just("use"), st.none(), st.none()),
        st.tuples(st.just("run"), st.sampled_from([COMPUTING, COPYING]), st.integers(1, 12)),
    ),
    max_size=60,
)


@given(moves=MOVES, slots=st.sampled_from([2, SLOTS]))
@settings(max_examples=300)
def test_every_batch_is_read_whole_and_in_order(moves, slots):
    link, seen, expected = FakeLink(), [], []

    def read_twice(batch: TensorBatch) -> None:
        for _ in range(2):  # as an update does, whenever the device comes to it
            link.do(lambda: seen.append(parts(batch)))

    staging, used = Staging(link, read_twice, as_it_is, slots), 0
    for what, first, second in moves:
        if what == "stage" and staging.room:
            batch = numbered_batch(len(expected), first, second)
            expected.append(parts(to_tensors(batch, CPU)))
            staging.stage(batch)
            spoil(batch)
        elif what == "use" and len(staging):
            staging.use()
            used += 1
        elif what == "run":
            link.run(first, second)
        assert len(staging) == len(expected) - used <= slots
    link.run_all()
    order = [next(n for n, batch in enumerate(expected) if equal(batch, found)) for found in seen]
    assert order == sorted(2 * list(range(used)))


def test_memory_is_made_once_for_each_slot_and_again_when_a_shape_changes():
    link = FakeLink()
    staging, made = Staging(link, parts, as_it_is), []
    for size in [3] * 6 + [4] * 3:
        staging.stage(numbered_batch(0, size))
        staging.use()
        made.append(link.made)
    assert made[:SLOTS] == [2, 4, 6], "on both sides of the link"
    assert set(made[SLOTS:6]) == {6}
    assert made[6:] == [8, 10, 12]


def test_a_type_that_changes_is_not_cast():
    staging = Staging(FakeLink(), lambda batch: batch, as_it_is, slots=2)
    for dtype in (np.uint8, np.uint8, np.float32, np.float32):
        batch = numbered_batch(1)
        image = batch.observation["image"].astype(dtype)
        staging.stage(dataclasses.replace(batch, observation={"image": image}))
        found = staging.use()
        assert found.observation["image"].numpy().dtype == dtype
        assert found.size == 6


def test_work_is_recorded_once_for_each_slot_and_again_when_the_batch_takes_another_form():
    recorded = []

    def record(work):
        recorded.append(work)
        return work

    def staged(batch: Batch) -> int:
        staging.stage(batch)
        staging.use()
        return len(recorded)

    staging = Staging(FakeLink(), parts, record, slots=2)
    batch = numbered_batch(0)
    assert [staged(batch) for _ in range(4)] == [1, 2, 2, 2]
    assert [staged(numbered_batch(1, masked=True)) for _ in range(4)] == [3, 4, 4, 4]
    assert [staged(batch) for _ in range(4)] == [5, 6, 6, 6]
    assert [staged(dataclasses.replace(batch, global_size=30)) for _ in range(4)] == [7, 8, 8, 8]
    assert [staged(numbered_batch(2, size=4)) for _ in range(4)] == [9, 10, 10, 10]


def test_a_full_ring_takes_no_more():
    staging = Staging(FakeLink(), parts, as_it_is)
    for number in range(SLOTS):
        assert staging.room
        staging.stage(numbered_batch(number))
    assert not staging.room
    with pytest.raises(IndexError):
        staging.stage(numbered_batch(9))


@given(moves=st.lists(st.one_of(st.just("send"), st.just("ask"), st.integers(1, 6)), max_size=50))
@settings(max_examples=200)
def test_results_arrive_whole_and_in_order_though_the_device_goes_on(moves):
    link, sent, found = FakeLink(), 0, []
    returning: Returning[int] = Returning(link)
    priority, made = torch.zeros(4), torch.zeros((), dtype=torch.bool)

    def compute(number: int) -> None:
        priority.fill_(number)
        made.fill_(number % 2 == 0)

    for move in moves:
        if move == "send":
            link.do(lambda number=sent: compute(number))
            returning.send(sent, (priority, made))
            sent += 1
        elif move == "ask":
            found += returning.arrived()
        else:
            link.run(COMPUTING, move)
        assert len(returning) == sent - len(found)
    found += returning.arrived(math.inf)
    assert [label for label, _ in found] == list(range(sent))
    for label, (priorities, flag) in found:
        assert priorities.tolist() == [label] * 4
        assert flag == (label % 2 == 0)
    assert len(returning) == 0


def test_what_has_not_arrived_is_not_waited_for_unless_asked():
    link = FakeLink()
    returning: Returning[str] = Returning(link)
    returning.send("first", (torch.ones(2),))
    assert returning.arrived() == []
    assert [label for label, _ in returning.arrived(math.inf)] == ["first"]


def test_memory_for_results_is_used_again():
    link = FakeLink()
    returning: Returning[int] = Returning(link)
    for size in (2, 2, 2, 3, 3):
        returning.send(size, (torch.ones(size),))
        returning.arrived(math.inf)
    assert link.made == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("recorded", [False, True])
def test_on_a_gpu_every_batch_is_read_whole_however_long_the_device_takes(recorded):
    device = torch.device("cuda")
    link = CudaLink(device)

    def read(batch: TensorBatch) -> torch.Tensor:
        torch.cuda._sleep(1_000_000)
        image, place = batch.observation["image"].double(), batch.observation["place"].double()
        return torch.stack([image.min(), image.max(), place.min(), place.max(), batch.reward.double().mean()])

    staging, found = Staging(link, read, partial(Recording, generators=(), enabled=recorded)), []
    returning: Returning[int] = Returning(link)
    for number in range(40):
        batch = numbered_batch(number, 20_000 + 7 * (number // 20))
        staging.stage(batch)
        spoil(batch)
        if number % 2:
            torch.cuda._sleep(5_000_000)
        returning.send(number, (staging.use(),))
        found += returning.arrived()
    found += returning.arrived(math.inf)
    assert [label for label, _ in found] == list(range(40))
    for label, (values,) in found:
        assert values.tolist() == [label] * 4 + [label + 0.5]
