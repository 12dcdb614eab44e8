"""What becomes of calls that Ray loses on their way, told by actors that only pretend to be Ray's."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from toy_roles import kept_pipeline

from qfleet.core.protocols import Report
from qfleet.runtime.channels import lay_out
from qfleet.runtime.crossings import Depot, Imports, Parcel, Question
from qfleet.runtime.graph import Graph
from qfleet.runtime.latest import LatestPublisher, LatestSubscriber
from qfleet.runtime.streams import StreamReceiver, StreamSender
from qfleet.runtime.supervisor import SupervisedPlacement
from qfleet.runtime.worker import Answer

REPORT = Report("actor", 0, "running", {}, 0.0, {})
LOST, PENDING = object(), object()


class Method:
    """An actor's method; each call is answered by the next of what is given, and the last one is then always given."""

    def __init__(self, *outcomes: Any) -> None:
        self._outcomes, self.calls = list(outcomes), []

    def remote(self, *arguments: Any) -> Any:
        self.calls.append(arguments)
        return self._outcomes.pop(0) if len(self._outcomes) > 1 else self._outcomes[0]


class Actor:
    def __init__(self, *said: Any) -> None:
        self.live, self.talk = Method(None), Method(*said)


@pytest.fixture(autouse=True)
def pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls are their own answers, and errors those that are raised. Ray is imported here, which takes a second."""
    ray = pytest.importorskip("ray")
    from ray.exceptions import ActorUnavailableError

    from qfleet.runtime import ray_calls

    def get(call: Any, timeout: float | None = None) -> Any:
        if call is LOST:
            raise ActorUnavailableError("lost", None)
        if isinstance(call, Exception):
            raise call
        return call

    def wait(calls: list[Any], **_: Any) -> tuple[list[Any], list[Any]]:
        return [call for call in calls if call is not PENDING], [call for call in calls if call is PENDING]

    monkeypatch.setattr(ray_calls, "AGAIN_S", 0.0)
    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "wait", wait)


def said(obeyed: int = 0) -> Any:
    from qfleet.runtime.ray_actors import Said

    return Said(pid=7, obeyed=obeyed, first=0, answers=[], reports=[REPORT])


def life_of(actor: Actor) -> Any:
    from qfleet.runtime.ray_life import ActorLife

    return ActorLife(actor, None, lambda pid: None)


def insist(method: Method, *arguments: Any, **patience: float) -> Any:
    from qfleet.runtime import ray_calls

    return ray_calls.insist(method, *arguments, **patience)


def test_a_call_that_is_lost_is_made_again_with_the_same_arguments():
    method = Method(LOST, LOST, "answer")
    assert insist(method, 1, "two") == "answer"
    assert method.calls == [(1, "two")] * 3


@pytest.mark.parametrize("name", ["ActorDiedError", "GetTimeoutError"])
def test_nobody_insists_on_the_dead_or_beyond_his_patience(name):
    import ray.exceptions

    error = getattr(ray.exceptions, name)()
    method = Method(error)
    with pytest.raises(type(error)):
        insist(method, patience_s=1.0)
    assert len(method.calls) == 1


def test_a_call_that_is_lost_is_no_silence_of_the_role():
    """Two losses in a row take Ray four seconds to tell, after which a role that is waited for was taken for dead."""
    life = life_of(Actor(said(), LOST, LOST, PENDING))
    assert life.hear() == [REPORT]
    assert life.hear() == [REPORT]
    assert life.hear() == [REPORT]
    assert life.hear() == []


def test_a_command_has_reached_an_actor_when_it_said_so():
    life = life_of(Actor(said(), LOST, said(obeyed=1), PENDING))
    life.hear()
    assert life.reached
    life.tell("pause", "")
    assert not life.reached
    life.hear()
    assert life.reached


class Pausing(SupervisedPlacement):
    """Two roles: the first one stops at once, the second when it has heard of it, some rounds of listening later."""

    def __init__(self, deaf: int) -> None:
        super().__init__(kept_pipeline(1))
        self._running, self._deaf, self._waiting = True, deaf, []
        self.told: list[str] = []

    def _tell(self, member: Any, command: Any, argument: str) -> None:
        self.told.append(member.name)
        self._waiting.append(member)

    def _reached(self, member: Any) -> bool:
        return member is self.crew[0] or self._deaf < 0

    def _listen(self, seconds: float) -> list[Any]:
        self._deaf -= 1
        ready = [member for member in self._waiting if member is self.crew[0] or self._deaf < 0]
        self._waiting = [member for member in self._waiting if member not in ready]
        return [(member, Answer("pause")) for member in ready]

    def _capture_own_ends(self, directory: Path) -> list[Callable[[], None]]:
        return []

    def _restore_own_ends(self, directory: Path) -> None: ...

    def _end(self) -> None: ...


def test_those_that_are_paused_are_not_told_again_while_a_command_may_be_lost():
    placement = Pausing(deaf=20)
    placement.pause()
    assert placement.told == [member.name for member in placement.crew]


def test_an_answer_that_is_overdue_is_asked_for_again_once_the_role_has_spoken(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    spoken, silent = Actor(said(), PENDING), Actor(PENDING)
    hear: list[Callable[[], Any]] = [life_of(actor).hear for actor in (spoken, silent)]
    for clock[0] in (0.1, 0.9, 1.2, 1.3):
        for each in hear:
            each()
    assert len(spoken.talk.calls) == 3
    assert len(silent.talk.calls) == 1  # it may still import


class Asked:
    """A keeper of another node, whose first value is forgotten on its way."""

    def __init__(self, depot: Depot) -> None:
        self._depot, self.late, self.fetch = depot, True, self

    def remote(self, asker: str, question: Question, patience: float) -> Parcel:
        from ray.exceptions import GetTimeoutError

        parcel, late = self._depot.answer(asker, question), self.late
        self.late = False
        values = {edge: (stamp, GetTimeoutError()) for edge, (stamp, _) in parcel.values.items()}
        return dataclasses.replace(parcel, values=values) if late else parcel


def test_messages_do_not_wait_for_a_value_that_ray_forgets_and_it_is_asked_for_again(tmp_path: Path) -> None:
    """A rank would stand still for a batch that has come to its node, behind weights that never do."""
    from qfleet.runtime.ray_actors import Keeper

    here, there = tmp_path / "here", tmp_path / "there"
    for place in (here, there):
        place.mkdir()
        lay_out(Graph(streams={"edge": 3}, latest_values={"news": 1}), place)
    crossing = Imports(streams=("edge",), values=("news",))
    source = Asked(Depot(here, {}, {"there": crossing}))
    StreamSender(here / "edge").send(1)
    LatestPublisher(here / "news").publish(2)
    keeper = Keeper(there)
    keeper.begin("there", {"here": source}, {"here": crossing}, {}, {})
    assert not keeper._ask("here", 0.0)
    receiver, subscriber = StreamReceiver(there / "edge"), LatestSubscriber(there / "news")
    assert (receiver.receive(), subscriber.latest()) == (1, None)
    keeper.settle()
    assert (receiver.receive(), subscriber.latest()) == (None, 2)
