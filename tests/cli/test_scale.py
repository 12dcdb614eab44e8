"""`qfleet scale`: a real run grows and shrinks from outside, and what cannot be done is refused in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import command
from started_runs import PROCESSES, Started, lives, training

from qfleet.operating import standing
from qfleet.presets import preset
from qfleet.runtime.ownership import Ownership

ROOM = {
    "elastic.max-actors": "3",
    "elastic.max-learners": "2",
    "elastic.max-shards": "2",
    "network.input.normalize": "False",
    "normalise-rewards": "False",
}


def leave_config(run: Path, **changes: object) -> None:
    run.mkdir(exist_ok=True)
    (run / "config.yaml").write_text(preset("mountaincar").replace(**changes).to_yaml())


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "--actors N, --learners N or --shards N"),
        (["--shards", "0"], "'shards' = 0"),
        (["--actors", "0"], "'actors' = 0"),
        (["--actors", "two"], "'--actors' = "),
        (["--learners", "2"], "is not running (dead)"),
        (["--actor", "2"], "--actors"),
    ],
)
def test_bad_requests_are_refused(
    words: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    leave_config(tmp_path / "run", placement="processes")
    done = command(capsys, "scale", str(tmp_path / "run"), *words)
    assert (done.code, done.out) == (2, "")
    assert told in done.err


def test_a_run_whose_roles_take_turns_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    leave_config(tmp_path / "run")
    done = command(capsys, "scale", str(tmp_path / "run"), "--actors", "2")
    assert done.code == 2
    assert "its roles step in a fixed order" in done.err


def test_a_run_that_does_not_answer_is_told_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qfleet.cli.scale.WAIT_S", 0.3)
    leave_config(tmp_path / "run", placement="processes")
    own = Ownership.acquire(tmp_path / "run", lambda by: True)
    try:
        done = command(capsys, "scale", str(tmp_path / "run"), "--actors", "2")
    finally:
        own.release()
    assert done.code == 3
    assert "has not done so after 0 s" in done.err


def test_whoever_waits_is_told_why_and_still_when_the_wait_is_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qfleet.cli.scale.WAIT_S", 0.0)
    run = tmp_path / "run"
    leave_config(run, placement="processes")

    def told_at_once(path: Path, *numbers: int | None) -> str:
        told = {"event": "waiting", "request": "7", "by": "ann", "text": "shards 2 must wait: a shard died"}
        (path / "events.jsonl").write_text(json.dumps(told) + "\n")
        return "7"

    monkeypatch.setattr("qfleet.runtime.ownership.request_scale", told_at_once)
    own = Ownership.acquire(run, lambda by: True)
    try:
        done = command(capsys, "scale", str(run), "--shards", "2")
    finally:
        own.release()
    assert done.code == 3
    first, second = done.err.splitlines()
    assert "shards 2 must wait: a shard died" in first
    assert "(shards 2 must wait: a shard died); it may still do so" in second


def test_a_request_that_the_next_owner_does_not_know_is_told_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    leave_config(run, placement="processes")
    owners = [Ownership.acquire(run, lambda by: True)]

    def resumed_meanwhile(path: Path, *numbers: int | None) -> str:
        owners.pop().release()
        owners.append(Ownership.acquire(run, lambda by: True))
        return "7"

    monkeypatch.setattr("qfleet.runtime.ownership.request_scale", resumed_meanwhile)
    try:
        done = command(capsys, "scale", str(run), "--actors", "2")
    finally:
        owners.pop().release()
    assert done.code == 3
    assert "has ended before it was scaled" in done.err


@pytest.mark.slow
def test_a_run_grows_and_shrinks_from_outside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Started(tmp_path / "run", {**PROCESSES, **ROOM})

    def living() -> set[str]:
        run.look()
        names = {process.name() for process in run.family.values() if lives(process)}
        return {name for name in names if name.startswith(("actor-", "learner-", "replay-"))}

    try:
        run.wait_for(training, 1.0)
        assert living() == {"actor-0", "actor-1", "learner-0", "replay-0"}
        grown = command(capsys, "scale", str(run.run), "--actors", "3", "--learners", "2", "--shards", "2")
        assert (grown.code, grown.out) == (0, f"{run.run} has 3 actors, 2 learners, 2 shards\n")
        everybody = {"actor-0", "actor-1", "actor-2", "learner-0", "learner-1", "replay-0", "replay-1"}
        run.wait_for(lambda path: living() == everybody)
        run.wait_for(lambda path: (now := standing(path)).actors == 3 and (now.learners, now.shards) == (2, 2))
        refused = command(capsys, "scale", str(run.run), "--actors", "4")
        assert refused.code == 2
        assert "--elastic.max_actors 4" in refused.err
        refused = command(capsys, "scale", str(run.run), "--shards", "3")
        assert refused.code == 2
        assert "--elastic.max_shards 3" in refused.err
        shrunk = command(capsys, "scale", str(run.run), "--actors", "1", "--learners", "1", "--shards", "1")
        assert (shrunk.code, shrunk.out) == (0, f"{run.run} has 1 actor, 1 learner, 1 shard\n")
        run.wait_for(lambda path: living() == {"actor-0", "learner-0", "replay-0"})
        assert "elastic" in command(capsys, "logs", str(run.run)).out
        assert command(capsys, "stop", str(run.run)).code == 0
        assert run.end() == 130
    finally:
        run.clean_up()
