"""Calls between Ray actors that come in another order than they were meant to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from qfleet.runtime.framing import Frame
from qfleet.runtime.graph import Graph
from qfleet.runtime.mail import CALLER, find_routes


def test_a_value_that_comes_before_its_reader_knows_the_others_is_confirmed_all_the_same() -> None:
    """Without that the publisher waits for ever to send a newer one."""
    pytest.importorskip("ray")
    from ray import cloudpickle

    from qfleet.runtime.ray import RoleActor

    graph = Graph()
    own = graph.subscriber("picture")
    calls: list[Any] = []
    publisher = SimpleNamespace(mail=SimpleNamespace(remote=lambda *call: calls.append(call)))
    routes = find_routes(graph)
    routes.holders["picture", "publisher", 0] = "painter-0"
    reader = RoleActor(CALLER, routes, 1)
    reader.mail("update", "picture", own.reader, 7, Frame([1, 2]).to_buffer())
    reader.start({"painter-0": publisher}, [], cloudpickle.dumps(None))
    assert calls == [("confirm", "picture", own.reader, 7)]
    assert reader._room.open(own).latest() == [1, 2]
