"""The memory of a role that outlives its process: files of the run's folder, or plain memory where nothing does."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from qfleet.core.errors import ConfigError
from qfleet.core.failpoints import failpoint
from qfleet.runtime.latest import LatestPublisher, create_latest
from qfleet.runtime.memory import NoRoom, attach, create


class LocalKeep:
    """A keep in the memory of this process, for placements that never begin a role anew."""

    life = gone = 0
    planned, meeting = False, ""

    def __init__(self) -> None:
        self._arrays: dict[str, NDArray[Any]] = {}
        self._state: Any = None

    def array(self, name: str, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """Return the array of that name, zeros at first."""
        return self._arrays.setdefault(name, np.zeros(shape, dtype))

    def commit(self, state: Any) -> None:
        """Hold the state; it is not copied, because nobody reads it after the role is gone."""
        self._state = state

    def committed(self) -> Any | None:
        """Return the state that was committed last."""
        return self._state


class FileKeep:
    """A keep in files that begin with `stem`; `life`, `gone`, `planned` and `meeting` are as `Keep` has them."""

    def __init__(
        self, stem: Path, life: int, setting: str, gone: int = 0, planned: bool = False, meeting: str = ""
    ) -> None:
        self.life, self.gone, self.planned, self.meeting = life, gone, planned, meeting
        self._stem, self._setting = stem, setting
        self._state = LatestPublisher(stem)

    def array(self, name: str, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """Return the array of that name: zeros in the first life, later what the former life left in it."""
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        path = _array_path(self._stem, name)
        if not path.exists():
            self._create(path, max(nbytes, 1), f"'{name}', {list(shape)} of {np.dtype(dtype)},")
        buffer = attach(path)
        if buffer.size != max(nbytes, 1):
            raise ValueError(f"the kept array '{name}' has {buffer.size} bytes, not the {nbytes} that were asked for")
        kept: NDArray[Any] = buffer[:nbytes].view(dtype)
        return kept.reshape(shape)

    def commit(self, state: Any) -> None:
        """Replace the kept state as a whole: it is written beside the old one, which then ceases to be the newest."""
        failpoint("keep.before_commit")
        self._state.publish(state)
        failpoint("keep.after_commit")

    def committed(self) -> Any | None:
        """Return what the last `commit` of any life kept; None if there was none."""
        return self._state.state()["value"]

    def _create(self, path: Path, nbytes: int, what: str) -> None:
        partial = path.with_name(f"{path.name}.partial")
        partial.unlink(missing_ok=True)  # of a life that died in the middle of this
        try:
            create(partial, nbytes)
        except NoRoom as error:
            raise ConfigError(error.told(what, self._setting)) from error
        os.rename(partial, path)


class KeepReader:
    """Sees the arrays of another role's keep in files that begin with `stem`."""

    def __init__(self, stem: Path) -> None:
        self._stem = stem

    def rows(self, name: str, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """Return the array of that name, whose entries have this shape, as it is now and will be; not to be written."""
        array: NDArray[Any] = attach(_array_path(self._stem, name)).view(dtype).reshape(-1, *shape)
        array.flags.writeable = False
        return array


def _array_path(stem: Path, name: str) -> Path:
    return stem.with_name(f"{stem.name}.array.{quote(name, safe='')}")


def create_keep(stem: Path) -> None:
    """Make the files of a keep that nothing was committed to yet."""
    create_latest(stem)
