"""The live panel of a run on a terminal, and the choice between it, plain lines and silence."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import math
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from qfleet.observe.sinks import Metrics, PlainLines, Silent, Sink
from qfleet.observe.text import count, decision, duration, interval, known, number, one_line, rate, sentence

REFRESH_S = 0.25
"""Seconds between two drawings at least; one takes 3 to 4 ms of processor time."""
_BORDERS = {"finished": "green", "stopped": "yellow", "failed": "red"}
_BLOCKS = "▁▂▃▄▅▆▇█"
_FIXED_ROWS = 15
"""Rows that a panel with five kinds of roles has besides the final test, what the balancer did and its events."""
_ASLEEP = "not needed now"
"""What an actor waits for that the balancer lets sleep."""
_SEEN = ("straggler", "recovered")
"""What a balancer says it sees, before it decides: told among the events."""
_BAR = "cyan"
_UNITS = {"actor": "steps/s", "learner": "updates/s", "worker": "gradients/s", "server": "updates/s"}
"""What the speed of a kind of role is counted in."""


def make_console_sink(quiet: bool) -> Sink:
    """Return what shows a run's progress on standard output: a live panel on a terminal, else plain lines."""
    if quiet or sys.stdout is None:  # closed by the shell: `>&-`
        return Silent()
    console = Console()
    # Ask the stream itself: rich also says "terminal" of a pipe when a variable such as FORCE_COLOR is set.
    if sys.stdout.isatty() and not console.is_dumb_terminal and console.encoding.startswith("utf"):
        return LivePanel(console)
    return PlainLines(sys.stdout)


@dataclass
class Board:
    """All that the panel shows: the newest numbers and a short memory of what happened."""

    metrics: Metrics = field(default_factory=dict)
    run: Mapping[str, Any] = field(default_factory=dict)
    """The fields of the "started" or "resumed" event: preset, algo, seed."""
    evaluation: Mapping[str, Any] = field(default_factory=dict)
    best: float = -math.inf
    scores: list[float] = field(default_factory=list)
    """Means of all evaluations."""
    returns: deque[float] = field(default_factory=lambda: deque(maxlen=256))
    """Recent episode returns, drawn until there are two evaluations."""
    events: deque[str] = field(default_factory=lambda: deque(maxlen=4))
    inference: str = ""
    """Who computes for the actors, and why or what would find out; empty where roles are in one process."""
    decided: Mapping[str, Any] = field(default_factory=dict)
    """The balancer's last decision, or what came of it,"""
    moved: Mapping[str, Any] = field(default_factory=dict)
    """and the last one that was about where inference is computed."""
    testing: Mapping[str, Any] = field(default_factory=dict)
    """How far the final test is, once it has begun."""
    ending: str = ""
    """The event that ended the run, once there is one."""

    @property
    def under_test(self) -> bool:
        """Whether the final test is being played."""
        return bool(self.testing) and not self.ending

    def take_metrics(self, record: Metrics) -> None:
        """Keep the newest numbers."""
        self.metrics = record
        if (value := known(record, "episode_return")) is not None:
            self.returns.append(value)

    def take_event(self, record: Mapping[str, Any]) -> None:
        """Sort an event into the place where it is shown."""
        name = record.get("event")
        if name == "evaluation":
            self.evaluation = record
            if (score := known(record, "mean")) is not None:
                self.scores.append(score)
                self.best = max(self.best, score)
            return
        if name == "balance" and record.get("decision") not in _SEEN:
            self.decided = record
            self.moved = record if record.get("inference") else self.moved
            return
        if name == "testing":
            self.testing = record
            return
        if name in ("started", "resumed", "planned"):
            self.inference = str(record.get("inference", self.inference))
        if name in ("started", "resumed"):
            self.run = {**self.run, **record}
        if name in _BORDERS:
            self.ending = str(name)
        self.events.append(sentence(record))


