"""Plays whole episodes with a kept model: in this process, or in one whose end an environment may bring about."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from qfleet.algo.flat import FlatParameters
from qfleet.algo.model_io import Model
from qfleet.algo.networks import QNetwork
from qfleet.control.resources import usable_cores
from qfleet.core.errors import RoleFailure
from qfleet.core.protocols import Incident, Placement
from qfleet.core.types import Array, Evaluated, Notice, Version
from qfleet.core.usercode import UserCode
from qfleet.envs import make_env
from qfleet.experiment import Experiment
from qfleet.roles.evaluator import Evaluator, EvaluatorHandles, play
from qfleet.roles.weight_store import snapshot
from qfleet.runtime.graph import Graph
from qfleet.setups import test_setup

ROLE = "test"
"""Whom events of a final test are about."""
_TELL_S = 2.0
Announce = Callable[[dict[str, Any]], object]


@dataclass
class Progress:
    """Tells how far a test is: at its beginning, and every few seconds."""

    episodes: int
    announce: Announce
    _told: tuple[int, float] = field(default=(-1, 0.0), init=False)

    def tell(self, played: int) -> None:
        """Tell how many episodes are over, unless that is known or was told just now."""
        (known, at), now = self._told, time.monotonic()
        if played > known and (known < 0 or now - at >= _TELL_S):
            self._told = played, now
            self.announce({"event": "testing", "played": played, "episodes": self.episodes})


def play_here(
    experiment: Experiment,
    code: UserCode,
    network: QNetwork,
    episodes: int,
    seed: int,
    split: str,
    announce: Announce = lambda event: None,
) -> Array:
    """Play whole episodes of the experiment's environment in this process; returns their scores [episodes]."""
    progress = Progress(episodes, announce)
    progress.tell(0)
    env = make_env(experiment.env, min(experiment.evaluation.envs, episodes), evaluation=True, factory=code.env)
    with closing(env):
        returns, _ = play(network, env, experiment.evaluation, seed, split, episodes, progress.tell)
        for text in env.incidents():
            announce(_told(Notice(ROLE, 0, "environment", text)))
    return np.asarray(returns)


def test_apart(experiment: Experiment, code: UserCode, model: Model, announce: Announce) -> Array:
    """Play the run's test episodes with a kept model in a process of their own; returns their scores [episodes].

    That is a run of one role: its environment's faults, and the death of its process, are survived as in training.
    """
    graph = Graph()
    models, models_out = graph.stream("models", capacity=1)
    evaluated_in, evaluated = graph.stream("evaluated", capacity=64)
    handles = EvaluatorHandles(models_out, evaluated_in, graph.publisher("score"), graph.keep("evaluator-0"))
    graph.add(Evaluator, test_setup(experiment, model.spec, code), handles)
    progress = Progress(experiment.evaluation.test_episodes, announce)
    progress.tell(0)
    try:
        with closing(_placed(graph, experiment)) as placement:
            sender, receiver = placement.open(models), placement.open(evaluated)
            sender.send(snapshot(FlatParameters(model.network), Version(), 0))
            sender.close()
            while True:
                placement.advance()
                for incident in placement.incidents():
                    announce(_told(incident))
                progress.tell(int(placement.reports()[0].metrics.get("played", 0)))
                while (message := receiver.receive()) is not None:
                    if isinstance(message, Evaluated):
                        return np.asarray(message.returns)
                    announce(_told(message))
    except RoleFailure as failure:
        cause = f"{failure.cause}. The run itself is saved: `qfleet resume` tests its model anew"
        raise RoleFailure(ROLE, 0, cause) from failure


def _placed(graph: Graph, experiment: Experiment) -> Placement:
    """Bring the one role to life; nobody else computes meanwhile, so that it may have all cores."""
    from qfleet.runtime.processes import ProcessPlacement

    threads = experiment.threads if experiment.in_turns else max(1, int(usable_cores()))
    survival = experiment.survival
    return ProcessPlacement(
        graph, threads={Evaluator.kind: threads}, restarts=survival.restarts, stall=survival.stall_s
    )


def _told(said: Incident | Notice) -> dict[str, Any]:
    """Return the event that tells of an incident or a notice of a test."""
    event = "restart" if isinstance(said, Incident) else "notice"
    return {"event": event, **dataclasses.asdict(said), "role": ROLE}
