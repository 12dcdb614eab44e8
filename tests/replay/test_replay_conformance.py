"""Every tier and sampler against the naive model, over random histories in which eviction never stops."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_replay import History, NaiveReplay, again, make_spec

from qfleet.core.spec import EnvSpec, LeafSpec
from qfleet.core.types import Priorities
from qfleet.replay import (
    Lz4Config,
    MappedConfig,
    PrioritisedConfig,
    RamConfig,
    Replay,
    ReplayConfig,
    SequenceWindow,
    UniformConfig,
)  # fmt: skip
from qfleet.replay.samplers import PrioritisedSampler
from qfleet.runtime import checkpoint

GAMMA = 0.9
STORAGE = {"ram": RamConfig(), "mapped": MappedConfig(), "lz4": Lz4Config(smallest=1)}
SAMPLER = {"uniform": UniformConfig(), "prioritised": PrioritisedConfig()}
VARIANTS = [("uniform", False), ("prioritised", False), ("prioritised", True)]

cases = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**32 - 1),
        "messages": st.integers(1, 60),
        "streams": st.integers(1, 4),
        "stack": st.integers(1, 4),
        "padding": st.sampled_from(["zero", "repeat"]),
        "n_step": st.integers(1, 5),
        "masked": st.booleans(),
        "segment": st.integers(3, 6),
        "spare": st.integers(1, 5),
        "end": st.sampled_from([0.05, 0.25, 0.9]),
        "save": st.integers(1, 9),
        "window": st.none() | st.tuples(st.integers(1, 7), st.integers(0, 6), st.integers(1, 4)),
    }
)


def build(case: dict[str, Any], sampler: str, storage: str, directory: Path) -> tuple[Replay, NaiveReplay, History]:
    replay = build_replay(case, sampler, storage, directory)
    segments = case["streams"] + case["spare"]
    naive = NaiveReplay(replay.spec, segments, case["segment"], case["n_step"], GAMMA, replay.sequence)
    return replay, naive, History(replay.spec, case["streams"], case["seed"], case["end"])


def build_replay(case: dict[str, Any], sampler: str, storage: str, directory: Path, **more: Any) -> Replay:
    spec = make_spec(case["stack"], case["padding"], case["masked"])
    segments = case["streams"] + case["spare"]
    config = ReplayConfig(
        capacity=segments * case["segment"], segment=case["segment"], sampler=SAMPLER[sampler], storage=STORAGE[storage]
    )
    window = None
    if case["window"]:
        length, burn_in, period = case["window"]
        window = SequenceWindow(length=length, burn_in=min(burn_in, length - 1), period=period)
    return make(config, spec, case, window, directory, **more)


def make(
    config: ReplayConfig, spec: EnvSpec, case: dict[str, Any], window: SequenceWindow | None, directory: Path,
    **more: Any,
) -> Replay:  # fmt: skip
    return Replay(
        config, spec, streams=case["streams"], n_step=case["n_step"], gamma=GAMMA, rng=np.random.default_rng(7),
        sequence=window, extras={"hidden": LeafSpec(shape=(2,), dtype="float32")}, directory=directory, **more,
    )  # fmt: skip


def assert_same_items(replay: Replay, naive: NaiveReplay) -> None:
    expected = naive.items()
    rows = replay.sampler.items()
    assert rows.tolist() == sorted(expected)
    assert len(replay) == len(expected)
    if not expected:
        return
    wanted = [expected[row] for row in rows.tolist()]
    ones = np.ones(len(rows), np.float32)
    batch: Any = replay.sequences(rows, ones) if naive.window else replay.transitions(rows, ones)
    for name in ("observation", "next_observation"):
        for leaf in batch.observation if hasattr(batch, name) else ():
            np.testing.assert_array_equal(getattr(batch, name)[leaf], np.stack([w[name][leaf] for w in wanted]))
    np.testing.assert_array_equal(batch.action, [w["action"] for w in wanted])
    np.testing.assert_allclose(batch.reward, [w["reward"] for w in wanted], rtol=1e-6, atol=1e-7)
    for name in ("discount", "terminated", "valid"):
        if hasattr(batch, name):
            np.testing.assert_array_equal(getattr(batch, name), np.array([w[name] for w in wanted], np.float32))
    for name in ("mask", "next_mask"):
        if naive.spec.masked and hasattr(batch, name):
            np.testing.assert_array_equal(getattr(batch, name), np.stack([w[name] for w in wanted]))
    if naive.window:
        np.testing.assert_array_equal(batch.extras["hidden"], np.stack([w["hidden"] for w in wanted]))


def assert_tree_matches_leaves(replay: Replay) -> None:
    if isinstance(replay.sampler, PrioritisedSampler):
        tree = replay.sampler.tree
        for level in range(1, len(tree.levels)):
            children = tree.levels[level - 1].reshape(-1, tree.arity)
            np.testing.assert_array_equal(tree.levels[level], children.sum(axis=1))
        positive = tree.leaves[tree.leaves > 0]
        assert tree.minimum == (positive.min() if len(positive) else np.inf)
        assert replay.sampler.count == len(positive)


def saved(replay: Replay, folder: Path) -> Any:
    """Return the state of a replay as its files have it; those of a former time may be used again."""
    directory = folder / "checkpoint"
    directory.mkdir(exist_ok=True)
    checkpoint.write_state(directory, "replay", replay.state_dict())
    return checkpoint.read_state(directory, "replay")


def sample(replay: Replay, size: int) -> Any:
    return replay.sample_sequences(size, 0.5) if replay.sequence else replay.sample(size, 0.5)


def learn(replay: Replay, rng: np.random.Generator, held: list[Any]) -> list[Any]:
    """Sample, and write back priorities of this or an older batch; return what was seen."""
    if not len(replay):
        return []
    batch = sample(replay, 5)
    held.append(batch)
    late = held[int(rng.integers(len(held)))]
    written = replay.update_priorities(Priorities(late.index, late.generation, rng.random(5).astype(np.float32) * 3))
    return [batch.index, batch.weight, batch.generation, batch.reward, *batch.observation.values(), np.array(written)]


@pytest.mark.parametrize("storage", list(STORAGE))
@pytest.mark.parametrize(("sampler", "numba"), VARIANTS)
@settings(max_examples=25, deadline=None)
@given(case=cases)
def test_same_items_as_the_naive_model(sampler: str, numba: bool, storage: str, case: dict[str, Any]) -> None:
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setenv("QFLEET_NO_NUMBA", "0" if numba else "1")
        replay, naive, history = build(case, sampler, storage, Path(folder))
        rng, held = np.random.default_rng(case["seed"]), []
        for _ in range(case["messages"]):
            message = history.message()
            assert replay.append(message) == naive.append(message)
            if rng.random() < 0.1:
                assert replay.append(again(message)) == 0
            if rng.random() < 0.3:
                learn(replay, rng, held)
            if rng.random() < 0.2:
                assert_same_items(replay, naive)
        assert_same_items(replay, naive)
        assert_tree_matches_leaves(replay)
        if len(replay):
            assert np.isin(sample(replay, 64).index, replay.sampler.items()).all()


@pytest.mark.parametrize("storage", list(STORAGE))
@pytest.mark.parametrize(("sampler", "numba"), VARIANTS)
@settings(max_examples=10, deadline=None)
@given(case=cases)
def test_a_saved_and_loaded_replay_continues_to_the_bit(
    sampler: str, numba: bool, storage: str, case: dict[str, Any]
) -> None:
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setenv("QFLEET_NO_NUMBA", "0" if numba else "1")
        first, _, history = build(case, sampler, storage, Path(folder))
        rng, held = np.random.default_rng(1), []
        for number in range(case["messages"]):
            first.append(history.message())
            learn(first, rng, held)
            if number % case["save"] == 0:
                saved(first, Path(folder))
        second = make(first.config, first.spec, case, first.sequence, Path(folder))
        second.rng.random(3)
        second.load_state_dict(saved(first, Path(folder)))
        messages = [history.message() for _ in range(20)]
        results = []
        for replay in (first, second):
            rng, late, seen = np.random.default_rng(2), list(held), []
            for message in messages:
                replay.append(message)
                seen += learn(replay, rng, late)
            results.append((seen, replay.metrics()))
        assert results[0][1] == results[1][1]
        for a, b in zip(results[0][0], results[1][0], strict=True):
            np.testing.assert_array_equal(a, b)


@settings(max_examples=20, deadline=None)
@given(case=cases)
def test_compiled_and_numpy_trees_draw_the_same_batches(case: dict[str, Any]) -> None:
    seen = []
    for numba in "01":
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("QFLEET_NO_NUMBA", numba)
            replay, _, history = build(case, "prioritised", "ram", Path())
            rng, held, values = np.random.default_rng(1), [], []
            for _ in range(case["messages"]):
                replay.append(history.message())
                values += learn(replay, rng, held)
            seen.append(values)
    for a, b in zip(*seen, strict=True):
        np.testing.assert_array_equal(a, b)
