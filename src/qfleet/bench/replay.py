"""The replay alone: prioritised cycles beside cpprb, how their cost grows, and what Atari frames take."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from qfleet.bench.peers import peer_python
from qfleet.bench.table import Row
from qfleet.core.errors import QfleetError
from qfleet.core.spec import PLAIN, EnvSpec, LeafSpec
from qfleet.core.types import Experience, Version
from qfleet.replay import PrioritisedConfig, Replay, ReplayConfig

SCRIPT = Path("benchmarks/replay_micro.py")
_RATIOS = {"numba": 3.0, "numpy": 0.8}
_GROWTH, _PLAIN_GB, _LZ4_GB, _DECODED = 2.0, 7.5, 0.5, 80_000


def measure(peers: Path | None) -> list[Row]:
    """Run the micro-benchmark of the repository and put its figures beside their goals."""
    python = peer_python(peers)
    if not SCRIPT.is_file():
        raise QfleetError(f"{SCRIPT} is not here: run `qfleet bench replay` in qfleet's repository")
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "replay.json"
        command = [sys.executable, str(SCRIPT), "--json", str(output)]
        subprocess.run(command + (["--peer", str(python)] if python else []), check=True, stdout=sys.stderr)
        found = json.loads(output.read_text())
    return [*_cycles(found["cycle"]), *_growth(found["growth"]), *_memory(found["lz4"])]


def _cycles(found: dict[str, Any]) -> list[Row]:
    rows = []
    for name, goal in _RATIOS.items():
        for batch in ("32", "512"):
            ours, theirs = found[name][batch], found.get("cpprb", {}).get(batch)
            ratio = ours / theirs if theirs else None
            rows.append(
                Row(
                    what=f"prioritised sample + exact weights + write-back, 1M items, batch {batch}, {name}",
                    ours=f"{ours:,.0f} batches/s",
                    peer=f"{theirs:,.0f} batches/s (cpprb)" if theirs else "",
                    ratio=ratio,
                    goal=f"ratio {goal:g}",
                    met=None if ratio is None else ratio >= goal,
                )
            )
    return rows


def _growth(found: dict[str, Any]) -> list[Row]:
    rows = []
    for name, sizes in found.items():
        for batch in ("32", "512"):
            factor = sizes["100000"][batch] / sizes["10000000"][batch]
            what = f"cost of that cycle at 10M items over 100k, batch {batch}, {name}"
            rows.append(Row(what, f"{factor:.2f} times", goal=f"at most {_GROWTH:g}", met=factor <= _GROWTH))
    return rows


def _memory(lz4: dict[str, float] | None) -> list[Row]:
    plain = _plain_gb()
    what = "1M Atari frames in memory, plain, prioritised (from the growth of the process by 40k)"
    rows = [Row(what, f"{plain:.2f} GB", goal=f"at most {_PLAIN_GB} GB", met=plain <= _PLAIN_GB)]
    if lz4 is not None:
        size, speed = lz4["gb_per_million"], lz4["decoded_per_s"]
        rows += [
            Row("1M Pong frames, LZ4 tier", f"{size:.2f} GB", goal=f"at most {_LZ4_GB} GB", met=size <= _LZ4_GB),
            Row(
                what="Pong frames decoded, one core",
                ours=f"{speed:,.0f} frames/s",
                goal=f"at least {_DECODED:,}",
                met=speed >= _DECODED,
            ),
        ]
    return rows


def _plain_gb(count: int = 40_960) -> float:
    """Return how much a process grows by a million frames, measured with `count` of them."""
    _filled(1024)  # what is loaded once, such as compiled code, does not count
    process = psutil.Process()
    before = process.memory_info().rss
    replay = _filled(count)
    grown = process.memory_info().rss - before
    return grown / replay.config.capacity * 10**6 / 1e9


def _filled(count: int, streams: int = 8, ticks: int = 64) -> Replay:
    """Return a replay full of random Atari frames."""
    leaf = LeafSpec(shape=(4, 84, 84), dtype="uint8", stack=4)
    spec = EnvSpec(name="atari", observations={PLAIN: leaf}, actions=18)
    rng, rows = np.random.default_rng(0), streams * ticks
    config = ReplayConfig(capacity=count, sampler=PrioritisedConfig())
    replay = Replay(config, spec, streams=streams, n_step=3, gamma=0.99, rng=rng)
    no = np.zeros(rows, np.bool_)
    for sequence in range(count // rows):
        replay.append(
            Experience(
                source="bench",
                sequence=sequence,
                version=Version(),
                offsets=np.arange(0, rows + 1, streams),
                stream=np.tile(np.arange(streams), ticks),
                observation={PLAIN: rng.integers(256, size=(rows, 84, 84), dtype=np.uint8)},
                action=np.zeros(rows, np.int64),
                reward=np.ones(rows, np.float32),
                terminated=no,
                truncated=no,
                final=no,
            )
        )
    return replay
