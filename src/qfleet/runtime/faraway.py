"""A copy of a run's checkpoints at an address of fsspec: an object store, a disk of another machine.

A checkpoint is there when its manifest is, which comes last; whoever fetches it checks every hash before it is loaded.
A file says which driver may write there: one that another has taken the run over from finds out before it does.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fsspec.core import url_to_fs  # type: ignore[import-untyped]

from qfleet.core.errors import CheckpointError, ConfigError, Superseded
from qfleet.runtime import checkpoint, chunkfiles

_DRIVER = "driver"
_CONFIG, _BESIDE = "config.yaml", ("config.yaml", "plan.yaml", "model")
"""What a run needs besides its checkpoints; a copy without the first holds no run."""


def is_address(name: str) -> bool:
    """Return whether a name is one of fsspec's addresses and not a path."""
    return "://" in name


class Faraway:
    """What one driver does at an address."""

    def __init__(self, address: str) -> None:
        if urlsplit(address).password:
            raise ConfigError(
                f"checkpoint.target of {urlsplit(address).hostname} has a password, which would be written into the"
                " run's files: give credentials by the store's own variables or files"
            )
        self.address, self._driver = address, secrets.token_hex(8)
        try:
            self._store, self._root = url_to_fs(address)
        except (ImportError, ValueError) as error:
            raise ConfigError(f"checkpoint.target {address}: {error}") from error

    def take_over(self, new: bool) -> None:
        """Be the driver that writes there from now on; a `new` run is refused where there is one."""
        with self._explained(ConfigError):
            held = self._store.exists(self._path(_CONFIG))
            if not (new and held):
                self._store.makedirs(self._root, exist_ok=True)
                self._store.pipe_file(self._path(_DRIVER), self._driver.encode())
        if new and held:
            raise ConfigError(
                f"{self.address} already holds a run: go on with `qfleet resume {self.address}`, or choose another"
                " checkpoint.target"
            )

    def copy(self, directory: Path, run: Path, keep: int) -> None:
        """Copy a complete checkpoint of a run, and what the run needs besides; the newest `keep` stay there.

        Chunks that are there are not copied again. CheckpointError if something cannot be written.
        """
        with self._explained(CheckpointError):
            self._require()
            manifest = json.loads((directory / checkpoint.MANIFEST).read_text())
            self._copy_chunks(chunkfiles.folder_of(directory), manifest)
            for path in sorted(directory.iterdir()):
                if path.name != checkpoint.MANIFEST:
                    self._put(path, self._path(directory.name, path.name))
            for path in [one for name in _BESIDE for one in _files(run / name)]:
                self._put(path, self._path(path.relative_to(run).as_posix()))
            self._require()
            self._put(directory / checkpoint.MANIFEST, self._path(directory.name, checkpoint.MANIFEST))
            self._tidy(keep)

    def fetch(self, run: Path) -> None:
        """Copy the checkpoints that are there, with all that a run needs, into a new directory."""
        with self._explained(CheckpointError):
            if not self._store.exists(self._path(_CONFIG)):
                raise ConfigError(f"{self.address} holds no run: there is no {_CONFIG}")
            names = self._complete()
            run.mkdir(parents=True)
            checkpoints = run / "checkpoints"
            for name in [*names, chunkfiles.FOLDER]:
                if self._store.exists(self._path(name)):
                    self._store.get(self._path(name), str(checkpoints / name), recursive=True)
            for name in reversed(_BESIDE):  # what makes it a run comes last
                if self._store.exists(self._path(name)):
                    self._store.get(self._path(name), str(run / name), recursive=True)

    def _copy_chunks(self, folder: Path, manifest: dict[str, Any]) -> None:
        there = self._sizes(chunkfiles.FOLDER)
        for name in manifest.get("chunks", ()):
            for path in chunkfiles.files_of(folder, name):
                if there.get(path.name) != path.stat().st_size:  # one that was cut short has another size
                    self._put(path, self._path(chunkfiles.FOLDER, path.name))

    def _tidy(self, keep: int) -> None:
        """Remove older checkpoints, manifests first, then chunks that none of those that stay names."""
        names = self._complete()
        for name in names[:-keep]:
            self._store.rm(self._path(name, checkpoint.MANIFEST))
            self._store.rm(self._path(name), recursive=True)
        manifests = [json.loads(self._store.cat_file(self._path(n, checkpoint.MANIFEST))) for n in names[-keep:]]
        named = {chunk for manifest in manifests for chunk in manifest.get("chunks", ())}
        for name in self._sizes(chunkfiles.FOLDER):
            if Path(name).stem not in {Path(chunk).stem for chunk in named}:
                self._store.rm(self._path(chunkfiles.FOLDER, name))

    def _complete(self) -> list[str]:
        """Return the names of the checkpoints that are whole, oldest first."""
        found = [path for path in self._list("") if path.rstrip("/").rpartition("/")[2][:12].isdecimal()]
        names = sorted(path.rstrip("/").rpartition("/")[2] for path in found)
        return [name for name in names if self._store.exists(self._path(name, checkpoint.MANIFEST))]

    def _sizes(self, folder: str) -> dict[str, int]:
        """Return the files of a folder there, with their bytes."""
        if not self._store.exists(self._path(folder)):
            return {}
        found = self._store.ls(self._path(folder), detail=True, refresh=True)
        return {one["name"].rpartition("/")[2]: int(one["size"]) for one in found if one["type"] == "file"}

    def _list(self, folder: str) -> list[str]:
        self._store.invalidate_cache()
        return [str(one) for one in self._store.ls(self._path(folder), detail=False)]

    def _require(self) -> None:
        """Raise Superseded if another driver writes there."""
        if self._store.cat_file(self._path(_DRIVER)).decode() != self._driver:
            raise Superseded(f"another process has taken over the run at {self.address}; this one copies nothing more")

    def _put(self, path: Path, there: str) -> None:
        self._store.makedirs(there.rpartition("/")[0], exist_ok=True)
        self._store.put_file(str(path), there)

    def _path(self, *parts: str) -> str:
        return "/".join([self._root.rstrip("/"), *(part for part in parts if part)])

    @contextlib.contextmanager
    def _explained(self, kind: type[Exception]) -> Iterator[None]:
        """Turn whatever a store raises, each its own kind, into one error that names the address."""
        try:
            yield
        except (Superseded, ConfigError):
            raise
        except Exception as error:
            raise kind(f"{self.address}: {type(error).__name__}: {error}") from error


def _files(path: Path) -> list[Path]:
    """Return a file, or all those in a directory; nothing if there is none."""
    if path.is_dir():
        return sorted(one for one in path.rglob("*") if one.is_file() and not one.name.startswith("."))
    return [path] if path.is_file() else []
