"""Plays whole episodes with a kept model: in this process, or in one whose end an environment may bring about."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from qfleet.algo.flat import FlatParameters
from qfleet.algo.model_io import Model
from qfleet.algo.networks import QNetwork
from qfleet.control.resources import usable_cores
from qfleet.core.errors import QfleetError, RoleFailure
from qfleet.core.protocols import Incident, Placement, Receiver
from qfleet.core.types import Array, Evaluated, Notice, Version
from qfleet.core.usercode import UserCode
from qfleet.envs import make_env
from qfleet.experiment import Experiment
from qfleet.roles.evaluator import EvaluatorHandles, FinalTest, play
from qfleet.roles.weight_store import snapshot
from qfleet.runtime.graph import Graph
from qfleet.setups import test_setup

_TELL_S = 2.0
_TELLINGS = 100
"""How often it is told at most how far a test is: one of an hour must not fill a run's events."""
Announce = Callable[[dict[str, Any]], object]
Asked = Callable[[], bool]
"""Returns whether what is played is to end early."""


@dataclass
class Progress:
    """Tells how far a test is: at its beginning, and every few seconds."""

    episodes: int
    announce: Announce
    _told: tuple[int, float] = field(default=(-1, 0.0), init=False)

    def tell(self, played: int) -> None:
        """Tell how many episodes are over, unless that was told just now or is hardly more than was told last."""
        (known, at), now = self._told, time.monotonic()
        if known < 0 or (played - known >= self.episodes / _TELLINGS and now - at >= _TELL_S):
            self._told = played, now
            self.announce({"event": "testing", "played": played, "episodes": self.episodes})

    def begin_anew(self) -> None:
        """Tell that none is over any more."""
        self._told = (-1, 0.0)
        self.tell(0)


def play_here(
    experiment: Experiment,
    code: UserCode,
    network: QNetwork,
    episodes: int,
    seed: int,
    split: str,
    announce: Announce = lambda event: None,
    asked: Asked = lambda: False,
) -> Array:
    """Play whole episodes of the experiment's environment in this process; returns their scores [episodes].

    Raises KeyboardInterrupt where it is asked to end before that.
    """
    progress = Progress(episodes, announce)
    progress.tell(0)

    def tell(played: int | None) -> None:
        if played is not None:
            progress.tell(played)
        if asked():
            raise KeyboardInterrupt

    env = make_env(experiment.env, min(experiment.evaluation.envs, episodes), evaluation=True, factory=code.env)
    with closing(env):
        returns, _ = play(network, env, experiment.evaluation, seed, split, episodes, tell)
        for text in env.incidents():
            announce(_told(Notice(FinalTest.kind, 0, "environment", text)))
    return np.asarray(returns)


def play_apart(
    experiment: Experiment,
    code: UserCode,
    model: Model,
    announce: Announce,
    asked: Asked,
    closing_begins: Callable[[], object],
) -> Array:
    """Play the run's test episodes with a kept model in a process of their own; returns their scores [episodes].

    That is a run of one role: its environment's faults, and the death of its process, are survived as in training.
    Raises KeyboardInterrupt where it is asked to end before that. `closing_begins` is called when scores are there, or
    will never be, and only the process is left to be ended.
    """
    graph = Graph()
    models, models_out = graph.stream("models", capacity=1)
    evaluated_in, evaluated = graph.stream("evaluated", capacity=64)
    handles = EvaluatorHandles(models_out, evaluated_in, graph.publisher("score"), graph.keep("test-0"))
    graph.add(FinalTest, test_setup(experiment, model.spec, code), handles)
    try:
        with ExitStack() as stack:
            placement = _placed(graph, experiment)
            stack.callback(placement.close)
            stack.callback(closing_begins)
            sender, receiver = placement.open(models), placement.open(evaluated)
            sender.send(snapshot(FlatParameters(model.network), Version(), 0))
            sender.close()
            progress = Progress(experiment.evaluation.test_episodes, announce)
            return _scores(placement, receiver, progress, asked, experiment.survival.restarts)
    except QfleetError as error:
        cause = error.cause if isinstance(error, RoleFailure) else str(error)
        cause = f"{cause}. The run and its model are saved: `qfleet resume` goes on from there to its test"
        raise RoleFailure(FinalTest.kind, 0, cause) from error


def _scores(
    placement: Placement, receiver: Receiver[Evaluated | Notice], progress: Progress, asked: Asked, restarts: int
) -> Array:
    """Listen to a test to its end, telling of what happens; returns its scores [episodes].

    It may begin anew so often, however long it took each time.
    """
    found = np.zeros(0)
    progress.tell(0)
    while True:
        over = placement.done  # asked first: what was said before is then all there
        while (message := receiver.receive()) is not None:
            if isinstance(message, Evaluated):
                found = np.asarray(message.returns)
            else:
                progress.announce(_told(message))
        if over:
            return found
        if asked():
            raise KeyboardInterrupt
        try:
            placement.advance()
        except RoleFailure:
            if not len(found):
                raise
            return found  # its process died when all was said
        for incident in placement.incidents():
            progress.announce(_told(incident))
            progress.begin_anew()
            if isinstance(incident, Incident) and incident.life > restarts and not len(found):
                raise RoleFailure(FinalTest.kind, 0, f"{incident.cause}; that was death {incident.life}", died=True)
        progress.tell(int(placement.reports()[0].metrics.get("played", 0)))


def _placed(graph: Graph, experiment: Experiment) -> Placement:
    """Bring the one role to life; nobody else computes meanwhile, so that it may have all cores."""
    from qfleet.runtime.processes import ProcessPlacement, packed

    pack = packed
    if experiment.placement == "ray":
        from qfleet.runtime.ray import packed as pack  # what was trained there may be more than a module's
    threads = experiment.threads if experiment.in_turns else max(1, int(usable_cores()))
    survival = experiment.survival
    return ProcessPlacement(
        graph, threads={FinalTest.kind: threads}, pack=pack, restarts=survival.restarts, stall=survival.stall_s
    )


def _told(said: Incident | Notice) -> dict[str, Any]:
    """Return the event that tells of an incident or a notice of a test."""
    event = "restart" if isinstance(said, Incident) else "notice"
    return {"event": event, **dataclasses.asdict(said)}
