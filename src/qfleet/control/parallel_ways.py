"""Every way to share an update among ranks, what speaks against those that cannot be, and the choice among the rest."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from qfleet.control.parallel_cost import Cost, predict
from qfleet.control.parallel_parts import PLAIN, SMALL, Compression, Site, Way, Work

ALIKE = 0.03
"""Of ways that are slower than the fastest by less, the one with the fewest ranks is taken."""
PERIOD = 16
"""Updates between two averages of the local updates that are considered."""
SLACK = 2
"""Updates that a worker of the stale-synchronous server that is considered may be ahead."""
ALL_BELOW = 8
"""Degrees up to this are all considered, above it the powers of two."""


@dataclass(frozen=True)
class Candidate:
    """A way, and what it costs or what speaks against it."""

    way: Way
    cost: Cost | None
    """None if it cannot be."""
    obstacle: str = ""
    """Why not."""


@dataclass(frozen=True)
class Choice:
    """The chosen way, all that were considered, the fastest first, and why."""

    best: Candidate
    candidates: tuple[Candidate, ...]
    why: str


def weigh(
    work: Work, site: Site, compressions: Sequence[Compression] = (), among: Sequence[Way] | None = None
) -> Choice:
    """Return the fastest way that learns what one device would, `among` some or all ways that the site allows."""
    tried = [considered(work, site, way) for way in among or ways(work, site, compressions)]
    possible = sorted((one for one in tried if one.cost), key=_seconds)
    if not possible:
        return Choice(tried[0], tuple(tried), f"nothing is possible: {tried[0].obstacle}")
    exact = [one for one in possible if one.way.exact] or possible
    limit = _seconds(exact[0]) / (1 - ALIKE)
    best = min((one for one in exact if _seconds(one) <= limit), key=_modesty)
    others = [one for one in tried if not one.cost]
    return Choice(best, (*possible, *others), _why(best, exact, possible))


def considered(work: Work, site: Site, way: Way) -> Candidate:
    """Return a way with what it costs, or with what speaks against it."""
    if obstacle := _indivisible(work, way):
        return Candidate(way, None, obstacle)
    cost = predict(work, site, way)
    needed = cost.memory * (way.ranks if site.shared else 1)
    if needed > site.memory:
        who = f"{way.ranks} ranks together" if site.shared else "a rank"
        return Candidate(way, None, f"does not fit: {who} need {_gib(needed)}, there are {_gib(site.memory)}")
    return Candidate(way, cost)


def ways(work: Work, site: Site, compressions: Sequence[Compression] = ()) -> Iterator[Way]:
    """Yield every way worth a thought, one device first."""
    degrees = _degrees(site.ranks)
    splits = degrees if work.layers else [1]
    for data, tensor, pipeline in product(degrees, splits, splits):
        if data * tensor * pipeline > site.ranks:
            continue
        for micro in (1,) if pipeline == 1 else (pipeline, 4 * pipeline):
            yield Way(data, tensor, pipeline, micro)
        if data > 1 and tensor * pipeline == 1:
            if work.layers:
                yield Way(data, mode="sharded")
            yield from _looser(data, compressions)


def _looser(data: int, compressions: Sequence[Compression]) -> Iterator[Way]:
    """Yield the other ways of so many ranks that each have the whole network."""
    for servers in sorted({1, max(1, data // 2)}):
        yield Way(data, mode="server_sync", servers=servers)
        yield Way(data, mode="server_stale", servers=servers, slack=SLACK)
        yield Way(data, mode="server_async", servers=servers)
    yield Way(data, mode="local", period=PERIOD)
    for compression in compressions:
        if compression != PLAIN:
            yield Way(data, compression=compression)


def _degrees(most: int) -> list[int]:
    return [degree for degree in range(1, most + 1) if degree <= ALL_BELOW or degree & (degree - 1) == 0]


def _indivisible(work: Work, way: Way) -> str:
    """Return what cannot be shared like this; empty if all can."""
    if way.data > work.batch:
        return f"does not divide: {way.data} ranks cannot share a batch of {work.batch}"
    if way.pipeline > len(work.layers) > 0:
        return f"does not divide: {len(work.layers)} layers make no {way.pipeline} stages"
    rows = work.batch // way.data
    if rows % way.micro:
        return f"does not divide: {rows} rows of a rank make no {way.micro} equal micro-batches"
    if way.tensor == 1:
        return ""
    shared = [layer for layer in work.layers if layer.units >= SMALL]
    if not shared:
        return f"does not divide: no layer has {SMALL} outputs or more to share"
    wrong = next((layer for layer in shared if layer.units % way.tensor), None)
    if wrong is None:
        return ""
    common = math.gcd(*(layer.units for layer in shared))
    fitting = ", ".join(str(degree) for degree in _degrees(common) if common % degree == 0 and degree > 1)
    return (
        f"does not divide: layer {wrong.name} has {wrong.units} outputs (tensor degrees that fit: {fitting or 'none'})"
    )


def _seconds(candidate: Candidate) -> float:
    return candidate.cost.seconds if candidate.cost else math.inf


def _modesty(candidate: Candidate) -> tuple[float, ...]:
    """Return what orders ways of about the same speed: fewer processes first, then the plainest."""
    way = candidate.way
    return (
        way.ranks + way.servers,
        way.servers,
        way.tensor * way.pipeline,
        way.micro,
        way.mode == "sharded",
        _seconds(candidate),
    )


def _why(best: Candidate, exact: Sequence[Candidate], possible: Sequence[Candidate]) -> str:
    """Say in a sentence why it is the best, and what a faster one would change."""
    alone = next((one for one in possible if one.way == Way()), None)
    losers = [one for one in exact if one is not best and (best.way != Way() or one.way.ranks > 1)]
    if best.way == Way():
        words = "one device is best" + (f": {_loses(losers[0], best)}" if losers else "")
    else:
        gain = f" {_seconds(alone) / _seconds(best):.2f} times as fast as one device" if alone else ""
        words = f"{best.way} is best:{gain or ' one device cannot hold the network'}"
        others = [one for one in losers if one is not alone]
        words += f"; {_loses(others[0], best)}" if others else ""
    faster = [one for one in possible if not one.way.exact and _seconds(one) < (1 - ALIKE) * _seconds(best)]
    if faster:
        words += f". {faster[0].way} would take {1e3 * _seconds(faster[0]):.2f} ms, but learns otherwise"
    return words


def _loses(loser: Candidate, best: Candidate) -> str:
    """Say which term makes the loser lose."""
    assert loser.cost is not None
    assert best.cost is not None
    terms = {
        "compute": (loser.cost.compute, best.cost.compute),
        "communication": (loser.cost.communication, best.cost.communication),
        "waiting": (loser.cost.idle, best.cost.idle),
    }
    worst = max(terms, key=lambda name: terms[name][0] - terms[name][1])
    theirs, ours = (1e3 * seconds for seconds in terms[worst])
    total = f"{1e3 * loser.cost.seconds:.2f} ms against {1e3 * best.cost.seconds:.2f} ms"
    if theirs <= ours:
        return f"{loser.way} would take {total}"
    return f"{loser.way} would take {total}, most of the loss by {worst} ({theirs:.2f} ms against {ours:.2f} ms)"


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"
