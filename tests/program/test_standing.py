"""Reading runs that are being written: the newest whole record, every event once, and a stop in another thread."""

from __future__ import annotations

import json
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from program_cases import short

import qfleet.operating as operating
from qfleet import api
from qfleet.cli.logs import Tail
from qfleet.control.monitor import Callbacks
from qfleet.observe.sinks import read_jsonl
from qfleet.operating import newest_record, standing
from qfleet.runtime.ownership import request_end

RECORDS = st.lists(st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=30), max_size=4), max_size=8)


def written(records: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


@given(RECORDS, st.data(), st.integers(1, 40))
def test_the_newest_record_is_the_last_whole_one_wherever_a_file_was_cut(
    records: list[dict[str, Any]], data: st.DataObject, block: int
) -> None:
    content = written(records)
    content = content[: data.draw(st.integers(0, len(content)))]
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(operating, "_BLOCK", block)
        path = Path(folder) / "metrics.jsonl"
        path.write_bytes(content)
        assert newest_record(path) == (read_jsonl(path) or [{}])[-1]


@given(RECORDS, st.data())
def test_whoever_follows_a_file_gets_every_record_once(records: list[dict[str, Any]], data: st.DataObject) -> None:
    content = written(records)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(content)), max_size=5)))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "events.jsonl"
        tail, seen = Tail(path), []
        for start, end in zip([0, *cuts], [*cuts, len(content)], strict=True):
            seen += list(tail.read())
            with path.open("ab") as file:
                file.write(content[start:end])
        seen += list(tail.read())
    assert seen == records


def test_a_run_in_another_thread_is_stopped_where_no_signal_can_cut_in(tmp_path: Path) -> None:
    run, summaries = tmp_path / "run", []

    def on_step(metrics: dict[str, Any], stop: Any) -> None:
        if metrics["env_steps"] == 320:
            request_end(run)

    def work() -> None:
        changes = {"env_steps": 10_000_000, "evaluation.every": 10_000_000, "checkpoint.every": 10_000_000}
        done = api.train(short(**changes), run_dir=run, callbacks=Callbacks(on_step=on_step))
        summaries.append(done.summary)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(120)
    assert [summary["stopped_by"] for summary in summaries] == ["interrupt"]
    found = standing(run)
    assert (found.state, found.note.startswith("asked to by ")) == ("stopped", True)
    assert found.checkpoint is not None
    assert found.checkpoint["env_steps"] == summaries[0]["env_steps"] > 320


def test_a_resumed_run_that_died_is_not_taken_for_the_part_that_ended_well(tmp_path: Path) -> None:
    run = api.train(short(env_steps=300), run_dir=tmp_path / "run").dir
    assert standing(run).state == "finished"
    record = json.loads((run / ".lock").read_text())
    (run / ".lock").write_text(json.dumps(record | {"since": record["until"] + 1, "until": None}) + "\n")
    assert standing(run).state == "dead"
