"""Files that survive a kill, and the plain lines of a run without a terminal."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qfleet.core.errors import QfleetError
from qfleet.observe.sinks import JsonlSink, PlainLines, progress_line, read_jsonl
from qfleet.observe.text import count, duration, number, rate, sentence

METRICS = {
    "time": 1.7e9, "wall_s": 12.4, "env_steps": 12_000, "env_steps_budget": 50_000, "episode_return": 187.25,
    "env_steps_per_s": 9120.4, "updates_per_s": 47.31, "eta_s": 125.0,
}  # fmt: skip
EVALUATION = {
    "event": "evaluation", "env_steps": 12_000, "wall_s": 3.0, "mean": 412.3, "ci95": [395.0, 430.1], "iqm": 420.0,
    "episodes": 20, "best": True, "target": 475.0, "returns": [400.0, 424.6],
}  # fmt: skip


def test_records_come_back_in_order_and_are_on_disk_at_once(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "new" / "run")
    sink.metrics(METRICS)
    sink.metrics({"env_steps": 2})
    sink.event(EVALUATION)
    # Not closed: what was written must already be readable.
    assert read_jsonl(tmp_path / "new" / "run" / "metrics.jsonl") == [METRICS, {"env_steps": 2}]
    assert read_jsonl(tmp_path / "new" / "run" / "events.jsonl") == [EVALUATION]
    sink.close()
    sink.close()


def test_nan_and_infinities_become_null_at_any_depth(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path)
    sink.event(
        {"event": "evaluation", "mean": math.nan, "ci95": [-math.inf, np.float32("nan")], "tree": {"x": math.inf}}
    )
    sink.close()
    text = (tmp_path / "events.jsonl").read_text()
    assert json.loads(text) == {"event": "evaluation", "mean": None, "ci95": [None, None], "tree": {"x": None}}


def test_numpy_values_and_paths_are_written_as_plain_values(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path)
    sink.event({"returns": np.array([1.5, 2.5]), "steps": np.int64(3), "best": np.bool_(True), "path": Path("a/b")})
    sink.close()
    assert read_jsonl(tmp_path / "events.jsonl") == [{"returns": [1.5, 2.5], "steps": 3, "best": True, "path": "a/b"}]


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_a_file_cut_at_any_byte_keeps_every_whole_line_and_can_be_continued(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("cut")
    texts = data.draw(st.lists(st.text(max_size=12), min_size=1, max_size=6))
    sink = JsonlSink(directory)
    for text in texts:
        sink.event({"text": text})
    sink.close()
    path = directory / "events.jsonl"
    content = path.read_bytes()
    kept = content[: data.draw(st.integers(0, len(content)))]
    path.write_bytes(kept)

    whole = [{"text": text} for text in texts[: kept.count(b"\n")]]
    assert read_jsonl(path) == whole
    resumed = JsonlSink(directory)
    resumed.event({"event": "resumed"})
    resumed.close()
    assert read_jsonl(path) == [*whole, {"event": "resumed"}]


def test_a_torn_line_longer_than_a_block_is_cut_off(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"a": 1}\n{"b": "' + b"x" * 200_000)
    JsonlSink(tmp_path).close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == b'{"a": 1}\n'


def test_a_killed_writer_leaves_only_whole_lines_but_the_last(tmp_path: Path) -> None:
    script = (
        "import sys, pathlib\nfrom qfleet.observe.sinks import JsonlSink\n"
        "sink, i = JsonlSink(pathlib.Path(sys.argv[1])), 0\n"
        "while True:\n    sink.metrics({'i': i, 'pad': 'x' * 3000})\n    i += 1\n"
        "    if i == 20: print('go', flush=True)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    child.stdout.close()
    records = read_jsonl(tmp_path / "metrics.jsonl")
    assert len(records) >= 20
    assert [record["i"] for record in records] == list(range(len(records)))


@pytest.mark.parametrize("damage", [b"{broken\n", b"[1]\n", b"\xff\xfe\n", b"\n"])
def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"a": 1}\n' + damage + b'{"a": 2}\n')
    with pytest.raises(QfleetError, match=r"events\.jsonl, line 2"):
        read_jsonl(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(QfleetError, match=r"events\.jsonl"):
        read_jsonl(tmp_path / "events.jsonl")


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(QfleetError, match=r"metrics\.jsonl"):
        JsonlSink(tmp_path)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def lines_of(*records: tuple[float, dict[str, Any]]) -> list[str]:
    stream, clock = io.StringIO(), Clock()
    sink = PlainLines(stream, every_s=5.0, clock=clock)
    for at, record in records:
        clock.now = at
        if "event" in record:
            sink.event(record)
        else:
            sink.metrics(record)
    sink.close()
    return stream.getvalue().splitlines()


def test_a_plain_line_tells_steps_return_speed_and_eta() -> None:
    assert " ".join(progress_line(METRICS).split()) == (
        "12s steps 12,000 24% return 187.2 9,120 steps/s 47.3 updates/s eta 2m05s"
    )


def test_a_plain_line_ends_with_the_bottleneck() -> None:
    line = progress_line({**METRICS, "bottleneck": "learner 97% busy; actors wait 60%"})
    assert line == f"{progress_line(METRICS)}  learner 97% busy; actors wait 60%"


def test_plain_lines_are_aligned_whatever_is_known() -> None:
    bare = progress_line({})
    large = progress_line({**METRICS, "env_steps": 123_456_789, "env_steps_budget": 200_000_000, "wall_s": 90_000.0})
    assert len(bare) == len(progress_line(METRICS)) == len(large)
    assert bare.index("return") == progress_line(METRICS).index("return") == large.index("return")
    assert " ".join(bare.split()) == "- steps - return - - steps/s - updates/s eta -"


def test_plain_lines_come_every_few_seconds_and_the_last_numbers_always() -> None:
    lines = lines_of(*((float(t), {"env_steps": t * 100}) for t in range(13)))
    assert [int(line.split()[2].replace(",", "")) for line in lines] == [0, 500, 1000, 1200]


def test_plain_lines_tell_events_at_once_and_the_end_after_the_last_numbers() -> None:
    finished = {"event": "finished", "env_steps": 50_000, "solved": True}
    lines = lines_of((0.0, {"env_steps": 1}), (0.1, EVALUATION), (0.2, {"env_steps": 2}), (0.3, finished))
    assert lines[1] == ("evaluation at 12,000 steps: mean 412.3 [395, 430.1], 20 episodes, target 475, best so far")
    assert lines[2].split()[2] == "2"
    assert lines[3] == "finished at 50,000 steps: solved True"
    assert len(lines) == 4


def test_plain_lines_hold_no_control_codes() -> None:
    notice = {"event": "notice", "role": "learner", "index": 0, "text": "loss is\n\x1b[31mNaN\x07 \u2028 é"}
    (line,) = lines_of((0.0, notice))
    assert line == "notice: learner[0] loss is [31mNaN é"


def test_plain_lines_replace_what_the_stream_cannot_hold() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    PlainLines(stream).event({"event": "notice", "text": "é"})
    stream.seek(0)
    assert stream.read() == "notice: ?\n"


def test_a_reader_that_has_gone_does_not_end_the_run() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    stream = os.fdopen(write_end, "w")
    sink = PlainLines(stream)
    sink.metrics(METRICS)
    sink.event(EVALUATION)
    sink.close()
    with pytest.raises(BrokenPipeError):
        stream.close()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.2, "0s"),
        (59.4, "59s"),
        (59.6, "1m00s"),
        (3599, "59m59s"),
        (3600, "1h00m"),
        (86399, "23h59m"),
        (90000, "1d01h"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_numbers_keep_the_digits_that_matter() -> None:
    assert [count(999_999), count(1_250_000), count(2e9)] == ["999,999", "1.25M", "2B"]
    assert [number(0.0), number(-21.0), number(412.345), number(25_000.4), number(2.5e-5)] == [
        "0", "-21", "412.3", "25,000", "2.50e-05",
    ]  # fmt: skip
    assert [rate(3.21), rate(98765.4)] == ["3.2", "98,765"]


def test_numpy_numbers_are_shown_like_others() -> None:
    record = {"event": "evaluation", "env_steps": np.int64(10), "mean": np.float32(2.5), "ci95": (np.float32(2), 3)}
    assert sentence(record) == "evaluation at 10 steps: mean 2.5 [2, 3]"


def test_a_balancer_is_told_in_one_line_with_why_and_with_what_came_of_it() -> None:
    record = {"event": "balance", "role": "actor", "index": 2, "applied": True, "before": 900.0}
    done = {**record, "decision": "rest", "text": "4 of its 8 environments rest"}
    assert sentence(done) == "balance: actor[2] rest: 4 of its 8 environments rest"
    kept = {**record, "decision": "kept", "text": "rest: 900 -> 990 steps/s", "because": done["text"], "after": 990.0}
    told = "balance: actor[2] kept rest: 900 -> 990 steps/s (4 of its 8 environments rest)"
    assert sentence(kept) == told
    stream = io.StringIO()
    PlainLines(stream).event(kept)
    assert stream.getvalue() == told + "\n"
    back = {**kept, "role": "inference", "index": 0, "decision": "taken_back", "text": "move: 9 -> 8 steps/s"}
    assert sentence({**back, "inference": "local"}).startswith("balance: inference[0] now local, took back move: 9 ->")
    more = {**record, "decision": "more_actors", "text": "no core is busy\x1b[31m"}
    assert sentence(more) == "balance: actor[2] more actors: no core is busy [31m"


def test_an_event_that_is_not_known_is_still_told() -> None:
    assert sentence({"event": "balanced", "actors": 4, "text": "more actors"}) == "balanced: more actors, actors 4"
    assert sentence({"event": "evaluation", "env_steps": 10, "mean": None}) == "evaluation at 10 steps: mean unknown"


def test_a_line_waits_while_nobody_can_tell_whether_it_may_be_written(tmp_path: Path) -> None:
    """A process that can open no more files cannot look; its run is worth more than the line."""
    trouble = [OSError(errno.EMFILE, "Too many open files")]

    def require() -> None:
        if trouble:
            raise trouble.pop()

    sink = JsonlSink(tmp_path, require)
    with pytest.raises(QfleetError, match=r"cannot look at .*: Too many open files"):
        sink.event({"event": "first"})
    sink.event({"event": "second"})
    sink.close()
    assert [line["event"] for line in read_jsonl(tmp_path / "events.jsonl")] == ["first", "second"]
