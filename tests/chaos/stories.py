"""How the run of a case goes to its end: in one go, or resumed after a file was damaged or a machine was lost."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from apart import wait_until
from cases import DAMAGE, NAN, PARTED, Case
from history import rows
from numbered_env import Place, Step, journals
from spoiled_network import Spoiled
from test_kills import stored

import qfleet.api as api
from qfleet.core import history
from qfleet.core.errors import RoleFailure
from qfleet.experiment import Experiment
from qfleet.observe.sinks import Silent
from qfleet.runtime import checkpoint

Lives = list[list[Step]]
ENDS_AT = 0.6
"""The part of its steps after which a run ends that is then damaged."""


class Ending(Silent):
    """Notes when a run has ended, by a clock that does not jump."""

    at = math.inf

    def event(self, record: Any) -> None:
        if record["event"] == "finished":
            self.at = time.monotonic()


def live_through(
    what: Case, run: Experiment, folder: Path, rng: np.random.Generator, ending: Ending
) -> tuple[dict[str, Any], Lives]:
    """Let a run go to its end; returns its summary, and what its environments did as far as the run has to know it."""
    begin_history(folder)
    network = Spoiled if what.faults == NAN else None
    if what.faults == DAMAGE:
        first = run.replace(env_steps=int(ENDS_AT * run.env_steps))
        api.train(first, run_dir=folder / "run")
        return resumed(run, folder, lambda: damage(folder / "run" / "checkpoints", rng))
    try:
        summary = api.train(run, run_dir=folder / "run", network=network, sinks=[ending]).summary
    except RoleFailure as failure:
        if what.faults != PARTED or "was lost" not in str(failure):
            raise
        return resumed(run, folder, wait_for_two_nodes)
    return summary, journals(folder / "journal")


def resumed(run: Experiment, folder: Path, meanwhile: Callable[[], None]) -> tuple[dict[str, Any], Lives]:
    """Go on with a run that has ended, after something happened; it has to know what its checkpoint knew."""
    known = {
        path.name: places(run, folder / "run", path) for path in checkpoint.complete(folder / "run" / "checkpoints")
    }
    former = journals(folder / "journal")
    for path in (folder / "journal").iterdir():
        path.rename(path.with_name(f"former-{path.name}"))
    meanwhile()
    begin_history(folder)
    summary = api.resume(folder / "run", env_steps=run.env_steps).summary
    events = map(json.loads, (folder / "run" / "events.jsonl").read_text().splitlines())
    (used,) = (event["checkpoint"] for event in events if event["event"] == "resumed")
    kept = [[step for step in life if step.place in known[used]] for life in former]
    # Environments come back by their last steps, made anew.
    new = [[step for step in life if step.place not in known[used]] for life in journals(folder / "journal")]
    return summary, [*kept, *new]


def places(run: Experiment, directory: Path, saved: Path) -> set[Place]:
    """Return all that the replay of a checkpoint holds."""
    return {place for index in range(run.replay.shards) for place in rows(stored(run, directory, index, saved))}


def begin_history(folder: Path) -> None:
    """Have roles note what they do from now on in a folder of its own: a resumed run counts on from its checkpoint."""
    notes = folder / f"history-{len(list(folder.glob('history-*')))}"
    notes.mkdir()
    os.environ[history.VARIABLE] = str(notes)


def damage(checkpoints: Path, rng: np.random.Generator) -> None:
    """Flip one bit in one of the files that the newest checkpoint needs."""
    newest = checkpoint.complete(checkpoints)[-1]
    chunks = [checkpoints / "chunks" / name for name in checkpoint.verify(newest)["chunks"]]
    files = sorted(path for path in (*newest.iterdir(), *chunks) if path.stat().st_size)
    victim = files[rng.integers(len(files))]
    content = bytearray(victim.read_bytes())
    content[rng.integers(len(content))] ^= 1 << int(rng.integers(8))
    victim.write_bytes(content)


def wait_for_two_nodes() -> None:
    """Wait until the other machine is there again."""
    import ray

    ray.init(address="auto", log_to_driver=False)
    try:
        wait_until(lambda: sum(node["Alive"] for node in ray.nodes()) == 2)
    finally:
        ray.shutdown()
