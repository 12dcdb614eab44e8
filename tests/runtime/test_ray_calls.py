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
from qfleet.runtime.answers import Answer
from qfleet.runtime.channels import lay_out
from qfleet.runtime.children import Birth
from qfleet.runtime.crossings import Depot, Imports, Parcel, Question
from qfleet.runtime.graph import Graph
from qfleet.runtime.latest import LatestPublisher, LatestSubscriber
from qfleet.runtime.streams import StreamReceiver, StreamSender
from qfleet.runtime.supervisor import SupervisedPlacement

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
        self.talk = Method(*said)


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


BIRTH = Birth("actor-0", "forkserver", Path("nowhere"), b"")


def said(obeyed: int = 1, answers: tuple[tuple[int, str], ...] = (), first: int = 0, **report: Any) -> Any:
    """Return what a steward with one child may say, with a report of it."""
    from qfleet.runtime.ray_steward import Said

    told = [(number, Answer(what)) for number, what in answers]
    return Said(pid=7, obeyed=obeyed, first=first, answers=told, pids={1: 8}, **({"reports": [(1, REPORT)]} | report))


class Driver:
    """A driver with one steward and one role, its first child."""

    def __init__(self, actor: Actor) -> None:
        from qfleet.runtime.ray_life import Line, RoleLife

        self.killed: list[int] = []
        self.line = Line(actor, self.killed.append)
        self.life = RoleLife(self.line, BIRTH)

    def hear(self) -> list[Any]:
        self.line.listen()
        return self.life.hear()


def insist(method: Method, *arguments: Any, **patience: float) -> Any:
    from qfleet.runtime import ray_calls

    return ray_calls.insist(method, *arguments, **patience)


def test_a_call_that_is_lost_is_made_again_with_the_same_arguments():
    method = Method(LOST, LOST, "answer")
    assert insist(method, 1, "two") == "answer"
    assert method.calls == [(1, "two")] * 3


@pytest.mark.parametrize("name", ["ActorDiedError", "ActorUnschedulableError", "GetTimeoutError"])
def test_nobody_insists_on_the_dead_or_beyond_his_patience(name):
    """Nor on an actor for a node that is to go, which Ray will never start: a run would stand still for ever."""
    import ray.exceptions

    error = getattr(ray.exceptions, name)(*["no room"] * (name == "ActorUnschedulableError"))
    method = Method(error)
    with pytest.raises(type(error)):
        insist(method, patience_s=1.0)
    assert len(method.calls) == 1


def test_a_call_that_is_lost_is_no_silence_of_the_role():
    """Two losses in a row take Ray four seconds to tell, after which a role that is waited for was taken for dead."""
    driver = Driver(Actor(said(), LOST, LOST, PENDING))
    assert driver.hear() == [REPORT]
    assert driver.hear() == [REPORT]
    assert driver.hear() == [REPORT]
    assert driver.hear() == []


def test_a_command_has_reached_an_actor_when_it_said_so():
    driver = Driver(Actor(said(), LOST, said(obeyed=2), PENDING))
    driver.hear()
    assert driver.line.reached
    driver.life.tell("pause", "")
    assert not driver.line.reached
    driver.hear()
    driver.hear()
    assert driver.line.reached


def test_orders_go_together_and_again_until_they_are_confirmed():
    actor = Actor(said(), PENDING, LOST, said(obeyed=3), PENDING)
    driver = Driver(actor)
    driver.hear()
    driver.life.tell("run", "")
    driver.life.tell("pause", "")
    driver.hear()
    driver.hear()
    orders = [list(call[0]) for call in actor.talk.calls]
    assert orders == [[0], [], [1, 2], [1, 2], []]


def test_answers_are_heard_once_however_often_they_are_said():
    twice = ((1, "built"), (1, "run"))
    actor = Actor(said(answers=twice[:1]), said(answers=twice), said(answers=twice[1:], first=1), PENDING)
    driver = Driver(actor)
    heard = [item.what for _ in range(4) for item in driver.hear() if isinstance(item, Answer)]
    assert heard == ["built", "run"]
    assert [call[1] for call in actor.talk.calls] == [0, 1, 2, 2]


def test_a_verdict_is_the_cause_of_death_and_who_failed_does_not_die_besides():
    ends = ((1, "died"), (1, "gone"))
    driver = Driver(Actor(said(), said(answers=ends), PENDING))
    driver.hear()
    driver.life.condemn("it hung")
    assert driver.killed == [8]
    assert [item for item in driver.hear() if isinstance(item, Answer)] == [Answer("died", "it hung")]
    driver = Driver(Actor(said(answers=((1, "failed"), *ends)), PENDING))
    assert [item.what for item in driver.hear() if isinstance(item, Answer)] == ["failed"]


def test_one_that_is_condemned_before_its_process_is_known_is_killed_then():
    driver = Driver(Actor(said(), PENDING))
    driver.life.condemn("one of its group died")
    assert driver.killed == []
    driver.hear()
    assert driver.killed == [8]


@pytest.mark.parametrize(("name", "detail"), [("ActorDiedError", []), ("ActorUnschedulableError", ["no room"])])
def test_all_children_die_with_their_steward(name, detail):
    import ray.exceptions

    from qfleet.runtime.ray_life import RoleLife

    driver = Driver(Actor(said(), getattr(ray.exceptions, name)(*detail)))
    other = RoleLife(driver.line, BIRTH)
    driver.hear()
    driver.line.listen()
    causes = [item.cause for life in (driver.life, other) for item in life.hear() if isinstance(item, Answer)]
    assert [cause.split(":")[0] for cause in causes] == ["its Ray actor died"] * 2
    assert driver.line.lost
    driver.life.join(time.monotonic() + 60)  # which does not wait for the dead


def test_a_steward_that_says_nothing_of_a_child_that_must_end_is_killed(monkeypatch):
    import ray

    clock, ended = [0.0], []
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(ray, "kill", ended.append)
    actor = Actor(said(), PENDING)
    driver = Driver(actor)
    driver.hear()
    clock[0] = 30.0
    driver.hear()
    assert ended == []  # a role may work for long, and its steward with it
    driver.life.condemn("it hung")
    driver.hear()
    assert (ended, driver.killed) == ([actor], [8, 7])


def test_a_steward_that_ray_never_starts_is_given_up_with_a_child_that_must_end(monkeypatch):
    """A GPU that another program has, say: the watchdog's verdict had no effect, and the run stood still."""
    import ray

    clock, ended = [0.0], []
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(ray, "kill", ended.append)
    actor = Actor(PENDING)
    driver = Driver(actor)
    driver.life.condemn("it has been starting for ten minutes")
    assert driver.hear() == []  # it may still start
    clock[0] = 61.0
    driver.line.listen()
    assert driver.life.hear() == [Answer("died", "it has been starting for ten minutes")]
    assert (ended, driver.line.lost) == ([actor], True)


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
    hear: list[Callable[[], Any]] = [Driver(actor).hear for actor in (spoken, silent)]
    for clock[0] in (0.1, 0.9, 1.2, 1.3):
        for each in hear:
            each()
    assert len(spoken.talk.calls) == 3
    assert len(silent.talk.calls) == 1  # it may still start


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
    from qfleet.runtime.ray_keeper import Keeper

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
