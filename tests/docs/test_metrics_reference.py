"""Compares docs/metrics.md with what real short runs write: nothing undocumented, and all that is promised."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from pages import DOCS, sections, table_keys

PAGE = DOCS / "metrics.md"
SHORT = {
    "env_steps": 1500,
    "evaluation.every": 1000,
    "evaluation.episodes": 2,
    "evaluation.test_episodes": 2,
    "track.every_s": 0.2,
}
SERVED = {"placement": "processes", "inference.kind": "served", "inference.device": "cpu"}
Record = dict[str, Any]


@pytest.fixture(
    scope="module",
    params=[
        "mountaincar dqn",
        "mountaincar rainbow",
        "mountaincar pqn",
        "recall r2d2",
        "maze tabular",
        "cartpole dqn",
        "cartpole pqn",
        "mountaincar dqn served",
    ],
)
def run_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from qfleet import api
    from qfleet.experiment import with_changes
    from qfleet.presets import preset
    from qfleet.presets.algorithms import apply

    task, algorithm, *placed = request.param.split()
    experiment = with_changes(apply(preset(task), algorithm), SHORT | (SERVED if placed else {}))
    directory = tmp_path_factory.mktemp("metrics") / algorithm
    api.train(experiment, run_dir=directory)
    api.resume(directory, env_steps=2500)
    return directory


def records(path: Path) -> list[Record]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def common(key: str) -> str:
    """Return the documented form of a key: each role's figures are documented once, as ROLE.N.what."""
    return re.sub(r"^(actor|replay|learner|evaluator|fused|inference)\.\d+\.", "ROLE.N.", key)


def compare(found: list[Record], documented: dict[str, str], what: str) -> None:
    keys = [{common(key) for key in record} for record in found]
    assert set().union(*keys) - set(documented) == set(), f"{what}: written but not documented"
    always = {key for key, when in documented.items() if when == "always"}
    assert [always - present for present in keys if always - present] == [], f"{what}: documented but not written"


def test_metrics_jsonl(run_dir: Path) -> None:
    found = records(run_dir / "metrics.jsonl")
    assert found
    compare(found, table_keys(sections(PAGE, 2)["metrics.jsonl"]), "metrics.jsonl")


def test_events_jsonl(run_dir: Path) -> None:
    found = records(run_dir / "events.jsonl")
    assert {"started", "evaluation", "checkpoint", "finished", "resumed"} <= {record["event"] for record in found}
    every = table_keys(sections(PAGE, 2)["events.jsonl"].split("###")[0])
    kinds = sections(PAGE, 3)
    for record in found:
        compare([record], {**every, **table_keys(kinds[record["event"]])}, f"events.jsonl, {record['event']}")


def test_summary_json(run_dir: Path) -> None:
    summary = json.loads((run_dir / "summary.json").read_text())
    compare([summary], table_keys(sections(PAGE, 2)["summary.json"].split("###")[0]), "summary.json")
    compare([summary["eval"]], table_keys(sections(PAGE, 3)["eval"]), "summary.json, eval")


def test_every_event_that_the_source_announces_is_documented() -> None:
    source = Path(__file__).parents[2] / "src" / "qfleet"
    announced = {name for path in source.rglob("*.py") for name in re.findall(r'"event": "(\w+)"', path.read_text())}
    assert announced <= set(sections(PAGE, 3))


def test_the_notices_that_a_status_counts_as_faults_are_documented() -> None:
    from qfleet.operating import FAULTS

    (kinds,) = re.findall(r"^\| `kind` \| always \| (.*) \|$", sections(PAGE, 3)["notice"], re.M)
    assert set(FAULTS) <= set(re.findall(r"`(\w+)`", kinds))
