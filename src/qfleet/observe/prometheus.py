"""A sink that Prometheus can scrape: the newest numbers of a run over HTTP (extra `prometheus`)."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from qfleet.core.errors import ConfigError, MissingExtra
from qfleet.observe.sinks import Metrics
from qfleet.observe.text import known
from qfleet.observe.trackers import evaluation_scalars

_ROLE = re.compile(r"(\w+\.\d+)\.(\w+)")


class PrometheusSink:
    """Serves the newest record at http://ADDRESS:PORT/metrics until it is closed.

    Gauges have the names of docs/metrics.md behind `qfleet_`, labelled by run; those of a role by role as well.
    """

    def __init__(self, address: str, port: int, run: str) -> None:
        try:
            from prometheus_client import CollectorRegistry, start_http_server
        except ImportError as error:
            raise MissingExtra("prometheus-client", "prometheus", "serving metrics to Prometheus") from error
        self._run = run
        self._record: Metrics = {}
        self._evaluation: dict[str, float] = {}
        self._events: Counter[tuple[str, str]] = Counter()
        self._times: dict[tuple[str, str], float] = {}
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = start_http_server(port, address, registry)
        except OSError as error:
            raise ConfigError(
                f"'track.prometheus' = {port}: cannot listen on {address} ({error.strerror}); choose another"
            ) from error

    def metrics(self, record: Metrics) -> None:
        """Take the newest numbers."""
        self._record = record

    def event(self, record: Mapping[str, Any]) -> None:
        """Count an event; keep the scores of an evaluation."""
        which = (str(record.get("event")), str(record.get("kind", "")))
        self._times[which] = known(record, "time") or time.time()
        self._events[which] += 1
        if which[0] == "evaluation":
            self._evaluation = evaluation_scalars(record)

    def close(self) -> None:
        """End the server and its thread."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def collect(self) -> Iterator[Any]:
        """Yield what is known now; called by the server's thread for each scrape."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        gauges: dict[str, Any] = {}
        for key, value in {**_numbers(self._record), **_named(self._evaluation)}.items():
            role, name = found.groups() if (found := _ROLE.fullmatch(key)) else ("", key)
            labels = {"run": self._run, **({"role": role} if role else {})}
            text = f"'{name}' of docs/metrics.md"
            gauge = gauges.setdefault(name, GaugeMetricFamily(f"qfleet_{name}", text, labels=list(labels)))
            gauge.add_metric(list(labels.values()), value)
        yield from gauges.values()
        which_one = ["run", "event", "kind"]
        happened = CounterMetricFamily("qfleet_events", "events since this process began", labels=which_one)
        last = GaugeMetricFamily("qfleet_event_time_seconds", "Unix time of the last such event", labels=which_one)
        for which, number in dict(self._events).items():
            happened.add_metric([self._run, *which], number)
            last.add_metric([self._run, *which], self._times[which])
        yield from (happened, last)


def _numbers(record: Metrics) -> dict[str, float]:
    """Return the finite numbers of a record."""
    return {key: value for key in record if (value := known(record, key)) is not None}


def _named(scalars: Mapping[str, float]) -> dict[str, float]:
    """Return chart names as names of metrics: `evaluation/mean` is `evaluation_mean`."""
    return {name.replace("/", "_"): value for name, value in scalars.items()}
