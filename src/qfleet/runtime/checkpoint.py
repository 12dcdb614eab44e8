"""Checkpoints on disk: complete or absent, hashed, readable without running any code, and never half loaded.

Layout: `checkpoints/000000012345/` with `manifest.json` (format, position, sha256 of every file) and, for each role,
`NAME.msgpack` (plain values) and `NAME.safetensors` (arrays).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from qfleet.core import codec
from qfleet.core.errors import CheckpointError
from qfleet.core.role import State

FORMAT = 1
MANIFEST = "manifest.json"
_READABLE = (1,)


def write_state(directory: Path, name: str, state: State) -> None:
    """Write one role's state as two files."""
    header, arrays = codec.pack(state)
    # Zero-dimensional and empty arrays keep their shape; safetensors wants contiguous ones.
    save_file(
        {str(i): np.ascontiguousarray(a).reshape(a.shape) for i, a in enumerate(arrays)},
        directory / f"{name}.safetensors",
    )
    (directory / f"{name}.msgpack").write_bytes(header)


def read_state(directory: Path, name: str) -> State:
    """Read one role's state back."""
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
    return state


def save(root: Path, env_steps: int, fill: Callable[[Path], None], meta: dict[str, Any], keep: int) -> Path:
    """Make one checkpoint: `fill` writes its files; it appears under its final name only when complete.

    At most `keep` complete checkpoints stay.
    """
    root.mkdir(parents=True, exist_ok=True)
    final = root / f"{env_steps:012d}"
    partial = root / f".partial-{env_steps:012d}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    fill(partial)
    files = {path.name: _sha256(path) for path in sorted(partial.iterdir())}
    manifest = {"format": FORMAT, "env_steps": env_steps, "files": files, **meta}
    (partial / MANIFEST).write_text(json.dumps(manifest, indent=1))
    for path in partial.iterdir():
        _fsync(path)
    _fsync(partial)
    if final.exists():
        shutil.rmtree(final)
    os.rename(partial, final)
    _fsync(root)
    for old in complete(root)[:-keep]:
        shutil.rmtree(old)
    return final


def complete(root: Path) -> list[Path]:
    """Return the finished checkpoints, oldest first; their content is not verified."""
    return sorted(path for path in root.glob("[0-9]" * 12) if (path / MANIFEST).is_file())


def verify(directory: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint after checking every file against its hash, or raise CheckpointError."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
        version, files = manifest["format"], dict(manifest["files"])
        manifest["env_steps"] + 0
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{directory / MANIFEST}: not a qfleet manifest ({error})") from error
    if version not in _READABLE:
        raise CheckpointError(f"{directory}: format {version}; this version of qfleet reads {_READABLE}")
    for name, digest in files.items():
        path = directory / name
        if path.parent != directory or not path.is_file():
            raise CheckpointError(f"{path}: missing from the checkpoint")
        if _sha256(path) != digest:
            raise CheckpointError(f"{path}: damaged (its hash differs from the manifest's)")
    return dict(manifest)


def newest_good(root: Path) -> tuple[Path, dict[str, Any], list[str]]:
    """Return the newest checkpoint that verifies, its manifest, and a line for each newer one that was skipped."""
    skipped: list[str] = []
    for directory in reversed(complete(root)):
        try:
            return directory, verify(directory), skipped
        except CheckpointError as error:
            skipped.append(str(error))
    detail = "".join(f"\n  skipped {line}" for line in skipped)
    raise CheckpointError(f"{root}: no usable checkpoint{detail}")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
