"""Two machines that are none: namespaces of this one, each with its own network, processes, name and shared memory."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

TOOLS = ("ip", "unshare", "nsenter", "mount", "hostname")
MADE = "mount -t tmpfs tmpfs /dev/shm && mkdir -p /tmp/ray && mount -t tmpfs tmpfs /tmp/ray && ip link set lo up"


def why_not() -> str:
    """Return what keeps this machine from playing two, empty if nothing."""
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"needs {', '.join(missing)}"
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    tried = subprocess.run(["unshare", "--net", "--pid", "--mount", "--uts", "--fork", "true"], capture_output=True)
    return "" if tried.returncode == 0 else f"namespaces are not allowed here: {tried.stderr.decode().strip()}"


@dataclass(frozen=True)
class Machine:
    """One of them, alive as long as its first process."""

    name: str
    init: subprocess.Popen[bytes]

    @property
    def pid(self) -> int:
        """The number of its first process, as seen from outside."""
        children = Path(f"/proc/{self.init.pid}/task/{self.init.pid}/children").read_text().split()
        return int(children[0])

    def run(
        self, command: str, environment: Mapping[str, str], seconds: float = 300.0
    ) -> subprocess.CompletedProcess[str]:
        """Run a command of a shell there, as a person who has the project's environment active."""
        found = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        ours = {name: value for name, value in os.environ.items() if not name.startswith("QFLEET_")}
        own = {**ours, "PATH": found, **environment}
        return subprocess.run(
            ["nsenter", "-t", str(self.pid), "-n", "-m", "-u", "-p", "--", "bash", "-c", command],
            env=own, timeout=seconds, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def begun(self) -> bool:
        """Return whether it is ready for commands."""
        with contextlib.suppress(OSError, IndexError):
            return Path(f"/proc/{self.pid}/comm").read_text().strip() == "cat"
        return False

    def processes(self) -> list[str]:
        """Return the names of all that runs there."""
        here, names = os.readlink(f"/proc/{self.pid}/ns/net"), []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.readlink(folder / "ns/net") == here:
                    names.append((folder / "comm").read_text().strip())
        return names


@contextlib.contextmanager
def two_machines(addresses: tuple[str, str]) -> Iterator[tuple[Machine, Machine]]:
    """Have two machines with one cable between them; whatever runs there ends with them."""
    with _machine("first") as first, _machine("second") as second:
        ends = (f"qfa{os.getpid()}", f"qfb{os.getpid()}")
        _ip(f"link add {ends[0]} type veth peer name {ends[1]}")
        for machine, end, address in zip((first, second), ends, addresses, strict=True):
            _ip(f"link set {end} netns {machine.pid}")
            # Ray finds its own address by the route to elsewhere.
            plugged = f"ip addr add {address}/24 dev {end} && ip link set {end} up && ip route add default dev {end}"
            done = machine.run(plugged, {})
            assert done.returncode == 0, done.stdout
        yield first, second


@contextlib.contextmanager
def _machine(name: str) -> Iterator[Machine]:
    kinds = ["--net", "--pid", "--mount", "--uts", "--fork", "--kill-child", "--mount-proc"]
    script = f"hostname {name} && {MADE} && exec cat"  # ends with who made it, since that closes its input
    machine = Machine(name, subprocess.Popen(["unshare", *kinds, "bash", "-c", script], stdin=subprocess.PIPE))
    try:
        until = time.monotonic() + 10
        while not machine.begun():
            assert time.monotonic() < until, f"machine {name} did not begin"
            time.sleep(0.05)
        yield machine
    finally:
        machine.init.kill()
        machine.init.wait()


def _ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True)
