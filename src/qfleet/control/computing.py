"""Says who computes for the actors of a run that no plan explains."""

from __future__ import annotations

from qfleet.algo.agent import ReplayAgent
from qfleet.experiment import Experiment
from qfleet.roles.inference_server import AdaptiveInference, ServedInference


def who_computes(experiment: Experiment, server_device: str, served: bool | None = None) -> str:
    """Return who computes for the actors, and what would find out whether others are faster; empty where roles are in
    one process.

    `served` says on which side adaptive inference goes on, where that is known of an earlier part of the run.
    """
    inference = experiment.inference
    if experiment.placement == "inline" or experiment.fused:
        return ""
    alone = "each actor computes for itself (cpu)"
    if not isinstance(inference, ServedInference):
        return f"local: {alone}{_found_out(experiment)}"
    servers = "1 server computes" if inference.servers == 1 else f"{inference.servers} servers compute"
    asked = f"{servers} for all actors ({server_device})"
    if not isinstance(inference, AdaptiveInference):
        return f"served: {asked}{_found_out(experiment)}"
    if served is None:
        served = inference.begins == "served"
    first, other = (asked, alone) if served else (alone, asked)
    return f"adaptive: {first} at first; the balancer finds out if the run is faster when {other}"


def _found_out(experiment: Experiment) -> str:
    """Return the flags that find out who computes fastest, as far as the run can have them."""
    ways = ["--inference.kind adaptive"] if experiment.balanced else []
    if experiment.beside and isinstance(experiment.agent, ReplayAgent):
        ways.append("--plan auto")
    return f"; {' or '.join(ways)} would find out what is faster" if ways else ""
