"""What several learners of a run cost here: measured or remembered; and which plan for them is chosen."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from qfleet.control.kept import KeptFile
from qfleet.control.measurements import QUIET
from qfleet.control.parallel_layers import measure_layers
from qfleet.control.parallel_links import RANKS, LocalRanks, measure_links
from qfleet.control.parallel_parts import Compression, Site, Work
from qfleet.control.parallel_ways import Choice, weigh
from qfleet.control.resources import Resources
from qfleet.control.rig import core_share
from qfleet.roles.learner_setup import LearnerSetup

Kept = TypeVar("Kept")
Say = Callable[[str], object]
LOOK_S = 0.1
"""How long it is looked, before and after, whether other programs want the core."""
WORKS = KeptFile("parallel_work.json", Work)
LINKS = KeptFile("parallel_links.json", LocalRanks)


def known_work(setup: LearnerSetup, key: Mapping[str, Any], say: Say, fresh: bool = False) -> Work:
    """Return what an update of the learner costs on this machine; `key` holds all that decides about it."""
    key = {**key, "batch": setup.learner.batch_size, "device": setup.device, "threads": torch.get_num_threads()}
    return _known(WORKS, key, partial(measure_layers, setup), partial(say, "timing the network layer by layer"), fresh)


def known_links(resources: Resources, say: Say, fresh: bool = False) -> LocalRanks:
    """Return how ranks of this machine talk to each other and slow each other down."""
    key = {"machine": [resources.cpu, resources.cores], "torch": torch.__version__, "ranks": RANKS}
    return _known(LINKS, key, measure_links, partial(say, "timing sums between ranks"), fresh)


def _known(
    kept: KeptFile[Kept], key: Mapping[str, Any], measure: Callable[[], Kept], say: Callable[[], object], fresh: bool
) -> Kept:
    """Return what is kept for the key, or measure it, and keep it if no other program wanted the core."""
    known = None if fresh else kept.find(key)
    if known is not None:
        return known
    say()
    share, measured = core_share(LOOK_S), measure()
    if min(share, core_share(LOOK_S)) >= QUIET:
        with contextlib.suppress(OSError):  # a cache that cannot be written only costs the next plan its time
            kept.store(key, measured)
    return measured


def site_of(device: str, resources: Resources, links: LocalRanks) -> Site:
    """Return this machine as a place for learner ranks: its GPUs, or its cores with one rank each and two at least."""
    if torch.device(device).type == "cuda":
        memory = min(gpu.memory for gpu in resources.gpus)  # any of them may be a rank's
        return Site(links.fabric, memory, len(resources.gpus), handling=links.handling)
    ranks = max(2, int(resources.cores))
    return Site(links.fabric, resources.memory, ranks, resources.cores, links.handling, links.slowdown)


def plan_learners(
    setup: LearnerSetup,
    key: Mapping[str, Any],
    resources: Resources,
    say: Say,
    fresh: bool = False,
    forms: Callable[[int], Sequence[Compression]] = lambda values: (),
) -> tuple[Choice, Work]:
    """Return how ranks on this machine would best share an update of the learner, and what the whole of it costs.

    `key` holds all that decides about an update, as `machine.key_of` returns it; `forms` gives the compressed forms of
    so many values that are considered.
    """
    work = known_work(setup, key, say, fresh)
    site = site_of(setup.device, resources, known_links(resources, say, fresh))
    return weigh(work, site, forms(work.parameters)), work
