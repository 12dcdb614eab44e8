"""Groups of roles: who dies with whom, and who leaves for good."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from toy_roles import Consumer, Handles, Producer, Settings

from qfleet.runtime.graph import Graph
from qfleet.runtime.groups import Groups


def graph_of(size: int) -> Graph:
    graph = Graph()
    for _ in range(size):
        graph.add(Producer, Settings(), Handles())
    graph.add(Consumer, Settings(), Handles())
    return graph


@given(size=st.integers(1, 5), deaths=st.lists(st.integers(0, 4), max_size=8), dwindles=st.booleans())
def test_a_group_loses_its_last_at_each_death_until_one_is_left(size, deaths, dwindles):
    graph = graph_of(size)
    kind = graph.nodes[0].kind
    groups = Groups(graph, (kind,), (kind,) if dwindles else ())
    everybody = [node.name for node in graph.nodes[:-1]]
    left = list(everybody)
    for death in deaths:
        dead = left[death % len(left)]
        leaver = groups.leaver(dead)
        assert leaver == (left[-1] if dwindles and len(left) > 1 else None)
        if leaver is not None:
            left.pop()
            assert groups.leave(leaver) == left
        assert all(groups.of(name) == left for name in left)
        assert groups.drawn[dead] == size
    alone = graph.nodes[-1].name
    assert groups.of(alone) == [alone]
    assert groups.leaver(alone) is None


@given(size=st.integers(1, 5), sizes=st.lists(st.integers(1, 5), max_size=5))
def test_a_group_is_those_it_was_formed_of_and_the_others_are_alone(size, sizes):
    graph = graph_of(size)
    kind, alone = graph.nodes[0].kind, graph.nodes[-1].name
    groups = Groups(graph, (kind,), (kind,))
    everybody = [node.name for node in graph.nodes[:-1]]
    for wanted in sizes:
        members = everybody[:wanted]
        groups.form(kind, members)
        assert all(groups.of(name) == members for name in members)
        assert all(groups.of(name) == [name] for name in everybody[wanted:])
        assert groups.leaver(members[0]) == (members[-1] if len(members) > 1 else None)
        assert groups.of(alone) == [alone]
