"""Metrics over a real socket: what a run knows is scraped while it trains, on this machine alone."""

from __future__ import annotations

import math
import re
import socket
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from qfleet import Callbacks, api
from qfleet.core.errors import ConfigError, MissingExtra
from qfleet.observe.prometheus import PrometheusSink

LOOPBACK = "127.0.0.1"
SHORT = {
    "env_steps": 1500,
    "evaluation": {"every": 500, "episodes": 2, "test_episodes": 2, "target": None},
    "checkpoint.every": 500,
    "track.every_s": 0.001,
    "topology": "pipeline",
}


@pytest.fixture
def port() -> int:
    """A port that is free now."""
    pytest.importorskip("prometheus_client")
    with socket.socket() as free:
        free.bind((LOOPBACK, 0))
        found: int = free.getsockname()[1]
    return found


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://{LOOPBACK}:{port}/metrics", timeout=10) as answer:
        text: str = answer.read().decode()
    return text


def value(text: str, name: str, **labels: str) -> float:
    inside = ",".join(f'{key}="{label}"' for key, label in sorted(labels.items()))
    (found,) = re.findall(rf"^{name}{{{re.escape(inside)}}} (\S+)$", text, re.M)
    return float(found)


def test_a_run_is_scraped_while_it_trains_and_no_longer_afterwards(port: int, tmp_path: Path) -> None:
    scraped: list[tuple[int, str]] = []

    def on_step(metrics: dict[str, Any], stop: Any) -> None:
        if metrics["env_steps"] >= 1200 and not scraped:
            scraped.append((metrics["env_steps"], scrape(port)))

    run = tmp_path / "run"
    changes = {**SHORT, "track.prometheus": port}
    api.train("cartpole", run_dir=run, callbacks=Callbacks(on_step=on_step), **changes)
    ((steps, text),) = scraped
    name = str(run)
    assert steps - 200 <= value(text, "qfleet_env_steps", run=name) <= steps
    assert value(text, "qfleet_env_steps_budget", run=name) == 1500
    assert value(text, "qfleet_updates", run=name) > 0
    assert 0 <= value(text, "qfleet_busy", run=name, role="learner.0") <= 1
    assert value(text, "qfleet_evaluation_mean", run=name) > 0
    assert value(text, "qfleet_events_total", run=name, event="checkpoint", kind="") >= 1
    assert value(text, "qfleet_event_time_seconds", run=name, event="started", kind="") > 1e9
    with pytest.raises(OSError, match="refused"):
        scrape(port)


def test_only_finite_numbers_are_served_and_what_is_gone_is_not(port: int) -> None:
    sink = PrometheusSink(LOOPBACK, port, 'a "run"\\')
    try:
        sink.metrics({"loss": math.nan, "q_mean": 2.0, "bottleneck": "learner", "actor.0.busy": 0.5, "actor.1.busy": 1})
        text = scrape(port)
        assert set(re.findall(r"^(qfleet_\w+)", text, re.M)) == {"qfleet_q_mean", "qfleet_busy"}
        assert re.findall(r'role="([^"]*)"', text) == ["actor.0", "actor.1"]
        assert 'run="a \\"run\\"\\\\"' in text
        sink.metrics({"loss": 0.5})
        assert set(re.findall(r"^(qfleet_\w+)", scrape(port), re.M)) == {"qfleet_loss"}
        sink.event({"event": "notice", "kind": "unsaved", "time": 5.0})
        labels = {"run": 'a \\"run\\"\\\\', "event": "notice", "kind": "unsaved"}
        assert value(scrape(port), "qfleet_event_time_seconds", **labels) == 5.0
    finally:
        sink.close()
        sink.close()


def test_only_the_given_address_listens(port: int) -> None:
    sink = PrometheusSink(LOOPBACK, port, "run")
    try:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), timeout=5)
    finally:
        sink.close()


def test_a_port_in_use_is_refused_before_training_and_nothing_is_left(port: int, tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind((LOOPBACK, port))
        other.listen()
        with pytest.raises(ConfigError, match=rf"'track.prometheus' = {port}: cannot listen on {LOOPBACK} \(Address"):
            api.train("cartpole", run_dir=tmp_path / "run", **{**SHORT, "track.prometheus": port})
    assert not (tmp_path / "run").exists()


def test_a_name_that_is_no_address_is_refused(port: int) -> None:
    with pytest.raises(ConfigError, match="cannot listen on no-such-host"):
        PrometheusSink("no-such-host.invalid", port, "run")


def test_without_the_extra_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(MissingExtra, match=r"qfleet\[prometheus\]"):
        PrometheusSink(LOOPBACK, 9464, "run")
