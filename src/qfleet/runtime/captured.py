"""A role's state as it was at one moment, taken between two of its steps and written while it goes on."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from qfleet.core import codec
from qfleet.core.chunks import Chunk
from qfleet.core.errors import CheckpointError
from qfleet.core.failpoints import failpoint
from qfleet.core.role import State
from qfleet.runtime import chunkfiles


class Captured:
    """A copy of one role's state, for the files that begin with `name` in a checkpoint's directory.

    Chunks are not copied: whoever gave the state keeps them as they are until they are written or dropped.
    """

    def __init__(self, directory: Path, name: str, state: State) -> None:
        self._directory, self._name = directory, name
        self._chunks: list[Chunk] = []
        self._header, arrays = codec.pack(chunkfiles.numbered(chunkfiles.folder_of(directory), state, self._chunks))
        self._arrays = [np.array(array, order="C") for array in arrays]

    def write(self, abandoned: threading.Event | None = None) -> None:
        """Write the state as two files, and those of its chunks that have no file yet; once, in any thread.

        Once `abandoned` is set it ends with an error at the next chunk.
        """
        try:
            names = [self._write_chunk(chunk, abandoned) for chunk in self._chunks]
        finally:
            for chunk in self._chunks:
                chunk.dropped = True
        if names:
            state = codec.unpack(self._header, self._arrays)
            self._header, self._arrays = codec.pack(chunkfiles.named(state, names))
        path = self._directory / self._name
        try:
            failpoint("checkpoint.state")
            save_file({str(i): array for i, array in enumerate(self._arrays)}, f"{path}.safetensors")
            Path(f"{path}.msgpack").write_bytes(self._header)
            if names:
                Path(f"{path}.chunks").write_text("\n".join(names))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path}: cannot be written ({error}); is there room on the disk?") from error

    def _write_chunk(self, chunk: Chunk, abandoned: threading.Event | None) -> str:
        if abandoned is not None and abandoned.is_set():
            raise CheckpointError(f"{self._directory / self._name}: given up, because the run ends")
        if chunk.name is None:
            folder, unfinished = chunkfiles.folder_of(self._directory), self._directory / f".{self._name}.chunk"
            chunk.name = chunkfiles.write(folder, chunk.read(), unfinished)
        return chunk.name
