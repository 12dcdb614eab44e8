"""How runs stand, told from their directories alone: for whoever did not start them, perhaps on another machine."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from qfleet.core.errors import ConfigError, QfleetError
from qfleet.observe.sinks import read_jsonl
from qfleet.observe.text import known
from qfleet.runtime import ownership
from qfleet.runtime.ownership import Owner, Sight

State = Literal["running", "finished", "stopped", "failed", "dead"]
Record = dict[str, Any]
BEGINNINGS, ENDINGS = ("started", "resumed"), ("finished", "stopped", "failed")
FAULTS = (
    "skipped_update",
    "environment",
    "standstill",
    "restarted",
    "fewer",
    "node_lost",
    "unfit",
    "unsaved",
    "unremoved",
    "unwritten",
    "damaged",
    "mended",
)
"""Kinds of notices that tell of something that went wrong; deaths are events of their own."""
_DEPTH = 3
"""How far below a folder its runs may lie: those of several seeds have a folder of their own."""
_BLOCK = 1 << 16


@dataclass(frozen=True)
class Standing:
    """How one run stands. Times are Unix times; what nobody has said yet is None."""

    run: Path
    state: State
    """`dead`: its driver is gone, and there is no word of an ending."""
    note: str
    """Why it ended, or how far the state is to be trusted; may be empty."""
    owner: Owner | None
    """Who drives it, or drove it last."""
    preset: str
    algo: str
    seed: int | None
    placement: str
    env_steps: int | None
    """In the newest record, which is older than the last checkpoint at times; so are the other numbers up to it."""
    env_steps_budget: int | None
    updates: int | None
    actors: int | None
    learners: int | None
    """Learner ranks, gradient workers or fused loops."""
    shards: int | None
    env_steps_per_s: float | None
    """In the newest record, also of a run that has ended."""
    newest_record: float | None
    """When the newest record of the metrics was written."""
    bottleneck: str
    evaluation: Record | None
    """The last one: `time`, `env_steps`, `mean`, `ci95`."""
    checkpoint: Record | None
    """The last one: `time`, `env_steps`, `path`."""
    restarts: int
    """Deaths that the run survived, those of earlier parts of a resumed run included."""
    faults: int
    """Notices of other things that went wrong."""


def standing(run: Path) -> Standing:
    """Return how a run stands; anything in its directory that cannot be read is an error that names it."""
    sight = ownership.look(run)  # before the files: what they say of an end is then not older than this
    planned = (run / "config.yaml").is_file()
    config = _config(run) if planned else {}
    events = read_jsonl(run / "events.jsonl") if (run / "events.jsonl").is_file() else []
    metrics = newest_record(run / "metrics.jsonl")
    state, note = _state(sight, events)
    if state == "running" and not planned:
        note = "; ".join(filter(None, ("it plans, and has no settings yet", note)))
    return Standing(
        run=run,
        state=state,
        note=note,
        owner=sight.owner,
        preset=str(config.get("preset", "")),
        algo=str(config.get("algo", "")),
        seed=_whole(config, "seed"),
        placement=str(config.get("placement", "")),
        env_steps=_whole(metrics, "env_steps"),
        env_steps_budget=_whole(metrics, "env_steps_budget"),
        updates=_whole(metrics, "updates"),
        actors=_whole(metrics, "actors"),
        learners=_whole(metrics, "learners"),
        shards=_whole(metrics, "shards"),
        env_steps_per_s=known(metrics, "env_steps_per_s"),
        newest_record=known(metrics, "time"),
        bottleneck=str(metrics.get("bottleneck", "")),
        evaluation=_last(events, "evaluation", ("time", "env_steps", "mean", "ci95")),
        checkpoint=_last(events, "checkpoint", ("time", "env_steps", "path")),
        restarts=sum(event.get("event") == "restart" for event in events),
        faults=sum(event.get("event") == "notice" and event.get("kind") in FAULTS for event in events),
    )


def runs_in(folder: Path) -> list[Path]:
    """Return the directories of the runs in a folder, sorted by name; a run itself is the only one in it."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a directory; give that of a run, or a folder of runs")
    return sorted(_search(folder, _DEPTH))


def one_run(path: Path) -> Path:
    """Return the directory of a run; refuses a folder with the names of the runs in it."""
    if _is_run(path):
        return path
    inside = runs_in(path) if path.is_dir() else []
    there = f"; name one of the runs in it: {', '.join(map(str, inside[:5]))}" if inside else ""
    raise ConfigError(f"{path} holds no run: there is no config.yaml in it{there}")


def newest_record(path: Path) -> Record:
    """Return the last whole record of a file that may be long and is being written; empty if there is none."""
    try:
        with path.open("rb") as file:
            size, content = file.seek(0, os.SEEK_END), b""
            while size and content.count(b"\n") < 2:
                start = max(0, size - _BLOCK)
                file.seek(start)
                content, size = file.read(size - start) + content, start
        record = json.loads(content.split(b"\n")[-2]) if b"\n" in content else {}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise QfleetError(f"{path}: its last line cannot be read ({error})") from error
    return record if isinstance(record, dict) else {}


def _is_run(path: Path) -> bool:
    """Return whether a directory is that of a run: it has settings, or somebody is just planning them."""
    return (path / "config.yaml").is_file() or ownership.look(path).alive


def _search(folder: Path, depth: int) -> Iterator[Path]:
    if _is_run(folder):
        yield folder
    elif depth:
        for child in folder.iterdir():
            if child.is_dir() and not child.is_symlink():
                yield from _search(child, depth - 1)


def _state(sight: Sight, events: Sequence[Mapping[str, Any]]) -> tuple[State, str]:
    """Return the state and what is to be said of it."""
    if sight.alive:
        return "running", sight.doubt
    since = 0.0 if sight.owner is None else sight.owner.since
    told = [e for e in events if e.get("event") in (*BEGINNINGS, *ENDINGS) and (known(e, "time") or 0.0) >= since]
    if told and told[-1]["event"] in ENDINGS:
        return told[-1]["event"], _ending(told[-1])
    owner = sight.owner
    if owner is not None and owner.ending == ownership.INTERRUPTED:
        return "stopped", "interrupted before training began"
    if owner is not None and owner.until is not None:
        return "failed", owner.ending or "it ended without saying how"
    return "dead", sight.doubt or "its driver is gone without a word"


def _ending(event: Mapping[str, Any]) -> str:
    if event.get("by"):
        return f"asked to by {event['by']}"
    reason = str(event.get("reason", ""))
    return {"at_once": "at once: nothing was saved after the last checkpoint"}.get(reason, reason)


def _config(run: Path) -> Record:
    try:
        tree = yaml.safe_load((run / "config.yaml").read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{run / 'config.yaml'} cannot be read as a configuration ({error})") from error
    return tree if isinstance(tree, dict) else {}


def _last(events: Sequence[Record], name: str, keys: Sequence[str]) -> Record | None:
    for event in reversed(events):
        if event.get("event") == name:
            return {key: event.get(key) for key in keys}
    return None


def _whole(record: Mapping[str, Any], key: str) -> int | None:
    value = known(record, key)
    return None if value is None else int(value)
