"""Two learner ranks in two network namespaces joined by a slow link: updates a second, compressed and not.

    python benchmarks/scaling/link.py [--rates 100 1000 0] [--forms none topk ...] [--seconds 6] [--json FILE]

For each rate in Mbit/s (0: no limit) two namespaces are made and joined by a veth pair, each end with a tbf queue that
lets so much through. One rank works in each; they meet over TCP and sum the gradients of the Nature network, batch 32
a rank, in real updates. The namespaces go with the processes. Needs `unshare`, `ip` and `tc`, but not root where users
may make namespaces.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from qfleet.bench.scaling_rank import Job, run_rank
from qfleet.bench.scaling_ranks import APART, program_output
from qfleet.core.errors import QfleetError

FORMS = ("none", "fp16", "bf16", "int8", "sign", "topk", "powersgd")
RATES = (100, 1000, 0)
AIM, AIM_AT = 5.0, 100
"""How many times faster a compressed form should be, and at which rate."""
ADDRESSES, PORTS = ("10.77.0.1", "10.77.0.2"), {"ranks": 29511, "echo": 29512, "bulk": 29513}
ENDS = ("near", "far")
"""Interfaces of rank 0 and rank 1."""
QUEUE_MS = 100
"""A queue that is so full drops what comes; TCP then slows down."""
BULK_BYTES = 8_000_000
PINGS, PING_BYTES = 100, 64


def main() -> None:
    """Measure at every rate, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=int, nargs="+", default=list(RATES), help="Mbit/s; 0 for no limit")
    parser.add_argument("--forms", nargs="+", choices=FORMS[1:], default=list(FORMS[1:]), help="beside none")
    parser.add_argument("--seconds", type=float, default=6.0, help="of each form")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if reason := obstacle():
        sys.exit(f"skipped: {reason}")
    jobs = [Job("nature", form, options.seconds) for form in ("none", *options.forms)]
    try:
        found = [at_rate(rate, jobs) for rate in options.rates]
    except QfleetError as error:
        sys.exit(str(error))
    for one in found:
        show(one)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


