"""A learner group grows and shrinks: its updates are those of one learner that got the same draws, each once."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from program_cases import short
from scripted_shard import SPEC, Script, ScriptedShard, ScriptHandles

from qfleet.core import codec
from qfleet.core.saving import Saving
from qfleet.core.usercode import UserCode
from qfleet.roles.learner import NO_BATCH, Learner, LearnerHandles
from qfleet.roles.learner_setup import GroupConfig
from qfleet.runtime import checkpoint
from qfleet.runtime.graph import Graph
from qfleet.runtime.inline import InlinePlacement
from qfleet.runtime.processes import ProcessPlacement
from qfleet.setups import learner_setup

SIZE = 32


def scripted(draws: int, ranks: int, folder: Path) -> tuple[Graph, Any]:
    """Return the graph of a scripted shard with room for so many ranks, and a counter of updates."""
    graph = Graph()
    experiment = short(
        "dqn",
        **{
            "network": {"kind": "mlp", "hidden": [16], "input": {"scale": [1.0]}},
            "agent.target": {"kind": "hard", "period": 20},
        },
    )
    batches = [graph.stream(f"batches-{rank}", 3, views=True) for rank in range(ranks)]
    priorities = [graph.stream(f"priorities-{rank}", 5, views=True) for rank in range(ranks)]
    heard = tuple(receiver for _, receiver in priorities)
    sent = tuple(sender for sender, _ in batches)
    shard = ScriptHandles(sent, heard, graph.counter("samples"), graph.keep("replay-0"))
    graph.add(ScriptedShard, Script(draws, SIZE), shard)
    models, _ = graph.stream("models", 64)
    graph.publisher("score")
    for rank in range(ranks):
        handles = LearnerHandles(
            batches=(batches[rank][1],),
            priorities=(priorities[rank][0],),
            weights=graph.publisher("weights") if rank == 0 else None,
            models=models if rank == 0 else None,
            events=None,
            score=graph.subscriber("score"),
            env_steps=graph.counter("env_steps"),
            updates=graph.counter("updates"),
            keep=graph.keep(f"learner-{rank}"),
        )
        group = GroupConfig(rank, ranks, f"file://{folder}/meeting") if ranks > 1 else None
        graph.add(Learner, learner_setup(experiment, SPEC, UserCode(), group), handles)
    return graph, graph.counter("updates")


def finish(placement: Any) -> None:
    until = time.monotonic() + 240
    while not placement.done:
        assert time.monotonic() < until, placement.reports()
        placement.advance()


def save(placement: Any, folder: Path) -> None:
    writing = placement.save(folder)
    saving = Saving(0, lambda: writing.finish() or folder, writing.abandon)
    while not saving.done:
        placement.attend(0.01)
    assert saving.path() == folder


def arrays(folder: Path) -> list[Any]:
    """Return all that the first learner's update consists of: weights, target, moments, counters."""
    return codec.pack(checkpoint.read_state(folder, "learner-0")["update"])[1]


def alone(draws: int, folder: Path) -> list[Any]:
    graph, _ = scripted(draws, 1, folder)
    placement = InlinePlacement(graph)
    finish(placement)
    save(placement, folder)
    placement.close()
    return arrays(folder)


def require_equal(folder: Path, draws: int, reference: Path) -> None:
    """Require that a group saved in a folder what one learner has after the same draws."""
    returned = checkpoint.read_state(folder, "replay-0")["returned"]
    np.testing.assert_array_equal(returned, 1, "priorities of each item come back once")
    reference.mkdir()
    for found, expected in zip(arrays(folder), alone(draws, reference), strict=True):
        np.testing.assert_allclose(found, expected, rtol=2e-4, atol=1e-5)


def place(kind: str, graph: Graph, away: list[str]) -> Any:
    if kind == "processes":
        return ProcessPlacement(graph, away=away, groups=("learner",))
    from qfleet.runtime.ray import RayPlacement

    return RayPlacement(graph, away=away, groups=("learner",))


@pytest.mark.parametrize(
    ("kind", "first", "sizes"),
    [
        ("processes", 1, [2]),
        pytest.param("processes", 2, [3, 1, 2, 3], marks=pytest.mark.slow),
        pytest.param("processes", 3, [1, 3], marks=pytest.mark.slow),
        pytest.param("ray", 1, [2], marks=pytest.mark.slow),
        pytest.param("ray", 2, [3, 1, 2, 3], marks=pytest.mark.slow),
    ],
)
def test_the_updates_of_a_group_that_changes_are_those_of_one_learner(
    kind: str, first: int, sizes: list[int], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if kind == "ray":
        request.getfixturevalue("ray_session")
    draws, ranks = 300 * (len(sizes) + 1), max(first, *sizes)
    graph, counter = scripted(draws, ranks, tmp_path)
    away = [f"learner-{rank}" for rank in range(first, ranks)]
    placement = place(kind, graph, away)
    try:
        updates = placement.open(counter)
        for number, size in enumerate(sizes):
            until = time.monotonic() + 120
            while updates.total() < 60 * (number + 1):
                assert time.monotonic() < until, placement.reports()
                placement.advance()
            if placement.done:
                pytest.fail("the script was over before the group was changed")
            assert not placement.regroup("learner", size, NO_BATCH)
            assert placement.present("learner") == list(range(size))
        finish(placement)
        folder = tmp_path / "saved"
        folder.mkdir()
        save(placement, folder)
        assert updates.total() == draws, "each draw is one update"
    finally:
        placement.close()
    require_equal(folder, draws, tmp_path / "alone")


def test_a_rank_that_dies_just_after_it_parted_is_begun_anew_and_the_group_is_changed_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its death was heard before all others had parted: its life was gone, and to end it was a KeyError."""
    draws = 600
    graph, counter = scripted(draws, 2, tmp_path)
    placement = ProcessPlacement(graph, groups=("learner",))
    ask, deaths = placement._ask, []

    def parting(command: Any, members: Any, *rest: Any) -> Any:
        answers = ask(command, members, *rest)
        if command == "part" and not deaths:
            dead = next(member for member in members if member.name == "learner-1")
            os.kill(placement.pids()[dead.name], signal.SIGKILL)
            until = time.monotonic() + 120
            while dead.died_at is None:
                assert time.monotonic() < until
                placement.attend(0.01)
            deaths.append(dead.name)
        return answers

    monkeypatch.setattr(placement, "_ask", parting)
    try:
        updates = placement.open(counter)
        while not updates.total():
            placement.advance()
        assert "learner-1 died" in placement.regroup("learner", 1, NO_BATCH)
        assert deaths == ["learner-1"]
        assert placement.present("learner") == [0, 1]
        until = time.monotonic() + 120
        while placement.regroup("learner", 1, NO_BATCH):
            assert time.monotonic() < until, placement.reports()
            assert not placement.done, "the script was over before the group was changed"
            placement.advance()
        assert placement.present("learner") == [0]
        finish(placement)
        assert updates.total() == draws, "they had kept all that they had learned when they parted"
    finally:
        placement.close()
