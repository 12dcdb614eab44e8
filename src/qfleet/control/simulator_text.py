"""Tells a person what a simulation found, in plain lines, and everything that it took for granted."""

from __future__ import annotations

from qfleet.control.simulator import Simulated, limits
from qfleet.control.simulator_cluster import Cluster

_LABEL = 16


def simulated_text(cluster: Cluster, found: Simulated) -> str:
    """Return the figures of a simulated cluster, what limits it, and the assumptions, as lines of text."""
    shares = f"{found.computing:.0%} computing, {found.exchanging:.0%} exchanging gradients, {found.idle:.0%} idle"
    figures = {
        "cluster": _sizes(cluster),
        "env steps/s": f"{found.env_steps_per_s:,.0f}",
        "updates/s": f"{found.updates_per_s:,.1f} of {cluster.batch:,} rows",
        "a learner": f"{shares} ({found.starved:.0%} without data)",
        "policy lag": f"{found.policy_lag:,.1f} updates",
        "busy": ", ".join(f"{kind} {share:.0%}" for kind, share in found.busy.items()),
        "network": ", ".join(f"{kind} {size / 1e6:,.1f} MB/s" for kind, size in found.bytes_per_s.items()),
        "bottleneck": found.bottleneck,
        "alone": ", ".join(f"{part} {rate:,.1f}" for part, rate in limits(cluster).items()) + " updates/s",
    }
    lines = [f"{name:<{_LABEL}}{text}" for name, text in figures.items()]
    return "\n".join([*lines, "assumed:", *(f"  - {text}" for text in assumptions(cluster, found))])


def _sizes(cluster: Cluster) -> str:
    parts = {"actor": cluster.actors, "shard": cluster.shards, "learner": cluster.learners}
    if cluster.used_servers:
        parts["parameter server"] = cluster.servers
    return ", ".join(f"{count:,} {name}{'s' if count > 1 else ''}" for name, count in parts.items())


def assumptions(cluster: Cluster, found: Simulated) -> list[str]:
    """Return what the simulation takes for granted, a sentence each."""
    link, way = cluster.link, cluster.mode.replace("_", " ")
    gradients = f"{cluster.parameters * cluster.value_bytes / 1e6:,.2f} MB"
    told = [
        "every role has cores or a device of its own, as fast as this machine's: nothing else runs there",
        f"every machine has a link of {8 * link.bandwidth / 1e9:g} Gbit/s each way and {1e6 * link.latency:g} us;"
        " the network between them is never the limit",
        f"an actor makes {cluster.rows} steps in {1e3 * cluster.message:.2f} ms, and makes the next ones while those"
        " are stored; it pauses when learning has no room for more",
        f"a learner computes its {cluster.batch / cluster.learners:,.0f} rows in {1e3 * cluster.compute:.2f} ms, its"
        " next batch on its way meanwhile; gradients leave when all are computed",
        f"{gradients} of gradients by {way} take {1e3 * cluster.exchange:.2f} ms, ring and tree by their formulas",
        f"an update needs {cluster.steps_per_update:,g} new steps; its batch is {cluster.batch_bytes / 1e6:,.1f} MB",
        f"durations are normal with a spread of {cluster.spread:.0%}, each independent of the others",
        f"weights are published every {cluster.publish_period} updates if the link is free, over {cluster.hops} hops"
        f" of {cluster.fanout} machines each",
    ]
    if cluster.raised_from:
        told.append(
            f"the batch is {cluster.batch:,}, not the run's own {cluster.raised_from:,}, which is too small for"
            f" {cluster.learners} learners; each step is learned from as often as in the run"
        )
    if cluster.mode == "server_async":
        told.append("a server applies gradients one by one; an update is as many as there are learners")
    if cluster.failure_s:
        told.append(
            f"a machine fails every {cluster.failure_s / 3600:g} h and is away for {cluster.recovery_s:g} s, with"
            f" {'no other' if cluster.mode == 'server_async' else 'all'} learners"
        )
    if found.grouped > 1:
        told.append(f"{found.grouped} messages of an actor are taken as one")
    return told
