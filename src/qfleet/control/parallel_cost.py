"""Predicts what one update costs when ranks share it: seconds of compute, communication and waiting, and memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from qfleet.control.measurements import Curve, at
from qfleet.control.parallel_parts import PLAIN, VALUE, Layer, Site, Way, Work
from qfleet.control.parallel_traffic import exchange_seconds, gather_seconds, ring_seconds, server_seconds, slowest
from qfleet.parallel.buckets import BUCKET_BYTES

Stage = tuple[Layer, ...]


@dataclass(frozen=True)
class Cost:
    """Seconds of one update of the whole batch by what a rank does meanwhile, and the bytes that it needs."""

    compute: float
    communication: float
    idle: float
    """Waiting for slower ranks, for a pipeline to fill and to drain, for a busy server."""
    memory: int

    @property
    def seconds(self) -> float:
        """Of one update."""
        return self.compute + self.communication + self.idle


def predict(work: Work, site: Site, way: Way) -> Cost:
    """Return what an update costs; the way must be feasible."""
    rows = math.ceil(work.batch / way.data)
    if way.tensor * way.pipeline > 1:
        return _split(work, site, way, rows)
    if way.mode == "sharded":
        return _sharded(work, site, way, rows)
    own = at(work.update, rows) * site.slow(way.ranks)
    memory = _memory(work, way, work.layers, rows)
    behind = own * work.spread * slowest(way.data)
    if way.servers:
        return _served(work, site, way, (own, behind, memory))
    wire, coding = _exchanged(work, site, way, work.parameters)
    if way.exact and not site.shared:
        wire = _exposed(work, wire, own)
    if way.mode == "local":
        # The slowest of many sums of H updates is behind by the root of H, not by H.
        return Cost(own + coding / way.period, wire / way.period, behind / math.sqrt(way.period), memory)
    return Cost(own + coding, wire, behind, memory)


def _exchanged(work: Work, site: Site, way: Way, values: int) -> tuple[float, float]:
    """Return the seconds of the data ranks' sum of so many values on the wire, and of coding."""
    links = site.link("reduce", way.ranks), site.link("gather", way.ranks)
    wire, coding = exchange_seconds(*links, way.data, values, way.compression)
    return wire, coding * site.slow(way.ranks)


def _exposed(work: Work, wire: float, own: float) -> float:
    """Return the seconds of a sum that the backward pass does not hide: its last piece, and what takes longer.

    Ranks that share cores hide nothing: sums need them too.
    """
    backward = sum(at(layer.backward, work.batch) for layer in work.layers)
    forward = sum(at(layer.forward, work.batch) for layer in work.layers)
    pieces = math.ceil(work.parameters * VALUE / BUCKET_BYTES) or 1
    hiding = own * backward / ((1 + work.passes) * forward + backward) if backward else 0.0
    return max(wire / pieces, wire - hiding)


def _served(work: Work, site: Site, way: Way, worked: tuple[float, float, int]) -> Cost:
    """Return what an update costs with parameter servers; `worked` is seconds of compute and waiting, and bytes."""
    computing, behind, memory = worked
    how, values = way.compression, work.parameters
    own, busy = server_seconds(site.link("gather", way.ranks + way.servers), way.data, way.servers, values, how)
    slow = site.slow(way.ranks)
    applied = work.step * slow / way.servers
    computing += (values * how.encode - work.step) * slow  # servers make the steps
    if way.mode == "server_sync":
        return Cost(computing + applied, max(own, busy), behind, memory)
    # Gradients are applied one by one, so that a server makes a step for each worker's part of the batch.
    queue = busy + way.data * (applied + values * how.decode * slow / way.servers)
    waiting = behind / (1 + way.slack) if way.mode == "server_stale" else 0.0
    return Cost(computing, own, max(waiting, queue - computing - own, 0.0), memory)


def _sharded(work: Work, site: Site, way: Way, rows: int) -> Cost:
    """Return what an update costs when each rank keeps its part of every layer: all passes gather them, one by one.

    It is computed layer by layer, which is never faster than as the run would otherwise; handling a layer is taken to
    cost as much as where tensor ranks share it.
    """
    passes, sizes = 2 + work.passes, [VALUE * layer.parameters for layer in work.layers]
    computed = max(_stage_seconds(work, work.layers, 1, rows) + at(work.rest, rows), at(work.update, rows) - work.step)
    handled = passes * len(sizes) * site.handling.layer
    own = site.slow(way.ranks) * (computed + work.step / way.data + handled)
    reduce, gather = site.link("reduce", way.ranks), site.link("gather", way.ranks)
    gathered = passes * sum(gather_seconds(gather, way.data, size / way.data) for size in sizes)
    # A rank gets its part of the sum only: half of a ring.
    summed = sum(ring_seconds(reduce, way.data, size) for size in sizes) / 2
    memory = _memory(work, way, work.layers, rows)
    return Cost(own, gathered + summed, own * work.spread * slowest(way.data), memory)


