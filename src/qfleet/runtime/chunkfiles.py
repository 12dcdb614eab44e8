"""Chunks on disk: each a file that is named after the hash of its content, written once and shared by checkpoints.

Beside each lies its parity: no checkpoint can do without a chunk that all of them share, so small damage is put right.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file
from safetensors.numpy import save as to_bytes

from qfleet.core import codec
from qfleet.core.chunks import Chunk
from qfleet.core.errors import CheckpointError
from qfleet.core.failpoints import failpoint
from qfleet.core.role import State
from qfleet.runtime import epochs
from qfleet.runtime.parity import mended, parity_of

FOLDER = "chunks"
_MARK = "__chunk__"
"""The only key of what stands in a saved state for a chunk: its name, or its number while that is not known."""
_PARITY = ".parity"
_NAME = re.compile(r"[0-9a-f]{64}\.safetensors")


def folder_of(directory: Path) -> Path:
    """Return where a checkpoint's chunks lie: beside it, or beside the epoch's folder in which it is being made."""
    beside = directory.parent if epochs.is_folder(directory.parent) else directory
    return beside.parent / FOLDER


def files_of(folder: Path, name: str) -> list[Path]:
    """Return the files of a chunk: itself, and its parity if there is one."""
    path = _path(folder, name)
    return [one for one in (path, path.with_suffix(_PARITY)) if one.is_file()]


def numbered(folder: Path, state: State, chunks: list[Chunk]) -> State:
    """Return a state with numbers in place of its chunks, which are added to the list.

    Those whose file is gone lose their name: they have to be written again.
    """
    there = set(os.listdir(folder)) if folder.is_dir() else set()

    def number(value: Any) -> Any:
        if isinstance(value, Chunk):
            if value.name not in there:
                if value.name is not None and value.retake is not None:
                    value.retake()
                value.name, value.dropped = None, False
            chunks.append(value)
            return {_MARK: len(chunks) - 1}
        return _mapped(value, number)

    whole: State = number(state)
    return whole


def named(state: State, names: Sequence[str]) -> State:
    """Return a state with the names of chunks in place of their numbers."""

    def name(value: Any) -> Any:
        return {_MARK: names[value[_MARK]]} if _is_mark(value) else _mapped(value, name)

    whole: State = name(state)
    return whole


def found(folder: Path, state: State) -> State:
    """Return a state with chunks in place of their names; their files are read when they are needed."""

    def chunk(value: Any) -> Any:
        if _is_mark(value):
            return Chunk(partial(_read, _path(folder, value[_MARK])), value[_MARK])
        return _mapped(value, chunk)

    whole: State = chunk(state)
    return whole


def make_good(folder: Path, name: str) -> str:
    """Return "" if a chunk is as it was written, else a line that says what was damaged and has been put right.

    CheckpointError if the chunk is not there, or too damaged for that.
    """
    path = _path(folder, name)
    try:
        data, parity = path.read_bytes(), _read_parity(path)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: missing, and the checkpoint needs it") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    if _name(data) == name:
        return _make_parity_good(path, data, parity)
    whole = None if parity is None else mended(data, parity, lambda content: _name(content) == name)
    if whole is None:
        raise CheckpointError(f"{path}: damaged (its hash differs from its name)")
    _replace(path, whole)
    return f"{path}: damaged (its hash differs from its name), and put right by its parity"


def _read_parity(path: Path) -> bytes | None:
    """Return the parity of a chunk; None if there is none, as in files of earlier versions."""
    parity = path.with_suffix(_PARITY)
    return parity.read_bytes() if parity.is_file() else None


def _make_parity_good(path: Path, data: bytes, parity: bytes | None) -> str:
    """Write the parity of a good chunk if it has no good one; returns a line if it had a damaged one."""
    if parity == (right := parity_of(data)):
        return ""
    _replace(path.with_suffix(_PARITY), right)
    return "" if parity is None else f"{path.with_suffix(_PARITY)}: damaged, and made anew from its chunk"


def _replace(path: Path, content: bytes) -> None:
    """Replace a file by a good one, in one step."""
    unfinished = path.with_name(f".partial-{os.getpid()}")
    try:
        unfinished.write_bytes(content)
        os.replace(unfinished, path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise CheckpointError(f"{path}: damaged, and cannot be put right ({error.strerror})") from error


def all_but(names: Collection[str], folder: Path) -> list[Path]:
    """Return every file of the folder that belongs to none of the named chunks."""
    stems = {Path(name).stem for name in names}
    return [path for path in folder.glob("*") if path.stem not in stems]


def write(folder: Path, content: State, unfinished: Path) -> str:
    """Write a chunk; it appears under its name only when complete. Returns the name.

    It is first written to `unfinished`, a path on the same disk that nobody else uses.
    """
    header, arrays = codec.pack(content)
    tensors = {str(i): np.ascontiguousarray(a).reshape(a.shape) for i, a in enumerate(arrays)}
    data = to_bytes({**tensors, "header": np.frombuffer(header, np.uint8)})
    name = _name(data)
    failpoint("checkpoint.before_chunk")
    try:
        folder.mkdir(exist_ok=True)
        unfinished.write_bytes(parity_of(data))
        os.replace(unfinished, (folder / name).with_suffix(_PARITY))
        with unfinished.open("wb") as file:
            file.write(data)
            failpoint("checkpoint.in_chunk")
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, folder / name)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise CheckpointError(f"{folder / name}: cannot be written ({error}); is there room on the disk?") from error
    return name


def _read(path: Path) -> State:
    try:
        arrays = load_file(path)
        header = arrays.pop("header").tobytes()
        content: State = codec.unpack(header, [arrays[str(i)] for i in range(len(arrays))])
    except (OSError, SafetensorError, ValueError, KeyError, IndexError) as error:
        raise CheckpointError(f"{path}: damaged ({error})") from error
    return content


def _name(data: bytes) -> str:
    return f"{hashlib.sha256(data).hexdigest()}.safetensors"


def _path(folder: Path, name: str) -> Path:
    """Return the path of a chunk; refuses a name that could lead elsewhere."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise CheckpointError(f"{folder}: '{name}' is not the name of a chunk")
    return folder / name


def _is_mark(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == {_MARK}


def _mapped(value: Any, function: Any) -> Any:
    """Return a tree of dicts and lists with a function applied to what lies directly below."""
    if isinstance(value, dict):
        return {key: function(item) for key, item in value.items()}
    return [function(item) for item in value] if isinstance(value, list) else value
