"""What the live panel says, how often it draws, and that it gives the terminal back."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from qfleet.cli.panel import REFRESH_S, Board, LivePanel, make_console_sink, render, sparkline
from qfleet.observe.sinks import PlainLines, Silent

HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
STARTED = {"event": "started", "preset": "cartpole", "algo": "dqn", "seed": 3, "run_dir": "runs/x"}
METRICS: dict[str, float | str] = {
    "wall_s": 27.0, "env_steps": 39_000, "env_steps_budget": 60_000, "eta_s": 75.0, "episodes": 507,
    "episode_return": 333.33, "env_steps_per_s": 9120.0, "updates_per_s": 2280.0, "policy_lag": 3.2, "loss": 0.0123,
    "epsilon": 0.05, "replay_fill": 0.45, "bottleneck": "learner[0] is busy 97 % of the time",
    "actor.0.busy": 0.5, "actor.0.idle": "limiter", "actor.1.busy": 0.7, "actor.1.idle": "limiter",
    "actor.0.rate": 4000.0, "actor.1.rate": 5120.0, "learner.0.rate": 2280.0,
    "learner.0.busy": 0.97, "learner.0.idle": "", "evaluator.0.busy": float("nan"),
}  # fmt: skip


def evaluation(env_steps: int, mean: float) -> dict[str, Any]:
    return {"event": "evaluation", "env_steps": env_steps, "mean": mean, "ci95": [mean - 5, mean + 5], "target": 475.0}


def full_board() -> Board:
    board = Board()
    board.take_event(STARTED)
    board.take_metrics(METRICS)
    for step, mean in enumerate((100.0, 420.0, 380.0)):
        board.take_event(evaluation(step * 1000, mean))
    board.take_event({"event": "notice", "role": "learner", "index": 0, "text": "update 7 skipped: [bold]\x1b[31mNaN"})
    return board


def text_of(board: Board, width: int = 100, height: int = 30) -> str:
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True)
    console.print(render(board, width - 1, height))
    return console.export_text()


def test_the_panel_tells_everything_a_person_looks_for() -> None:
    text = text_of(full_board())
    for part in (
        "qfleet | cartpole | dqn | seed 3 | 27s",
        "39,000 of 60,000 65%  eta 1m15s",
        "333.3 now  507 episodes",
        "380 [375, 385]  420 best  475 target",
        "9,120 steps/s  2,280 updates/s  3.2 lag",
        "0.0123 loss  0.05 epsilon  45% replay",
        "bottleneck: learner[0] is busy 97 % of the time",
        "notice: learner[0] update 7 skipped: [bold] [31mNaN",
        "started: preset cartpole",
    ):
        assert part in text, part
    assert "\x1b" not in text


def test_there_is_one_row_for_each_kind_of_role_with_its_share_speed_and_reason() -> None:
    lines = text_of(full_board()).splitlines()
    (actors,) = [line for line in lines if "actor x2" in line]
    assert "60%" in actors
    assert "limiter" in actors
    assert "9,120 steps/s" in actors
    (learner,) = [line for line in lines if line.startswith("│ learner ")]
    assert "97%" in learner
    assert "2,280 updates/s" in learner
    assert not [line for line in lines if "evaluator" in line], "a share that is not known is not shown"


def test_actors_that_sleep_are_counted_and_nothing_more() -> None:
    board = full_board()
    board.take_metrics({**METRICS, "actor.2.busy": 0.0, "actor.2.idle": "not needed now", "actor.2.rate": 0.0})
    (actors,) = [line for line in text_of(board).splitlines() if "actor x2" in line]
    assert "actor x2 +1 asleep" in actors
    assert "60%" in actors
    assert "limiter" in actors
    source = Path(__file__).parents[2] / "src" / "qfleet" / "roles" / "actor.py"
    assert 'Idle("not needed now"' in source.read_text(), "what such an actor says"


def test_environments_that_are_given_up_stand_in_the_row_of_the_actors() -> None:
    board = full_board()
    board.take_metrics({**METRICS, "given_up_envs": 1.0, "actor.2.busy": 0.0, "actor.2.idle": "not needed now"})
    (actors,) = [line for line in text_of(board, width=120).splitlines() if "actor x2" in line]
    assert "actor x2 +1 asleep, 1 env given up" in actors
    board.take_metrics({**METRICS, "given_up_envs": 12.0})
    assert "actor x2, 12 envs given up" in text_of(board, width=120)


def test_an_empty_board_can_be_drawn() -> None:
    text = text_of(Board())
    assert "qfleet" in text
    assert "- now" in text


@pytest.mark.parametrize("width", [60, 61, 80, 120, 200])
def test_no_line_is_wider_than_the_terminal_and_none_wraps(width: int) -> None:
    lines = text_of(full_board(), width).rstrip("\n").splitlines()
    assert {cell_len(line) for line in lines} == {min(width - 1, 140)}
    assert len(lines) == len(text_of(full_board(), 200).rstrip("\n").splitlines())
    assert any("eta 1m15s" in line for line in lines)


def test_a_low_terminal_shows_fewer_events() -> None:
    board = full_board()
    assert "started: preset" not in text_of(board, height=16)
    assert "update 7 skipped" in text_of(board, height=16)


def decided(decision: str, text: str, role: str = "actor", **more: str) -> dict[str, Any]:
    return {"event": "balance", "decision": decision, "role": role, "index": 0, "text": text, "applied": True, **more}


def test_the_final_test_has_a_row_until_it_is_over():
    """Nothing was shown while it was played, which may take minutes."""
    board = full_board()
    assert "final test" not in text_of(board)
    board.take_event({"event": "testing", "played": 40, "episodes": 100})
    assert len(text_of(board).splitlines()) <= 30
    assert re.search(r"final test +━\S* *40 of 100 episodes", text_of(board))
    board.take_event({"event": "finished", "reason": "budget"})
    assert "final test" not in text_of(board)


def balancer_lines(board: Board, **size: int) -> list[str]:
    return [line for line in text_of(board, **size).splitlines() if "balancer: " in line]


def test_the_balancers_last_decision_stays_in_one_line_and_then_says_what_came_of_it() -> None:
    board = full_board()
    assert balancer_lines(board) == []
    board.take_event(decided("straggler", "12 steps/s"))
    assert balancer_lines(board) == []
    assert "balance: actor[0] straggler: 12 steps/s" in text_of(board), "what is only seen is told among the events"
    board.take_event(decided("rest", "4 of its 8 environments rest"))
    for number in range(9):
        board.take_event({"event": "notice", "text": f"number {number}"})
    (line,) = balancer_lines(board)
    assert "balancer: actor[0] rest: 4 of its 8 environments rest" in line
    board.take_event(decided("kept", "rest: 900 -> 990 steps/s", because="4 of its 8 environments rest"))
    (line,) = balancer_lines(board)
    assert "actor[0] kept rest: 900 -> 990 steps/s (4 of its 8 environments rest)" in line


def test_where_inference_is_and_why_stays_after_other_decisions() -> None:
    board = full_board()
    board.take_event(decided("move", "actors spend 62% of the time on their networks", "inference", inference="served"))
    (line,) = balancer_lines(board)
    assert "inference[0] now served, move: actors spend 62%" in line
    board.take_event(decided("wake", "2.0 cores are free"))
    moved, last = balancer_lines(board)
    assert "now served" in moved
    assert "actor[0] wake: 2.0 cores are free" in last
    board.take_event(decided("taken_back", "move: 9 -> 8 steps/s", "inference", inference="local"))
    (line,) = balancer_lines(board)
    assert "inference[0] now local, took back move: 9 -> 8 steps/s" in line
    assert len(balancer_lines(board, width=60)) == 1


def test_who_computes_for_the_actors_and_why_stays_until_it_is_moved() -> None:
    board = full_board()
    board.take_event({"event": "planned", "text": "2 actors", "inference": "local: 16 observations take 1.70 ms"})
    for number in range(9):
        board.take_event({"event": "notice", "text": f"number {number}"})
    assert "inference: local: 16 observations take 1.70 ms" in text_of(board)
    board.take_event(decided("move", "actors spend 62% of the time on their networks", "inference", inference="served"))
    assert "16 observations" not in text_of(board)


@pytest.mark.parametrize("event", ["started", "resumed"])
def test_who_computes_is_shown_without_a_plan_too_and_a_plan_says_more(event: str) -> None:
    board = full_board()
    board.take_event({"event": event, "inference": "local: each actor computes for itself (cpu); --plan auto would"})
    for number in range(9):
        board.take_event({"event": "notice", "text": f"number {number}"})
    assert "inference: local: each actor computes for itself (cpu)" in text_of(board)
    board.take_event({"event": "planned", "text": "2 actors"})
    assert "inference: local: each actor computes for itself" in text_of(board)
    board.take_event({"event": "planned", "text": "2 actors", "inference": "local: 16 observations take 1.70 ms"})
    assert "inference: local: 16 observations" in text_of(board)


def test_what_the_balancer_did_takes_the_place_of_events_on_a_low_terminal() -> None:
    board = full_board()
    rows = len(text_of(board, height=17).splitlines())
    board.take_event(decided("wake", "2.0 cores are free"))
    assert len(text_of(board, height=17).splitlines()) == rows


@pytest.mark.parametrize("name", ["finished", "stopped", "failed"])
def test_the_title_says_how_the_run_ended(name: str) -> None:
    board = full_board()
    board.take_event({"event": name, "env_steps": 60_000})
    assert f"27s | {name}" in text_of(board)
    assert f"{name} at 60,000 steps" in text_of(board)


def test_sparklines() -> None:
    assert sparkline([], 8) == ""
    assert sparkline([5.0, 5.0, 5.0], 8) == "▁▁▁"
    assert sparkline([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0.0, 0.0, 10.0, 10.0, 0.0, 0.0], 3) == "▁█▁"
    assert len(sparkline([float(i % 7) for i in range(1000)], 32)) == 32


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def terminal(file: Any = None) -> Console:
    return Console(file=file or io.StringIO(), force_terminal=True, width=80, height=30)


def test_it_draws_at_most_four_times_a_second_and_always_the_last_state(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, drawn = Clock(), []
    panel = LivePanel(terminal(), clock)
    monkeypatch.setattr("qfleet.cli.panel.render", lambda board, *_: drawn.append(board.metrics.get("env_steps")) or "")
    for i in range(100):
        clock.now = i * 0.01
        panel.metrics({"env_steps": i})
    assert drawn == [0, 25, 50, 75]
    panel.event(STARTED)
    panel.close()
    assert drawn[-1] == 99
    assert REFRESH_S == 0.25


def test_the_beginning_of_a_final_test_is_drawn_at_once() -> None:
    """It came right after the last checkpoint, and was drawn with the next event: the panel looked dead for minutes."""
    file, clock = io.StringIO(), Clock()
    panel = LivePanel(terminal(file), clock)
    panel.metrics(METRICS)
    panel.event({"event": "testing", "played": 0, "episodes": 30})
    shown = re.sub("\x1b\\[[^A-Za-z]*[A-Za-z]", "", file.getvalue())
    assert "0 of 30 episodes" in shown
    before, after = shown.split("final test", 1)
    assert "bottleneck" in before
    assert "bottleneck" not in after, "the roles have ended"
    panel.close()


def test_it_starts_no_thread_and_gives_cursor_and_stdout_back() -> None:
    import threading

    threads, stdout = threading.active_count(), sys.stdout
    file = io.StringIO()
    panel = LivePanel(terminal(file))
    assert file.getvalue() == ""
    panel.metrics(METRICS)
    assert threading.active_count() == threads
    assert HIDE_CURSOR in file.getvalue()
    panel.close()
    panel.close()
    assert sys.stdout is stdout
    assert file.getvalue().count(SHOW_CURSOR) == 1
    assert file.getvalue().rfind(SHOW_CURSOR) > file.getvalue().rfind(HIDE_CURSOR)


def test_a_terminal_that_is_closed_does_not_end_the_run() -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(5, "Input/output error")

    panel = LivePanel(terminal(Gone()))
    panel.metrics(METRICS)
    panel.event(STARTED)
    panel.close()


def test_without_a_terminal_there_are_plain_lines_and_quiet_is_silent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    sink = make_console_sink(quiet=False)
    assert isinstance(sink, PlainLines)
    sink.metrics(METRICS)
    assert "steps   39,000  65%" in capsys.readouterr().out
    silent = make_console_sink(quiet=True)
    assert isinstance(silent, Silent)
    silent.metrics(METRICS)
    silent.event(STARTED)
    silent.close()
    assert capsys.readouterr().out == ""


def run_on_a_terminal(script: str, **environment: str) -> str:
    """Return what a script that was given a real terminal wrote there."""
    leader, follower = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.DEVNULL, stdout=follower, stderr=subprocess.DEVNULL,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "30", "PYTHONUTF8": "1", **environment},
    )  # fmt: skip
    os.close(follower)
    received = b""
    while True:
        try:
            block = os.read(leader, 65536)
        except OSError:  # Linux says so when the other side is closed.
            break
        if not block:
            break
        received += block
    child.wait()
    os.close(leader)
    return received.decode()


SCRIPT = (
    "from qfleet.cli.panel import make_console_sink\n"
    "sink = make_console_sink(False)\n"
    "sink.metrics({'env_steps': 1234, 'env_steps_budget': 2000})\n"
)


def test_an_exception_that_nobody_handles_still_gives_the_terminal_back() -> None:
    output = run_on_a_terminal(SCRIPT + "raise RuntimeError('boom')\n")
    assert "1,234 of 2,000" in re.sub(r"\x1b\[[0-9;]*m", "", output)
    assert output.rfind(SHOW_CURSOR) > output.rfind(HIDE_CURSOR) >= 0


@pytest.mark.parametrize("environment", [{"TERM": "dumb"}, {"PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}])
def test_a_terminal_that_cannot_draw_gets_plain_lines(environment: dict[str, str]) -> None:
    output = run_on_a_terminal(SCRIPT + "sink.close()\n", **environment)
    assert "steps    1,234  62%" in output
    assert "\x1b" not in output


def test_rich_is_loaded_by_the_command_line_only() -> None:
    source = Path(__file__).parents[2] / "src" / "qfleet" / "observe"
    modules = [f"qfleet.observe.{path.stem}" for path in source.glob("*.py") if path.stem != "__init__"]
    optional = ("rich", "matplotlib", "wandb", "tensorboard")
    script = f"import sys, {', '.join(modules)}; print([m for m in {optional} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "[]\n"