def _split(work: Work, site: Site, way: Way, rows: int) -> Cost:
    """Return what an update costs when the network is cut into stages, and their layers into parts."""
    micro, slow = math.ceil(rows / way.micro), site.slow(way.ranks)
    stages = cut(work, way.pipeline, micro)
    busy = [
        slow * (_stage_seconds(work, stage, way.tensor, micro) + _handled(work, site, way, stage)) for stage in stages
    ]
    talk = [_tensor_seconds(work, site, way, stage, micro) for stage in stages]
    slots = [computed + talked for computed, talked in zip(busy, talk, strict=True)]
    parts = way.tensor * way.pipeline
    once = slow * (_shared(work.rest, rows, parts) + work.step / parts)
    wire, coding = _exchanged(work, site, way, max(_parameters(stage, way.tensor) for stage in stages))
    compute, talked = (way.micro * sum(seconds) / way.pipeline for seconds in (busy, talk))
    # Ranks that wait leave shared cores to the others, so that nothing is lost by waiting.
    crowded = site.shared and way.ranks > site.cores
    critical = compute + talked if crowded else sum(slots) + (way.micro - 1) * max(slots)
    behind = (compute + once) * work.spread * slowest(way.ranks)
    memory = max(_memory(work, way, stage, rows) for stage in stages)
    idle = max(0.0, critical - compute - talked) + behind
    return Cost(compute + once + coding, talked + _hops(work, site, way, stages, micro) + wire, idle, memory)


def _handled(work: Work, site: Site, way: Way, stage: Stage) -> float:
    """Return the seconds that all passes of one micro-batch through a stage cost besides computing and bytes."""
    layers = sum(layer.split(way.tensor) > 1 for layer in stage)
    through = site.handling.micro_batch if way.pipeline > 1 else 0.0
    return (2 + work.passes) * (layers * site.handling.layer + through)


def cut(work: Work, pipeline: int, rows: int) -> list[Stage]:
    """Return the layers as so many stages, cut where the slowest stage takes least."""
    seconds = [_stage_seconds(work, (layer,), 1, rows) for layer in work.layers]
    # By how many layers are dealt with: the slowest stage so far, and where each stage ends.
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for number in range(1, pipeline + 1):
        ends = range(number, len(seconds) - (pipeline - number) + 1)
        best = {
            end: min(
                (max(slow, sum(seconds[begin:end])), (*cuts, end))
                for begin, (slow, cuts) in best.items()
                if begin < end
            )
            for end in ends
        }
    cuts = best[len(seconds)][1]
    return [work.layers[begin:end] for begin, end in pairwise((0, *cuts))]


def _stage_seconds(work: Work, stage: Stage, tensor: int, rows: int) -> float:
    """Return the seconds of one stage's passes for so many rows."""
    forward = sum(_shared(layer.forward, rows, layer.split(tensor)) for layer in stage)
    backward = sum(_shared(layer.backward, rows, layer.split(tensor)) for layer in stage)
    return (1 + work.passes) * forward + backward


def _shared(curve: Curve, rows: int, parts: int) -> float:
    """Return the seconds of one part of a layer; what a call costs without any rows is not shared."""
    called = at(curve, 0) if len(curve) > 1 else 0.0
    return called + (at(curve, rows) - called) / parts


def _tensor_seconds(work: Work, site: Site, way: Way, stage: Stage, rows: int) -> float:
    """Return the seconds of the sums between tensor ranks.

    Split layers come in pairs, by outputs and then by inputs: one sum of the second one's outputs on the way forward,
    and one of the first one's input gradients on the way back.
    """
    split = [layer for layer in stage if layer.split(way.tensor) > 1]
    link = site.link("reduce", way.ranks)
    ends = [*split[1::2], *(split[-1:] if len(split) % 2 else [])]
    begins = [layer for layer in split[::2] if layer is not work.layers[0]]  # nobody needs the input's gradient
    forward = sum(ring_seconds(link, way.tensor, VALUE * rows * layer.outputs) for layer in ends)
    backward = sum(ring_seconds(link, way.tensor, VALUE * rows * layer.inputs) for layer in begins)
    return (1 + work.passes) * forward + backward


def _hops(work: Work, site: Site, way: Way, stages: list[Stage], rows: int) -> float:
    """Return the seconds of sending that nothing hides: each boundary once in every pass while the pipeline fills."""
    link = site.link("gather", way.ranks)
    return sum((2 + work.passes) * link.seconds(VALUE * rows * stage[-1].outputs) for stage in stages[:-1])


def _parameters(stage: Stage, tensor: int) -> int:
    return sum(math.ceil(layer.parameters / layer.split(tensor)) for layer in stage)


def _memory(work: Work, way: Way, stage: Stage, rows: int) -> int:
    """Return the bytes of one rank: weights, gradients, target, moments, what was not sent yet, and activations."""
    unsent = 0 if way.compression == PLAIN else 1
    moments = 0 if way.servers else work.moments
    kept = (3 + moments + unsent) * _parameters(stage, way.tensor)
    if way.mode == "sharded":  # and one layer with its gradient at a time
        kept = math.ceil(kept / way.data) + 2 * max(layer.parameters for layer in stage)
    activations = sum(layer.outputs / layer.split(way.tensor) for layer in stage)
    return int(VALUE * (kept + rows * activations))
