"""Checkpoints on disk: complete or absent, hashed, readable without running any code, and never half loaded.

Layout: `checkpoints/000000012345/` with `manifest.json` (format, position, sha256 of every file and of itself) and, for
each role, `NAME.msgpack` (plain values) and `NAME.safetensors` (arrays). What stays from one checkpoint to the next
lies in `checkpoints/chunks/` (see `chunkfiles`); `NAME.chunks` and the manifest say what a checkpoint needs of it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from qfleet.core import codec
from qfleet.core.errors import CheckpointError
from qfleet.core.failpoints import failpoint
from qfleet.core.role import State
from qfleet.runtime import chunkfiles

FORMAT = 2
MANIFEST = "manifest.json"
_READABLE = (1, 2)
"""Format 1 had all of a role's state in its two files."""


@dataclass(frozen=True)
class Found:
    """A checkpoint that can be loaded."""

    directory: Path
    manifest: dict[str, Any]
    skipped: list[str]
    """A line for each newer checkpoint that is damaged."""


def write_state(directory: Path, name: str, state: State) -> None:
    """Write one role's state as two files, and those of its chunks that have no file yet."""
    state, chunks = chunkfiles.write_all(_chunk_folder(directory), state)
    header, arrays = codec.pack(state)
    # Zero-dimensional and empty arrays keep their shape; safetensors wants contiguous ones.
    tensors = {str(i): np.ascontiguousarray(a).reshape(a.shape) for i, a in enumerate(arrays)}
    try:
        save_file(tensors, directory / f"{name}.safetensors")
        (directory / f"{name}.msgpack").write_bytes(header)
        if chunks:
            (directory / f"{name}.chunks").write_text("\n".join(chunks))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{directory / name}: cannot be written ({error}); is there room on the disk?") from error


def read_state(directory: Path, name: str) -> State:
    """Read one role's state back; its chunks are read one by one, by whoever takes the state over."""
    try:
        header = (directory / f"{name}.msgpack").read_bytes()
        arrays = load_file(directory / f"{name}.safetensors")
        state: State = codec.unpack(header, [arrays[str(i)] for i in range(len(arrays))])
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{directory} holds no state of '{name}': it was made by a differently arranged run"
        ) from error
    except (SafetensorError, ValueError, KeyError, IndexError) as error:
        raise CheckpointError(f"{directory / name}: damaged ({error})") from error
    return chunkfiles.found(_chunk_folder(directory), state)


def copy_state(directory: Path, source: str, name: str) -> None:
    """Write the state of one role as that of another, too."""
    for suffix in (".msgpack", ".safetensors", ".chunks"):
        if (directory / f"{source}{suffix}").exists():
            shutil.copyfile(directory / f"{source}{suffix}", directory / f"{name}{suffix}")


def save(root: Path, env_steps: int, fill: Callable[[Path], None], meta: dict[str, Any], keep: int) -> Path:
    """Make one checkpoint: `fill` writes its files; it appears under its final name only when complete.

    At most `keep` complete checkpoints stay. None is ever overwritten: a second one of the same step has a suffix.
    """
    root.mkdir(parents=True, exist_ok=True)
    final = _new_name(root, env_steps)
    for stale in root.glob(".partial-*"):  # of a process that was killed: the directory has one user at a time
        shutil.rmtree(stale)
    partial = root / f".partial-{final.name}"
    partial.mkdir()
    try:
        fill(partial)
        failpoint("checkpoint.before_manifest")
        _write_manifest(partial, {"env_steps": env_steps, **meta})
        for path in (*partial.iterdir(), partial, *root.glob(chunkfiles.FOLDER)):
            _fsync(path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    failpoint("checkpoint.before_rename")
    os.rename(partial, final)
    _fsync(root)
    failpoint("checkpoint.before_removal")
    for old in complete(root)[:-keep]:
        shutil.rmtree(old)
    _remove_chunks(root)
    return final


def _remove_chunks(root: Path) -> None:
    """Delete the chunks that no checkpoint names."""
    try:
        manifests = [json.loads((directory / MANIFEST).read_text()) for directory in complete(root)]
        named = {name for manifest in manifests for name in manifest.get("chunks", ())}
    except (OSError, ValueError, AttributeError, TypeError):
        return  # what a damaged manifest names is not known: nothing is removed before it is gone
    chunkfiles.remove_all_but(named, root / chunkfiles.FOLDER)


def complete(root: Path) -> list[Path]:
    """Return the finished checkpoints, oldest first; their content is not verified."""
    return sorted(path for path in root.glob("[0-9]" * 12 + "*") if (path / MANIFEST).is_file())


def verify(directory: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint after checking it and every file against its hash."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
        version = manifest["format"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{directory / MANIFEST}: not a qfleet manifest ({error})") from error
    if version not in _READABLE:
        raise CheckpointError(f"{directory}: format {version}; this version of qfleet reads {_READABLE}")
    digest = manifest.pop("sha256", "")
    if _digest(manifest) != digest:
        raise CheckpointError(f"{directory / MANIFEST}: damaged (its hash differs from its content)")
    files: dict[str, str] = manifest["files"]
    present = {path.name for path in directory.iterdir()} - {MANIFEST}
    for name in sorted(files.keys() | present):
        path = directory / name
        if name not in present:
            raise CheckpointError(f"{path}: missing from the checkpoint")
        if name not in files or _sha256(path) != files[name]:
            raise CheckpointError(f"{path}: damaged (its hash differs from the manifest's)")
    for name in manifest.get("chunks", ()):
        chunkfiles.verify(_chunk_folder(directory), name)
    return dict(manifest)


def newest_good(root: Path) -> Found:
    """Return the newest checkpoint that verifies."""
    skipped: list[str] = []
    for directory in reversed(complete(root)):
        try:
            return Found(directory, verify(directory), skipped)
        except CheckpointError as error:
            skipped.append(str(error))
    detail = "".join(f"\n  skipped {line}" for line in skipped)
    raise CheckpointError(f"{root}: no usable checkpoint{detail}")


def set_aside(found: Found) -> None:
    """Rename what is newer than a found checkpoint, and so damaged: it must not push out good ones later."""
    for directory in complete(found.directory.parent):
        if directory.name > found.directory.name:
            aside = directory.with_name(f".damaged-{directory.name}")
            shutil.rmtree(aside, ignore_errors=True)
            os.rename(directory, aside)


def _chunk_folder(directory: Path) -> Path:
    """Return where a checkpoint's chunks lie: beside it."""
    return directory.parent / chunkfiles.FOLDER


def _new_name(root: Path, env_steps: int) -> Path:
    """Return a name that sorts after all of the same step."""
    name = f"{env_steps:012d}"
    numbers = [int(path.name[len(name) + 1 :] or 0) for path in root.glob(f"{name}*")]
    return root / (f"{name}-{max(numbers) + 1:03d}" if numbers else name)


def _write_manifest(directory: Path, content: dict[str, Any]) -> None:
    files = {path.name: _sha256(path) for path in sorted(directory.iterdir())}
    chunks = {name for path in directory.glob("*.chunks") for name in path.read_text().split()}
    manifest = {"format": FORMAT, "files": files, "chunks": sorted(chunks), **content}
    (directory / MANIFEST).write_text(json.dumps({**manifest, "sha256": _digest(manifest)}, indent=1))


def _digest(manifest: dict[str, Any]) -> str:
    """Return the hash of a manifest without its own, whatever the order and the white space."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
