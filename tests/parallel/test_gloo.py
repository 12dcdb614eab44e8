"""Gloo for meshes: collectives of one group follow each other, since two at a time spoil the process's memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from qfleet.parallel.mesh import Degrees, Mesh

MANY = """
import sys, time, torch
from qfleet.parallel.mesh import Degrees, Mesh
group = Mesh(Degrees(), 0, 1, sys.argv[1], "cpu", 10.0).group("tensor")
one, part, whole = torch.zeros(4), torch.zeros(4), torch.zeros(4)
end = time.monotonic() + 30
while time.monotonic() < end:
    works = []
    for _ in range(8):
        works += [group.allreduce([one]), group.allgather_into_tensor_coalesced([whole], [part])]
    for work in works:
        work.wait()
"""


def test_groups_of_a_mesh_have_one_thread_each(tmp_path: Path) -> None:
    """Also those that torch makes beside the first one, for the dimensions of a mesh."""
    mesh = Mesh(Degrees(), 0, 1, f"file://{tmp_path}/meet", "cpu", 10.0)
    try:
        for group in (mesh.group("tensor"), distributed.new_group([0])):
            backend: Any = group._get_backend(torch.device("cpu"))
            assert backend.options._threads == 1
    finally:
        mesh.close()


def test_ranks_talk_by_the_interfaces_that_a_person_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    with pytest.raises(ConnectionError, match="nowhere0"):
        Mesh(Degrees(), 0, 1, f"file://{tmp_path}/meet", "cpu", 1.0)


@pytest.mark.slow
def test_collectives_of_long_and_short_names_spoil_no_memory(tmp_path: Path) -> None:
    """With two threads glibc ends the process within some seconds."""
    done = subprocess.run([sys.executable, "-c", MANY, f"file://{tmp_path}/meet"], stderr=subprocess.PIPE, timeout=120)
    assert done.returncode == 0, done.stderr.decode()[-500:]
