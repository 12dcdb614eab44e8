"""The benchmark over a slow link: it says why it cannot run, limits both ends alike, and runs where it can."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path("benchmarks/scaling/link.py")


@pytest.fixture(scope="module")
def link() -> ModuleType:
    spec = importlib.util.spec_from_file_location("link", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_stops_with_the_reason_where_tools_are_missing(link, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["link.py"])
    with pytest.raises(SystemExit, match="skipped: no unshare and no ip and no tc"):
        link.main()


def test_it_stops_with_the_reason_where_namespaces_are_refused(link, monkeypatch, tmp_path):
    for tool in ("unshare", "ip", "tc"):
        (tmp_path / tool).write_text("#!/bin/sh\necho 'Operation not permitted' >&2\nexit 1\n")
        (tmp_path / tool).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert link.obstacle() == "no network namespaces with a slow link here: Operation not permitted"


def test_a_gradient_of_top_k_does_not_slip_through_at_once(link):
    for rate in (10, 100, 1000):
        limit = link.end_commands("near", "10.0.0.1", rate)[-1]
        assert limit[:4] == ("tc", "qdisc", "add", "dev")
        assert limit[limit.index("rate") + 1] == f"{rate}mbit"
        assert 3_000 < int(limit[limit.index("burst") + 1]) < 24_000 / 1.5
    assert all("tc" not in words for words in link.end_commands("near", "10.0.0.1", 0))


@pytest.mark.slow
def test_two_namespaces_sum_gradients_over_a_slow_link(link, tmp_path):
    if reason := link.obstacle():
        pytest.skip(reason)
    words = ["--rates", "100", "--forms", "sign", "--seconds", "1", "--json", str(tmp_path / "found.json")]
    ended = subprocess.run([sys.executable, str(SCRIPT), *words], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    (found,) = json.loads((tmp_path / "found.json").read_text())
    assert 50 < found["bulk_mbit_per_s"] < 105
    none, sign = found["forms"]["none"], found["forms"]["sign"]
    assert none["updates_per_s"] * none["counted_bytes"] * 8 < 105e6  # the link's limit holds for gradients, too
    assert none["counted_bytes"] < none["wire_bytes"] < 1.2 * none["counted_bytes"]
    assert sign["updates_per_s"] > none["updates_per_s"]
