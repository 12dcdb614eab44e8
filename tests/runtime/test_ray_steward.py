"""The steward of a node's roles, without a Ray: orders are carried out once, deaths are told, little is imported."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from toy_roles import Handles, Producer, Settings

from qfleet.runtime.channels import Ports
from qfleet.runtime.child import RoleSetup
from qfleet.runtime.children import Birth
from qfleet.runtime.graph import Graph
from qfleet.runtime.processes import packed
from qfleet.runtime.ray_steward import GONE, Said, Steward

LONG_S = 60.0


@pytest.fixture
def steward() -> Iterator[Steward]:
    made = Steward([], [])
    yield made
    for child in made._children.values():
        child.kill()


def birth(folder: Path) -> Birth:
    """Return that of a role which waits for a command."""
    graph = Graph()
    graph.add(Producer, Settings(), Handles())
    (node,) = graph.nodes
    return RoleSetup(node.name, (packed(node),), Ports(folder), "forkserver", 1, False, folder / "words").birth()


def told(said: Said) -> list[tuple[int, str]]:
    return [(number, answer.what) for number, answer in said.answers]


def test_orders_that_come_twice_or_late_are_carried_out_once(steward: Steward, tmp_path: Path) -> None:
    orders = {0: (1, birth(tmp_path)), 1: (2, birth(tmp_path))}
    began = steward.talk({0: orders[0]}, 0, LONG_S)
    assert began.obeyed == 1, "and it says so at once"
    again = steward.talk(orders, 0, LONG_S)
    assert (again.obeyed, again.pids[1]) == (2, began.pids[1])
    assert list(steward.talk({0: orders[0]}, 0, 0.0).pids) == [1, 2]
    assert steward.talk({5: orders[0]}, 0, 0.0).obeyed == 2, "none before those that are missing"


def test_what_children_say_is_said_until_it_is_known_and_a_death_ends_with_it(steward: Steward, tmp_path: Path) -> None:
    said = steward.talk({0: (4, birth(tmp_path))}, 0, LONG_S)
    while not said.answers:
        said = steward.talk({}, 0, LONG_S)
    assert (said.first, told(said)) == (0, [(4, "built")])
    assert told(steward.talk({}, 0, 0.0)) == [(4, "built")], "the answer may have been lost"
    os.kill(said.pids[4], signal.SIGKILL)
    said = steward.talk({}, 1, LONG_S)
    assert (said.first, told(said)) == (1, [(4, "died"), (4, GONE)])
    assert said.answers[0][1].cause.startswith("its process was killed by SIGKILL")
    assert steward.talk({1: (4, ("run", ""))}, 3, 0.0).pids == {}, "nobody is there to be told"


def test_a_child_that_cannot_be_begun_fails_alone(steward: Steward) -> None:
    said = steward.talk({0: (1, Birth("actor-0", "no_such_method", Path("nowhere"), b""))}, 0, LONG_S)
    assert told(said) == [(1, "failed"), (1, GONE)]
    assert "no_such_method" in said.answers[0][1].cause


def test_a_call_gives_way_to_the_next_one(steward: Steward) -> None:
    first = threading.Thread(target=steward.talk, args=({}, 0, LONG_S), daemon=True)
    first.start()
    began = time.monotonic()
    steward.talk({}, 0, 0.1)
    first.join(LONG_S / 2)
    assert not first.is_alive()
    assert time.monotonic() - began < LONG_S / 2


def test_a_steward_imports_neither_torch_nor_roles() -> None:
    script = "import sys, qfleet.runtime.ray_steward; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert "qfleet.runtime.children" in loaded
    assert not {"torch", "qfleet.runtime.worker", "qfleet.roles"} & set(loaded)
