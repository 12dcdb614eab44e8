"""What a run leaves behind in summary.json: its figures, and what they were measured on."""

from __future__ import annotations

import platform
import subprocess
from typing import Any

import numpy as np
import psutil
import torch

from qfleet.algo.agent import ReplayAgent, RolloutAgent
from qfleet.control.monitor import Standing, StopReason
from qfleet.core.statistics import iqm, mean_ci95
from qfleet.core.types import Array
from qfleet.core.versions import versions
from qfleet.experiment import Experiment


def summarise(
    experiment: Experiment,
    standing: Standing,
    reason: StopReason,
    counts: dict[str, int],
    test_returns: Array | None,
) -> dict[str, Any]:
    """Return the summary; `counts` has env_steps, updates and samples (batches drawn) of the whole run."""
    seconds = max(standing.training_s, 1e-9)
    return {
        "preset": experiment.preset,
        "algo": experiment.algo,
        "seed": experiment.seed,
        "topology": "fused" if experiment.fused else "pipeline",
        "placement": experiment.placement,
        "env_steps": counts["env_steps"],
        "updates": counts["updates"],
        "wall_s": standing.training_s,
        "evaluation_s": standing.evaluating_s,
        "env_steps_per_s": counts["env_steps"] / seconds,
        "updates_per_s": counts["updates"] / seconds,
        "eval": None if test_returns is None else _scores(test_returns),
        "target": experiment.evaluation.target,
        "solved": standing.solved if experiment.evaluation.target is not None else None,
        "wall_s_to_target": standing.wall_s_to_target,
        "env_steps_to_target": standing.env_steps_to_target,
        "best_validation": standing.best,
        "samples_per_insert": _samples_per_insert(experiment, counts),
        "policy_lag_mean": standing.policy_lag,
        "stopped_by": reason,
        "plan": None,
        "versions": versions(),
        "git": _git(),
        "hardware": hardware(),
    }


def _samples_per_insert(experiment: Experiment, counts: dict[str, int]) -> float:
    """Return how often a transition was learned from on average; agents without replay take each one equally often."""
    if isinstance(experiment.agent, ReplayAgent):
        return counts["samples"] * experiment.learner.batch_size / max(counts["env_steps"], 1)
    epochs = experiment.agent.epochs if isinstance(experiment.agent, RolloutAgent) else 1
    return float(epochs) if counts["updates"] else 0.0


def _scores(returns: Array) -> dict[str, Any]:
    estimate = mean_ci95(returns, np.random.default_rng(0))
    middle = float(iqm(np.asarray(returns, np.float64)))
    return {"mean": estimate.value, "ci95": [estimate.low, estimate.high], "iqm": middle, "episodes": len(returns)}


def hardware() -> dict[str, Any]:
    """Return what the run could use of this machine."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "cpu": platform.processor() or platform.machine(),
        "cores": psutil.cpu_count(logical=True),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": gpus,
    }


def _git() -> str | None:
    """Return the commit of the working directory, with a plus sign when it has changes; None outside a repository."""
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=True)
        dirty = subprocess.run(["git", "status", "--porcelain"], capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return head.stdout.strip() + ("+" if dirty.stdout else "")
