"""The cluster as it was last seen, by a thread: whoever asks a head that is dead waits until Ray ends the process."""

from __future__ import annotations

import threading
import time
from typing import Any

import psutil
import ray

from qfleet.runtime import ray_cluster
from qfleet.runtime.ray_cluster import Site

_LOOK_S = 2.0
"""Seconds between two looks that nobody asked for."""
_FRESH_S = 2.0
"""How long a new look is waited for before an older one has to do."""
HEAD_S = 40.0
"""How long a head may be silent: one that is begun anew comes back. After 60 s Ray ends this process without a word."""
_GAP_S = 5.0
"""As much of the time between two questions counts as silence: for longer, this process itself was stopped."""


class ClusterWatch:
    """Looks at the nodes of a cluster for as long as it is used, and tells when Ray has ended."""

    def __init__(self) -> None:
        self._here = ray_cluster.here()
        self._sites, self._draining = ray_cluster.sites(self._here), ray_cluster.draining()
        self._raylet = _raylet()
        self._news = threading.Condition()
        self._looks = 0
        """How many have ended."""
        self._since: float | None = None
        """When the look began that is under way."""
        self._silence_s, self._heeded = 0.0, time.monotonic()
        """How long the head was silent by when somebody last asked whether Ray has ended."""
        self._wanted, self._over = threading.Event(), False
        self._thread = threading.Thread(target=self._keep_looking, name="ray-watch", daemon=True)
        self._thread.start()

    def sites(self) -> list[Site]:
        """Return the nodes that live, the driver's first."""
        self._look()
        return self._sites

    def draining(self) -> dict[str, str]:
        """Return the ids of nodes that are to go, each with why."""
        self._look()
        return self._draining

    @property
    def ended(self) -> str:
        """What of Ray has ended, without which nothing can go on, as words of a sentence; empty if nothing has."""
        if part := ray_cluster.dead_part():
            return f"Ray on this machine has ended (its {part} died, or was killed)"
        if self._raylet is not None and not _lives(self._raylet):
            return "Ray on this machine has ended (its raylet died, or was killed)"
        now = time.monotonic()
        self._silence_s = self._silence_s + min(now - self._heeded, _GAP_S) if self.silent else 0.0
        self._heeded = now
        if self._silence_s >= HEAD_S:
            return f"the head of the Ray cluster has not answered for {self._silence_s:.0f} s"
        return ""

    @property
    def silent(self) -> bool:
        """Whether the head does not answer: whoever asks it for anything now may wait for ever."""
        since = self._since
        return since is not None and time.monotonic() - since >= _FRESH_S

    def close(self) -> None:
        """Look no more: Ray is about to be left."""
        self._over = True
        self._wanted.set()
        self._thread.join(_FRESH_S)

    def _look(self) -> None:
        """Wait for a look that begins now; where the head does not answer, for none."""
        if self.silent:
            return
        with self._news:
            enough = self._looks + (1 if self._since is None else 2)
            until = time.monotonic() + _FRESH_S
            while self._looks < enough and (left := until - time.monotonic()) > 0:
                self._wanted.set()
                self._news.wait(left)

    def _keep_looking(self) -> None:
        while not self._over:
            self._wanted.clear()
            self._since = time.monotonic() if self._since is None else self._since
            try:
                self._sites, self._draining = ray_cluster.sites(self._here), ray_cluster.draining()
            except Exception:  # Ray was left, or a node of it has just gone: there is another look
                time.sleep(0.1)
                continue
            with self._news:
                self._looks, self._since = self._looks + 1, None
                self._news.notify_all()
            self._wanted.wait(_LOOK_S)


def _raylet() -> psutil.Process | None:
    """Return the process by which this machine is a node; None where it cannot be seen from here."""
    node: Any = ray._private.worker._global_node
    for process in psutil.process_iter(["name", "cmdline"]):
        words = process.info["cmdline"] or []
        if process.info["name"] == "raylet" and f"--raylet_socket_name={node.raylet_socket_name}" in words:
            return process
    return None


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
