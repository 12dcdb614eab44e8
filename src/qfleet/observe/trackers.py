"""Sinks that feed experiment trackers: TensorBoard and Weights & Biases (extra `track`)."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from qfleet.core.errors import MissingExtra, QfleetError
from qfleet.core.failpoints import failpoint
from qfleet.observe.sinks import Metrics, require_room
from qfleet.observe.text import known, sentence

_SECRET = re.compile(r"token|secret|passw|api_?key|credential|auth", re.IGNORECASE)
_AGAIN_S = 30.0
"""How soon a full disk is tried again; each try makes a file."""
_EVALUATION = ("mean", "iqm", "episodes")


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of a metrics record by chart name: `train/...`, or `roles/...` for shares of time."""
    values = {key: known(record, key) for key in record if key not in ("time", "env_steps")}
    return {f"{'roles' if '.' in key else 'train'}/{key}": value for key, value in values.items() if value is not None}


def evaluation_scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of an evaluation event by chart name: `evaluation/...`."""
    values = {key: known(record, key) for key in _EVALUATION}
    low_high = record.get("ci95")
    if isinstance(low_high, (list, tuple)) and len(low_high) == 2:
        bounds = dict(zip(("ci95_low", "ci95_high"), low_high, strict=True))
        values |= {key: known(bounds, key) for key in bounds}
    return {f"evaluation/{key}": value for key, value in values.items() if value is not None}


class TensorBoardSink:
    """Writes scalars over environment steps, and other events as text, into a TensorBoard log directory.

    A writer that met a full disk never writes again: some time later another one, with a new file, takes its place.
    """

    def __init__(self, directory: Path, clock: Callable[[], float] = time.monotonic) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MissingExtra("tensorboard", "track", "logging to TensorBoard") from error
        self._directory, self._clock, self._again_at = directory, clock, -math.inf
        self._open: Callable[[], Any] = lambda: SummaryWriter(str(directory), flush_secs=10)
        self._writer: Any = self._open()

    def metrics(self, record: Metrics) -> None:
        """Write every finite number."""
        self._write(scalars(record), record)

    def event(self, record: Mapping[str, Any]) -> None:
        """Write an evaluation as scalars, anything else as text."""
        if record.get("event") == "evaluation":
            self._write(evaluation_scalars(record), record)
        else:
            with self._working() as writer:
                writer.add_text("events", sentence(record), _step(record), walltime=known(record, "time"))

    def close(self) -> None:
        """Write what is buffered and end the writer's thread."""
        with contextlib.suppress(OSError):
            if self._writer is not None:
                self._writer.close()

    def _write(self, values: Mapping[str, float], record: Mapping[str, Any]) -> None:
        with self._working() as writer:
            for name, value in values.items():
                writer.add_scalar(name, value, _step(record), walltime=known(record, "time"))

    @contextlib.contextmanager
    def _working(self) -> Iterator[Any]:
        """Give a writer that can write; QfleetError if there is none now."""
        complaint = f"cannot write {self._directory}: {os.strerror(errno.ENOSPC)}; free some space"
        if self._writer is None and self._clock() < self._again_at:
            raise QfleetError(complaint)
        require_room(self._directory)  # the writer's thread would print a traceback
        try:
            self._writer = self._writer or self._open()
            failpoint("tensorboard.write")
            yield self._writer
        except OSError as error:
            self._writer, self._again_at = None, self._clock() + _AGAIN_S
            raise QfleetError(complaint) from error


class WandbSink:
    """Logs to Weights & Biases; `WANDB_MODE=offline` keeps everything under `directory/wandb`.

    Only numbers and the settings named in the "started" event leave the process: no source code, no console output,
    no command line, and no setting whose name looks like a secret. A resumed run continues the same W&B run.
    """

    def __init__(self, project: str, name: str, directory: Path) -> None:
        try:
            import wandb
        except ImportError as error:
            raise MissingExtra("wandb", "track", "logging to Weights & Biases") from error
        directory.mkdir(parents=True, exist_ok=True)
        settings = wandb.Settings(
            console="off", silent=True, disable_git=True, disable_code=True, save_code=False,
            x_disable_meta=True, x_disable_stats=True,
        )  # fmt: skip
        try:
            self._run: Any = wandb.init(
                project=project, name=name, id=_run_id(directory), resume="allow", dir=str(directory), settings=settings
            )
        except wandb.Error as error:
            raise QfleetError(
                f"Weights & Biases did not start for project '{project}': {error}. "
                "Run `wandb login`, or set WANDB_MODE=offline to log to disk."
            ) from error
        # Charts run over environment steps; W&B's own step only counts calls and must not go back on a resume.
        self._run.define_metric("*", step_metric="env_steps")

    def metrics(self, record: Metrics) -> None:
        """Log every finite number."""
        self._run.log({**scalars(record), "env_steps": _step(record)})

    def event(self, record: Mapping[str, Any]) -> None:
        """Log an evaluation; keep the settings that the start of a run names."""
        if record.get("event") == "evaluation":
            self._run.log({**evaluation_scalars(record), "env_steps": _step(record)})
        elif record.get("event") == "started":
            settings = {key: value for key, value in record.items() if key not in ("event", "time")}
            self._run.config.update(without_secrets(settings), allow_val_change=True)

    def close(self) -> None:
        """Finish the W&B run."""
        self._run.finish()


def without_secrets(value: Any) -> Any:
    """Return a tree of settings without the entries whose names look like passwords, tokens or keys."""
    if isinstance(value, Mapping):
        return {key: without_secrets(item) for key, item in value.items() if not _SECRET.search(str(key))}
    return [without_secrets(item) for item in value] if isinstance(value, (list, tuple)) else value


def _run_id(directory: Path) -> str:
    """Return the W&B id of a run directory, made at the first start and kept beside the run."""
    file = directory / "wandb-id"
    if not file.exists():
        file.write_text(uuid.uuid4().hex[:12])
    return file.read_text().strip()


def _step(record: Mapping[str, Any]) -> int:
    return int(known(record, "env_steps") or 0)