class LivePanel:
    """Draws a `Board` in place, at most four times a second, and only when it is told something (no thread)."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._clock, self._next_at = console, clock, -math.inf
        self._board = Board()
        self._live = Live(console=console, auto_refresh=False, vertical_overflow="crop")

    def metrics(self, record: Metrics) -> None:
        """Show the newest numbers, now or at the next drawing."""
        self._board.take_metrics(record)
        self._draw_if_due()

    def event(self, record: Mapping[str, Any]) -> None:
        """Show an event, now or at the next drawing; that a final test begins now, since nothing may come for long."""
        self._board.take_event(record)
        if self._board.under_test and self._next_at < math.inf:
            self._next_at = -math.inf
        self._draw_if_due()

    def close(self) -> None:
        """Draw the last state, leave it on the screen, and give the terminal back."""
        if self._live.is_started:
            atexit.unregister(self.close)
            with contextlib.suppress(OSError):
                self._draw()
            with contextlib.suppress(OSError):
                self._live.stop()

    def _draw_if_due(self) -> None:
        if self._clock() < self._next_at:
            return
        try:
            if not self._live.is_started:
                # Live hides the cursor: however the process ends, short of a kill, the cursor comes back.
                atexit.register(self.close)
                self._live.start()
            self._draw()
            self._next_at = self._clock() + REFRESH_S
        except OSError:
            # The terminal is gone: draw no more, but a run must not die of not being watched.
            self._next_at = math.inf

    def _draw(self) -> None:
        size = self._console.size
        # The last column stays empty: a full line would wrap on some terminals.
        self._live.update(render(self._board, size.width - 1, size.height), refresh=True)


def render(board: Board, width: int, height: int) -> Panel:
    """Return the panel for a terminal of `width` columns and `height` rows."""
    balance = _balance(board)
    room = max(1, min(len(board.events), height - _FIXED_ROWS - board.under_test - len(balance)))
    parts: list[RenderableType] = [_numbers(board, width)]
    if not board.under_test and (roles := _roles(board.metrics)):  # they have ended
        parts += ["", roles]
    if not board.under_test and (bottleneck := board.metrics.get("bottleneck")):
        parts.append(_line("bottleneck: ", one_line(str(bottleneck)), "yellow"))
    parts += balance
    if board.events:
        parts += ["", *(_line("· ", text) for text in list(board.events)[-room:])]
    return Panel(
        Group(*parts),
        title=_title(board),
        title_align="left",
        border_style=_BORDERS.get(board.ending, "cyan"),
        width=min(width, 140),
        padding=(0, 1),
    )


def sparkline(values: Sequence[float], width: int) -> str:
    """Return the shape of a series in at most `width` characters; each is the mean of an equal share of the values."""
    columns = min(width, len(values))
    edges = [i * len(values) // columns for i in range(columns + 1)] if columns else []
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, span = min(means, default=0.0), max(means, default=0.0) - min(means, default=0.0)
    return "".join(_BLOCKS[round((m - low) / span * (len(_BLOCKS) - 1)) if span else 0] for m in means)


def _title(board: Board) -> Text:
    parts = [str(board.run[key]) for key in ("preset", "algo") if board.run.get(key)]
    if "seed" in board.run:
        parts.append(f"seed {board.run['seed']}")
    if (wall_s := known(board.metrics, "wall_s")) is not None:
        parts.append(duration(wall_s))
    if board.ending:
        parts.append(board.ending)
    return Text.assemble(("qfleet", "bold"), *(f" | {one_line(part)}" for part in parts))


def _numbers(board: Board, width: int) -> Table:
    table = Table.grid(padding=(0, 1), expand=True)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(ratio=1, no_wrap=True)
    table.add_row("steps", _steps(board.metrics))
    series = board.scores if len(board.scores) > 1 else list(board.returns)
    table.add_row("return", _pairs(_returns(board), sparkline(series, min(32, width // 4))))
    if board.evaluation:
        table.add_row("evaluation", _pairs(_evaluations(board)))
    if board.under_test:
        table.add_row("final test", _tested(board.testing))
    table.add_row("speed", _pairs(_present(board.metrics, _SPEED)))
    if learning := list(_present(board.metrics, _LEARNING)):
        table.add_row("learning", _pairs(learning))
    return table


_SPEED: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("env_steps_per_s", "steps/s", rate),
    ("updates_per_s", "updates/s", rate),
    ("policy_lag", "lag", number),
)
_LEARNING: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("loss", "loss", number),
    ("epsilon", "epsilon", number),
    ("replay_fill", "replay", "{:.0%}".format),
    ("q_mean", "Q", number),
    ("learning_rate", "rate", number),
    ("skipped_updates", "skipped", count),
)


def _present(metrics: Metrics, wanted: Sequence[tuple[str, str, Callable[[float], str]]]) -> Iterator[tuple[str, str]]:
    """Yield (shown value, label) of the known numbers among the wanted ones."""
    for key, label, show in wanted:
        if (value := known(metrics, key)) is not None:
            yield show(value), label


def _steps(metrics: Metrics) -> RenderableType:
    steps, budget, eta = known(metrics, "env_steps") or 0.0, known(metrics, "env_steps_budget"), known(metrics, "eta_s")
    if not budget:
        return Text(count(steps), style="bold")
    text = Text.assemble((count(steps), "bold"), f" of {count(budget)}", (f" {steps / budget:.0%}", "bold"))
    if eta is not None:
        text.append(f"  eta {duration(eta)}")
    return _bar(steps, budget, text)


def _tested(record: Mapping[str, Any]) -> RenderableType:
    played, episodes = known(record, "played") or 0.0, known(record, "episodes") or 1.0
    return _bar(played, episodes, Text.assemble((count(played), "bold"), f" of {count(episodes)} episodes"))


def _bar(done: float, total: float, text: Text) -> RenderableType:
    row = Table.grid(padding=(0, 1), expand=True)
    row.add_column(ratio=1)
    row.add_column(no_wrap=True)
    row.add_row(ProgressBar(total=total, completed=min(done, total), complete_style=_BAR), text)
    return row


def _returns(board: Board) -> Iterator[tuple[str, str]]:
    current = known(board.metrics, "episode_return")
    yield ("-" if current is None else number(current)), "now"
    if (episodes := known(board.metrics, "episodes")) is not None:
        yield count(episodes), "episodes"


def _evaluations(board: Board) -> Iterator[tuple[str, str]]:
    mean, target = known(board.evaluation, "mean"), known(board.evaluation, "target")
    yield ("-" if mean is None else number(mean)), interval(board.evaluation.get("ci95")).strip()
    if math.isfinite(board.best):
        yield number(board.best), "best"
    if target is not None:
        yield number(target), "target"


def _pairs(pairs: Iterator[tuple[str, str]] | Sequence[tuple[str, str]], tail: str = "") -> Text:
    text = Text(overflow="ellipsis", no_wrap=True)
    for value, label in pairs:
        text.append(value, "bold").append(f" {label}  " if label else "  ", "dim")
    return text.append(tail, "green")


def _roles(metrics: Metrics) -> Table | None:
    """Return one row for each kind of role: how many, how busy, how fast, and what idle ones wait for most.

    Those that sleep are only counted.
    """
    asleep = {key.removesuffix(".idle") for key, value in metrics.items() if value == _ASLEEP}
    busy: dict[str, list[float]] = {}
    speed: dict[str, float] = {}
    idle: dict[str, Counter[str]] = {}
    for key, value in metrics.items():
        role, _, what = key.rpartition(".")
        kind, _, index = role.partition(".")
        if not index.isdigit() or role in asleep:
            continue
        if what == "busy" and (share := known(metrics, key)) is not None:
            busy.setdefault(kind, []).append(share)
        elif what == "rate":
            speed[kind] = speed.get(kind, 0.0) + (known(metrics, key) or 0.0)
        elif what == "idle" and value:
            idle.setdefault(kind, Counter())[str(value)] += 1
    table, lost = _role_table(), known(metrics, "given_up_envs")
    resting = Counter(role.partition(".")[0] for role in asleep)
    for kind, shares in busy.items():
        share = sum(shares) / len(shares)
        name = f"{kind} x{len(shares)}" if len(shares) > 1 else kind
        name += f" +{resting[kind]} asleep" if kind in resting else ""
        name += f", {count(lost)} env{'' if lost == 1 else 's'} given up" if kind == "actor" and lost else ""
        reasons = idle.get(kind, Counter()).most_common(1)
        bar = ProgressBar(total=1.0, completed=min(1.0, max(0.0, share)), complete_style=_BAR)
        fast = f"{rate(speed[kind])} {_UNITS[kind]}" if kind in speed else ""
        table.add_row(name, bar, f"{share:.0%}", fast, one_line(reasons[0][0]) if reasons else "")
    return table if busy else None


def _role_table() -> Table:
    """Return an empty table for kinds of roles: name, bar, share, speed, and what is waited for."""
    table = Table.grid(padding=(0, 1), expand=True)
    table.add_column(no_wrap=True)
    table.add_column(width=12)
    table.add_column(width=5, justify="right")
    table.add_column(no_wrap=True)
    table.add_column(ratio=1, no_wrap=True, overflow="ellipsis", style="dim")
    return table


def _balance(board: Board) -> list[Text]:
    """Return where inference is computed, at first or since it moved, and the balancer's last decision if another."""
    shown = [board.decided] if board.moved is board.decided else [board.moved, board.decided]
    planned = [_line("inference: ", one_line(board.inference))] if board.inference and not board.moved else []
    return planned + [_line("balancer: ", decision(record)) for record in shown if record]


def _line(label: str, text: str, style: str = "") -> Text:
    return Text.assemble((label, "dim"), (text, style), overflow="ellipsis", no_wrap=True)
