"""Saved rows: each checkpoint writes only what is new, and whatever was written when, the replay comes back whole."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_replay import History
from test_replay_conformance import GAMMA, STORAGE, build_replay, cases, saved
from test_replay_recovery import Kept, content, same

from qfleet.core.chunks import Chunk
from qfleet.core.errors import CheckpointError
from qfleet.core.spec import EnvSpec, LeafSpec
from qfleet.core.types import Experience, Version
from qfleet.replay import Lz4Config, PrioritisedConfig, RamConfig, Replay, ReplayConfig, chunks
from qfleet.replay.chunks import rows_of, runs_of
from qfleet.runtime import checkpoint, chunkfiles
from qfleet.runtime.captured import Captured
from qfleet.runtime.chunkfiles import all_but

plans = st.lists(st.tuples(st.integers(0, 12), st.sampled_from(["save", "fail", "move", "load", "die"])), max_size=12)


@given(st.sets(st.integers(0, 60)))
def test_runs_come_back_as_rows(numbers: set[int]) -> None:
    rows = np.array(sorted(numbers), np.int64)
    runs = runs_of(rows)
    assert rows_of(runs).tolist() == rows.tolist()
    assert runs.shape[1] == sum(row - 1 not in numbers for row in numbers)


@pytest.mark.parametrize("storage", list(STORAGE))
@settings(max_examples=30, deadline=None)
@given(case=cases, plan=plans, small=st.integers(1, 12), large=st.integers(1, 40))
def test_whatever_happens_between_checkpoints_a_load_gives_the_replay(
    storage: str, case: dict[str, Any], plan: list[tuple[int, str]], small: int, large: int
) -> None:
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as place:
        patch.setattr(chunks, "_SMALL_BYTES", 100 * small)
        patch.setattr(chunks, "_LARGE_BYTES", 100 * large)
        folder, kept = Path(place), Kept()

        def fresh(life: int = 0) -> Replay:
            return build_replay(case, "prioritised", storage, folder, allocate=kept.array, life=life)

        replay = fresh()
        history = History(replay.spec, case["streams"], case["seed"], case["end"])
        for count, event in [*plan, (3, "load")]:
            for _ in range(count):
                replay.append(history.message())
            expected = content(replay)
            if event == "fail":
                replay.state_dict()
            elif event == "move":
                for path in all_but((), folder / "chunks"):
                    path.unlink()
            elif event == "die":
                ledger = replay.ledger()
                replay = fresh(life=1)
                replay.recover(ledger)
            else:
                state = saved(replay, folder)
                if event == "load":
                    for path in folder.glob("*.rows"):
                        path.unlink()
                    kept.arrays.clear()
                    replay = fresh()
                    replay.load_state_dict(state)
            same(content(replay), expected)


def make_replay(capacity: int, streams: int, side: int = 8, **more: Any) -> Replay:
    config = ReplayConfig(capacity=capacity, sampler=PrioritisedConfig(), **more)
    frame = LeafSpec(shape=(side, side), dtype="uint8")
    spec = EnvSpec(name="noise", observations={"observation": frame}, actions=4)
    return Replay(config, spec, streams=streams, n_step=3, gamma=GAMMA, rng=np.random.default_rng(0))


def feed(replay: Replay, rows: int, streams: int) -> None:
    """Append so many rows of noise, dealt out among streams; no episode ends."""
    rng, rows = np.random.default_rng(rows), rows // streams * streams
    none = np.zeros(rows, np.bool_)
    shape = replay.spec.observations["observation"].frame_shape
    replay.append(
        Experience(
            "actor-0",
            replay.seen.get("actor-0", -1) + 1,
            Version(),
            offsets=np.arange(0, rows + 1, streams),
            stream=np.tile(np.arange(streams), rows // streams),
            observation={"observation": rng.integers(0, 255, (rows, *shape), np.uint8)},
            action=rng.integers(0, 4, rows),
            reward=rng.random(rows, np.float32),
            terminated=none,
            truncated=none,
            final=none,
        )
    )


def size_of(paths: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in paths)


@pytest.mark.parametrize(
    ("capacity", "streams", "side", "new", "more"),
    [
        (1_000_000, 64, 8, 10_000, {}),
        (50_000, 8, 32, 5000, {"storage": Lz4Config()}),
        (4000, 4, 84, 200, {}),
        (20_000, 8, 4, 1000, {}),
    ],
)
def test_a_checkpoint_costs_what_is_new(
    capacity: int, streams: int, side: int, new: int, more: dict[str, Any], tmp_path: Path
) -> None:
    """Counted at a full replay that evicts."""
    replay = make_replay(capacity, streams, side, **more)
    feed(replay, capacity + 2 * new, streams)
    saved(replay, tmp_path)
    row_bytes = side * side + 17 + (14 if more else 0)  # what is stored besides the frame, and what LZ4 adds to noise
    folder = tmp_path / "chunks"
    for _ in range(4):
        before = set(folder.iterdir())
        feed(replay, new, streams)
        saved(replay, tmp_path)
        written = size_of(set(folder.iterdir()) - before)
        assert new * side * side < written <= 1.2 * new * row_bytes
    leaves = size_of([tmp_path / "checkpoint" / "replay.safetensors"])
    assert leaves < 9 * capacity, "beside the chunks there is little but the leaves"


def test_a_chunk_that_nothing_lives_in_any_more_is_named_no_more(tmp_path: Path) -> None:
    replay, counts = make_replay(2000, 2), []
    for _ in range(60):
        feed(replay, 220, 2)
        counts.append(len(saved(replay, tmp_path)["store"]["chunks"]))
    assert counts[:8] == list(range(2, 10)), "one more has the rows whose windows are open"
    assert max(counts) <= 13


def test_frequent_checkpoints_make_few_chunks(tmp_path: Path) -> None:
    replay = make_replay(6000, 2)
    for _ in range(100):
        feed(replay, 60, 2)
        state = saved(replay, tmp_path)
    smallest = chunks._SMALL_BYTES // (64 + 17)
    assert len(state["store"]["chunks"]) <= 6000 // smallest + 2


def test_a_damaged_chunk_is_named(tmp_path: Path) -> None:
    replay = make_replay(2000, 2)
    feed(replay, 100, 2)
    state = saved(replay, tmp_path)
    path, _ = (tmp_path / "chunks").glob("*.safetensors")
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(CheckpointError, match=path.name):
        make_replay(2000, 2).load_state_dict(state)


@pytest.mark.parametrize("storage", list(STORAGE))
@settings(max_examples=10, deadline=None)
@given(case=cases, counts=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 30)), min_size=1, max_size=5))
def test_a_state_is_written_as_it_was_taken_whatever_is_appended_meanwhile(
    storage: str, case: dict[str, Any], counts: list[tuple[int, int]]
) -> None:
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as place:
        patch.setattr(chunks, "_SMALL_BYTES", 500)
        patch.setattr(chunks, "_LARGE_BYTES", 2000)
        directory = Path(place) / "checkpoint"
        directory.mkdir()
        replay, loaded = (build_replay(case, "prioritised", storage, Path(place)) for _ in range(2))
        history = History(replay.spec, case["streams"], case["seed"], case["end"])
        for before, after in counts:
            for _ in range(before):
                replay.append(history.message())
            expected, captured = content(replay), Captured(directory, "replay", replay.state_dict())
            for _ in range(after):
                replay.append(history.message())
            captured.write()
            loaded.load_state_dict(checkpoint.read_state(directory, "replay"))
            same(content(loaded), expected)


@pytest.mark.parametrize("storage", [RamConfig(), Lz4Config()])
def test_a_full_replay_that_evicts_is_written_by_another_thread_as_it_was(storage: Any, tmp_path: Path) -> None:
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    replay, loaded = (make_replay(4000, 4, 32, storage=storage) for _ in range(2))
    feed(replay, 5000, 4)
    for _ in range(3):
        expected, captured = content(replay), Captured(directory, "replay", replay.state_dict())
        with ThreadPoolExecutor(1) as pool:
            written = pool.submit(captured.write)
            while not written.done():
                feed(replay, 40, 4)
            written.result()
        feed(replay, 4000, 4)
        loaded.load_state_dict(checkpoint.read_state(directory, "replay"))
        same(content(loaded), expected)


def test_what_a_failed_checkpoint_had_left_is_copied_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replay = make_replay(2000, 2)
    feed(replay, 2000, 2)
    captured = Captured(tmp_path, "replay", replay.state_dict())
    feed(replay, 200, 2)
    assert any(len(copy["rows"][1]) for copy in replay.store.chunks._copies.values())
    monkeypatch.setattr(chunkfiles, "write", _full)
    with pytest.raises(OSError, match="No space"):
        captured.write()
    feed(replay, 600, 2)
    assert replay.store.chunks._copies == {}


def _full(*_: Any) -> str:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("storage", list(STORAGE))
@settings(max_examples=15, deadline=None)
@given(case=cases)
def test_rows_of_the_first_format_are_still_read(storage: str, case: dict[str, Any]) -> None:
    """They were arrays of all used rows; compressed ones were blocks and their lengths, by segment."""
    with tempfile.TemporaryDirectory() as folder:
        replay, loaded = (build_replay(case, "uniform", storage, Path(folder)) for _ in range(2))
        history = History(replay.spec, case["streams"], case["seed"], case["end"])
        for _ in range(case["messages"]):
            replay.append(history.message())
        state, used = replay.state_dict(), replay.chains.used_rows
        store: dict[str, Any] = {"layout": state["store"]["layout"], "columns": {}, "observations": {}}
        for kind, columns in (("columns", replay.store.columns), ("observations", replay.store.observations)):
            for name, column in columns.items():
                whole = hasattr(column, "array")
                store[kind][name] = column.array[:used].copy() if whole else first_format(column, replay)
        expected = content(replay)
        loaded.load_state_dict({**state, "store": store})
        same(content(loaded), expected)


def first_format(column: Any, replay: Replay) -> dict[str, list[Any]]:
    lengths, arenas = [], []
    for segment, filled in enumerate(column.filled[: replay.chains.used_rows // replay.chains.rows]):
        part = column.snapshot(np.arange(filled) + segment * replay.chains.rows)
        lengths.append(part["lengths"])
        arenas.append(part["blocks"])
    return {"lengths": lengths, "arenas": arenas}


def test_a_state_that_is_not_saved_holds_its_content(tmp_path: Path) -> None:
    replay, other = make_replay(2000, 2), make_replay(2000, 2)
    feed(replay, 300, 2)
    state = replay.state_dict()
    assert all(isinstance(chunk, Chunk) and chunk.name is None for chunk in state["store"]["chunks"])
    other.load_state_dict(state)
    same(content(other), content(replay))
