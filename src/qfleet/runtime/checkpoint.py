"""Checkpoints on disk: complete or absent, hashed, readable without running any code, and never half loaded.

Layout: `checkpoints/000000012345/` with `manifest.json` (format, position, sha256 of every file and of itself) and, for
each role, `NAME.msgpack` (plain values) and `NAME.safetensors` (arrays). What stays from one checkpoint to the next
lies in `checkpoints/chunks/` (see `chunkfiles`); `NAME.chunks` and the manifest say what a checkpoint needs of it.
All that changes there goes through the folder of the writer's epoch (see `epochs`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.numpy import load_file

from qfleet.core import codec
from qfleet.core.errors import CheckpointError
from qfleet.core.failpoints import failpoint
from qfleet.core.role import State
from qfleet.runtime import chunkfiles
from qfleet.runtime.captured import Captured
from qfleet.runtime.epochs import Epoch

FORMAT = 3
MANIFEST = "manifest.json"
_READABLE = (1, 2, 3)
"""Format 1 had all of a role's state in its two files, format 2 all of a fused loop's."""


@dataclass(frozen=True)
class Found:
    """A checkpoint that can be loaded."""

    directory: Path
    manifest: dict[str, Any]
    skipped: list[str]
    """A line for each newer checkpoint that is damaged."""
    mended: list[str]
    """A line for each of its files that was damaged and has been put right."""


def write_state(directory: Path, name: str, state: State) -> None:
    """Write one role's state as two files, and those of its chunks that have no file yet."""
    Captured(directory, name, state).write()


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
    return chunkfiles.found(chunkfiles.folder_of(directory), state)


def copy_state(directory: Path, source: str, name: str) -> None:
    """Write the state of one role as that of another, too."""
    for suffix in (".msgpack", ".safetensors", ".chunks"):
        if (directory / f"{source}{suffix}").exists():
            shutil.copyfile(directory / f"{source}{suffix}", directory / f"{name}{suffix}")


def begin(epoch: Epoch, env_steps: int) -> Path:
    """Make the directory in which a checkpoint is prepared; returns it. Superseded if a later epoch has begun.

    No checkpoint is ever overwritten: a second one of the same step has a suffix.
    """
    epoch.require()
    partial = epoch.folder / _new_name(epoch.root, env_steps).name
    partial.mkdir()
    return partial


def save(
    epoch: Epoch,
    partial: Path,
    fill: Callable[[], None],
    meta: dict[str, Any],
    keep: int,
    remark: Callable[[str], object] = lambda text: None,
) -> Path:
    """Make one checkpoint in what `begin` returned: `fill` sees to all of its files but the manifest.

    It appears under its final name only when complete; at most `keep` complete ones stay. If others cannot be removed,
    that is what `remark` is told.
    """
    prepare(epoch, partial, fill, meta)
    final = publish(epoch, partial)
    try:
        _fsync(epoch.root)
        failpoint("checkpoint.before_removal")
        for old in complete(epoch.root)[:-keep]:
            epoch.discard(old)
        _remove_chunks(epoch)
        left = epoch.sweep()
        why = f"files of {', '.join(left[:3])}{', ...' if left[3:] else ''} stay in {epoch.folder}" if left else ""
    except OSError as error:  # it is saved; what stays now goes with the next one
        why = str(error)
    if why:
        remark(f"what is no longer needed in {epoch.root} could not be removed, and takes room there ({why})")
    return final


def prepare(epoch: Epoch, partial: Path, fill: Callable[[], None], meta: dict[str, Any]) -> None:
    """Complete what `begin` returned where it is: it can be loaded, and goes with its epoch unless it is published."""
    with _dropped_on_failure(epoch, partial):
        fill()
        failpoint("checkpoint.before_manifest")
        _write_manifest(partial, {"env_steps": int(partial.name[:12]), "epoch": epoch.number, **meta})
        for path in (*partial.iterdir(), partial, *epoch.root.glob(chunkfiles.FOLDER)):
            _fsync(path)


def publish(epoch: Epoch, partial: Path) -> Path:
    """Have a checkpoint that is prepared appear under its final name, which is returned."""
    with _dropped_on_failure(epoch, partial):
        failpoint("checkpoint.before_rename")
        final = epoch.root / partial.name
        os.rename(partial, final)
    return final


@contextlib.contextmanager
def _dropped_on_failure(epoch: Epoch, partial: Path) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, CheckpointError | OSError):
            epoch.require()  # that may be why
        raise