def obstacle() -> str:
    """Return why two joined namespaces cannot be made here, or nothing."""
    missing = [tool for tool in ("unshare", "ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"no {' and no '.join(missing)} (util-linux and iproute2 have them)"
    limit = " && ".join(" ".join(words) for words in end_commands(ENDS[0], ADDRESSES[0], AIM_AT))
    pair = f"ip link add {ENDS[0]} type veth peer name {ENDS[1]}"
    tried = subprocess.run([*APART, "sh", "-c", f"{pair} && {limit}"], capture_output=True, text=True)
    return "" if tried.returncode == 0 else f"no network namespaces with a slow link here: {tried.stderr.strip()}"


def at_rate(rate: int, jobs: Sequence[Job]) -> dict[str, Any]:
    """Return what both ranks found at a rate; they run in namespaces of their own."""
    words = [*APART, "--uts", sys.executable, __file__, "--inside", str(rate), *map(_word, jobs)]
    slowest_s = 10.0  # an update of more ranks, or over a slower link, than anybody would wait for
    found: dict[str, Any] = json.loads(program_output(words, 60 + len(jobs) * 10 * slowest_s))
    return found


def _word(job: Job) -> str:
    return json.dumps(asdict(job))


# ------------------------------------------------------------------------------------------------- inside a namespace


def inside(rate: int, jobs: Sequence[Job]) -> None:
    """Be rank 0: start the other one in a second namespace, join both, and print what was found."""
    load = os.getloadavg()[0]
    words = ["unshare", "--net", "--uts", sys.executable, __file__, "--beside", str(rate), *map(_word, jobs)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdin is not None
            assert other.stdout is not None
            other.stdout.readline()  # it is in its own namespace now
            run("ip", "link", "add", ENDS[0], "type", "veth", "peer", "name", ENDS[1], "netns", str(other.pid))
            become(0, rate)
            other.stdin.write("joined\n")
            other.stdin.flush()
            other.stdout.readline()
            link = {"mbit_per_s": rate, "load": load, "ping_ms": ping_ms(), "bulk_mbit_per_s": bulk_mbit_per_s()}
            forms = {job.compression: asdict(one) for job, one in zip(jobs, work(0, jobs), strict=True)}
        except BaseException:
            other.kill()
            raise
    json.dump({**link, "forms": forms}, sys.stdout)


def beside(rate: int, jobs: Sequence[Job]) -> None:
    """Be rank 1: wait until the namespaces are joined, answer rank 0's looks at the link, then work."""
    print("apart", flush=True)
    sys.stdin.readline()
    become(1, rate)
    for serve in (echo_server(), bulk_server()):
        threading.Thread(target=serve, daemon=True).start()
    print("ready", flush=True)
    work(1, jobs)


def work(rank: int, jobs: Sequence[Job]) -> list[Any]:
    """Carry out the jobs with the other rank."""
    return run_rank(rank, 2, f"tcp://{ADDRESSES[0]}:{PORTS['ranks']}", jobs, ENDS[rank])


def become(rank: int, rate: int) -> None:
    """Put this end of the link to use; gloo binds to what the host's name stands for, so the address is the name."""
    for words in end_commands(ENDS[rank], ADDRESSES[rank], rate):
        run(*words)
    socket.sethostname(ADDRESSES[rank])


def end_commands(end: str, address: str, rate: int) -> list[tuple[str, ...]]:
    """Return what gives one end of the link its address and its limit in Mbit/s."""
    commands: list[tuple[str, ...]] = [
        ("ip", "link", "set", "lo", "up"),
        ("ip", "address", "add", f"{address}/24", "dev", end),
        ("ip", "link", "set", end, "up"),
    ]
    if rate:
        # No more than two packets or 0.1 ms may go at once, or small gradients would not meet the limit at all.
        burst = max(3_200, rate * 1_000_000 // 8 // 10_000)
        limit = f"tc qdisc add dev {end} root tbf rate {rate}mbit burst {burst} latency {QUEUE_MS}ms"
        commands.append(tuple(limit.split()))
    return commands


def run(*words: str) -> None:
    """Run a command; say which one failed, and why."""
    ended = subprocess.run(words, capture_output=True, text=True)
    if ended.returncode:
        raise QfleetError(f"{' '.join(words)}: {ended.stderr.strip()}")


# ----------------------------------------------------------------------------------------------- what the link is like


def ping_ms() -> float:
    """Return the median milliseconds in which a small datagram comes back."""
    took = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as line:
        line.settimeout(5.0)
        line.connect((ADDRESSES[1], PORTS["echo"]))
        for _ in range(PINGS):
            began = time.perf_counter()
            line.send(bytes(PING_BYTES))
            line.recv(PING_BYTES)
            took.append(time.perf_counter() - began)
    return 1e3 * statistics.median(took)


def bulk_mbit_per_s() -> float:
    """Return the megabits a second of some megabytes over one TCP connection."""
    with socket.create_connection((ADDRESSES[1], PORTS["bulk"]), timeout=60.0) as line:
        began = time.perf_counter()
        line.sendall(bytes(BULK_BYTES))
        line.shutdown(socket.SHUT_WR)
        line.recv(1)  # all of it has arrived
        return 8e-6 * BULK_BYTES / (time.perf_counter() - began)


def echo_server() -> Callable[[], None]:
    """Return what sends every datagram back, bound already."""
    line = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    line.bind((ADDRESSES[1], PORTS["echo"]))

    def serve() -> None:
        while True:
            line.sendto(*line.recvfrom(PING_BYTES))

    return serve


def bulk_server() -> Callable[[], None]:
    """Return what takes all that one connection sends and then says so, bound already."""
    listening = socket.create_server((ADDRESSES[1], PORTS["bulk"]))

    def serve() -> None:
        line, _ = listening.accept()
        while line.recv(1 << 20):
            pass
        line.sendall(b"!")

    return serve


def show(found: dict[str, Any]) -> None:
    """Print one rate's table."""
    rate, forms = found["mbit_per_s"], found["forms"]
    print(
        f"\n{f'{rate} Mbit/s' if rate else 'No limit'}: a datagram there and back in {found['ping_ms']:.2f} ms,",
        end=" ",
    )
    print(f"one TCP connection {found['bulk_mbit_per_s']:,.0f} Mbit/s;", end=" ")
    print(f"load average before {found['load']:.1f}\n")
    print("| form | updates/s | times none | CPU ms an update | kB on the wire | kB by the rank's count |")
    print("|---" * 6 + "|")
    for form, one in forms.items():
        times = one["updates_per_s"] / forms["none"]["updates_per_s"]
        sizes = f"{one['wire_bytes'] / 1e3:,.1f} | {one['counted_bytes'] / 1e3:,.1f}"
        print(f"| {form} | {one['updates_per_s']:.2f} | {times:.2f} | {1e3 * one['cpu_s']:.0f} | {sizes} |")
    if rate == AIM_AT:
        best = max(forms, key=lambda form: forms[form]["updates_per_s"])
        times = forms[best]["updates_per_s"] / forms["none"]["updates_per_s"]
        print(f"\nAim {AIM:g} times none: {'met' if times >= AIM else 'not met'} by {best} with {times:.2f}")


if __name__ == "__main__":
    if sys.argv[1:2] in (["--inside"], ["--beside"]):
        role = inside if sys.argv[1] == "--inside" else beside
        role(int(sys.argv[2]), [Job(**json.loads(word)) for word in sys.argv[3:]])
    else:
        main()
