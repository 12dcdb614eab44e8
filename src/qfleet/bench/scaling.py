"""Several learners: what their gradients weigh on the wire, what more ranks bring, and one slow worker among four."""

from __future__ import annotations

from collections.abc import Mapping

from qfleet.bench import scaling_server
from qfleet.bench.scaling_rank import BATCH, Done, Job
from qfleet.bench.scaling_ranks import can_stand_apart, run_ranks
from qfleet.bench.table import Row

FEWER = {"int8": 3.9, "sign": 30.0, "topk": 250.0}
"""How many times fewer bytes a form should take between two ranks."""
FORMS = ("fp16", "bf16", "int8", "sign", "topk", "powersgd")
NAMES = {"mlp": "MLP 128-128", "nature": "Nature network"}
TITLES = {"topk": "topk after its warm-up"}
JOBS: dict[int, tuple[Job, ...]] = {
    1: (Job("mlp"), Job("nature")),
    2: (Job("mlp"), Job("nature"), *(Job("nature", form) for form in FORMS)),
    3: (Job("nature"), *(Job("nature", form) for form in FORMS[2:])),
    4: (Job("mlp"), Job("nature"), *(Job("nature", form) for form in FORMS[2:])),
}
"""What ranks do, by how many they are."""
Found = Mapping[tuple[int, str, str], Done]
"""What came of it, by ranks, network and compression."""


def measure() -> list[Row]:
    """Run groups of one to four ranks, then parameter servers; takes minutes, more of them beside other programs."""
    apart = can_stand_apart()
    done = {
        (size, job.network, job.compression): one
        for size, jobs in JOBS.items()
        for job, one in zip(jobs, run_ranks(size, jobs, apart and size > 1), strict=True)
    }
    return [*traffic_rows(done), *rate_rows(done), *scaling_server.measure()]


def traffic_rows(done: Found) -> list[Row]:
    """Return what each compressed form weighs beside none, for every number of ranks."""
    rows = []
    for (size, network, form), one in done.items():
        if form == "none":
            continue
        ours, plain = sent_bytes(one, size), sent_bytes(done[size, network, "none"], size)
        goal = FEWER.get(form) if size == 2 else None
        counted = "on the loopback, headers included" if one.wire_bytes else "by its own count"
        rows.append(
            Row(
                what=f"{NAMES[network]}, {size} ranks, {TITLES.get(form, form)}: bytes a rank sends, {counted}",
                ours=f"{ours / 1e3:,.1f} kB",
                peer=f"{plain / 1e3:,.1f} kB (none)",
                ratio=plain / ours,
                goal="" if goal is None else f"ratio {goal:g}",
                met=None if goal is None else plain / ours >= goal,
            )
        )
    return rows


def sent_bytes(done: Done, size: int) -> float:
    """Return what one of so many ranks sends for an update: by the kernel's count of all of it, if there is one."""
    return done.wire_bytes / size or done.counted_bytes


def rate_rows(done: Found) -> list[Row]:
    """Return how many transitions several ranks learn from in a second, beside one rank."""
    return [
        Row(
            what=f"{NAMES[network]}, batch {BATCH} a rank, {size} ranks: {one.updates_per_s:,.1f} updates/s",
            ours=f"{size * BATCH * one.updates_per_s:,.0f} transitions/s",
            peer=f"{BATCH * done[1, network, 'none'].updates_per_s:,.0f} transitions/s (1 rank)",
            ratio=size * one.updates_per_s / done[1, network, "none"].updates_per_s,
        )
        for network in NAMES
        for (size, also, form), one in done.items()
        if also == network and form == "none" and size > 1
    ]