def _remove_chunks(epoch: Epoch) -> None:
    """Delete the chunks that no checkpoint names."""
    root = epoch.root
    try:
        manifests = [json.loads((directory / MANIFEST).read_text()) for directory in complete(root)]
        named = {name for manifest in manifests for name in manifest.get("chunks", ())}
    except (OSError, ValueError, AttributeError, TypeError):
        return  # what a damaged manifest names is not known: nothing is removed before it is gone
    for path in chunkfiles.all_but(named, root / chunkfiles.FOLDER):
        epoch.discard(path)


def complete(root: Path) -> list[Path]:
    """Return the finished checkpoints, oldest first; their content is not verified."""
    return sorted(path for path in root.glob("[0-9]" * 12 + "*") if path.is_dir())


def verify(directory: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint after checking it and every file against its hash.

    CheckpointError names the first file that is missing, damaged or foreign. Chunks with little damage are put right.
    """
    return _verified(directory)[0]


def _verified(directory: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the manifest of a checkpoint that was checked, and a line for each chunk that was put right."""
    manifest = _read_manifest(directory / MANIFEST)
    files: dict[str, str] = manifest["files"]
    present = {path.name for path in directory.iterdir()} - {MANIFEST}
    for name in sorted(files.keys() | present):
        path = directory / name
        if name not in present:
            raise CheckpointError(f"{path}: missing from the checkpoint")
        if name not in files:
            raise CheckpointError(f"{path}: no part of the checkpoint (its manifest does not name it)")
        try:
            digest = _sha256(path)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
        if digest != files[name]:
            raise CheckpointError(f"{path}: damaged (its hash differs from the manifest's)")
    lines = [chunkfiles.make_good(chunkfiles.folder_of(directory), name) for name in manifest.get("chunks", ())]
    return manifest, [line for line in lines if line]


def _read_manifest(path: Path) -> dict[str, Any]:
    """Return what a manifest says besides its hash, if every byte of it is as it was written."""
    try:
        text = path.read_bytes()
        manifest = json.loads(text)
        version = manifest["format"]
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: missing from the checkpoint") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: not a qfleet manifest ({error})") from error
    if version not in _READABLE:
        raise CheckpointError(f"{path}: format {version}; this version of qfleet reads {_READABLE}")
    manifest.pop("sha256", None)
    if _manifest_bytes(manifest) != text:  # a hash of what it says would miss 1E-5 in place of 1e-5
        raise CheckpointError(f"{path}: damaged (its hash differs from its content)")
    return dict(manifest)


def newest_good(root: Path) -> Found:
    """Return the newest checkpoint that verifies."""
    skipped: list[str] = []
    for directory in reversed(complete(root)):
        try:
            manifest, mended = _verified(directory)
            return Found(directory, manifest, skipped, mended)
        except CheckpointError as error:
            skipped.append(str(error))
    detail = "".join(f"\n  skipped {line}" for line in skipped)
    raise CheckpointError(f"{root}: no usable checkpoint{detail}")


def set_aside(found: Found, epoch: Epoch) -> None:
    """Rename what is newer than a found checkpoint, and so damaged: it must not push out good ones later."""
    for directory in complete(epoch.root):
        if directory.name > found.directory.name:
            aside, on_its_way = epoch.root / f".damaged-{directory.name}", epoch.folder / directory.name
            epoch.discard(aside)
            try:
                os.rename(directory, on_its_way)  # which fails if the epoch is over: then it may be a newer, good one
            except OSError:
                epoch.require()
                raise
            os.rename(on_its_way, aside)


def _new_name(root: Path, env_steps: int) -> Path:
    """Return a name that sorts after all of the same step."""
    name = f"{env_steps:012d}"
    numbers = [int(path.name[len(name) + 1 :] or 0) for path in root.glob(f"{name}*")]
    return root / (f"{name}-{max(numbers) + 1:03d}" if numbers else name)


def _write_manifest(directory: Path, content: dict[str, Any]) -> None:
    files = {path.name: _sha256(path) for path in sorted(directory.iterdir())}
    chunks = {name for path in directory.glob("*.chunks") for name in path.read_text().split()}
    manifest = {"format": FORMAT, "files": files, "chunks": sorted(chunks), **content}
    (directory / MANIFEST).write_bytes(_manifest_bytes(manifest))


def _manifest_bytes(manifest: dict[str, Any]) -> bytes:
    """Return a manifest as it is written: with the hash of all it says at its end."""
    digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    return json.dumps({**manifest, "sha256": digest}, indent=1).encode()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
