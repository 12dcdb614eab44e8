"""The command `qfleet`: finds the verb, calls it, and turns what it raises into a message and an exit code."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
from collections.abc import Sequence

from qfleet.cli.errors import INTERRUPTED, WATCH, report
from qfleet.core.errors import ConfigError, did_you_mean
from qfleet.core.memory import keep_freed_memory
from qfleet.core.spinning import brief_spinning
from qfleet.runtime.held_back import ENDINGS
from qfleet.version import __version__

VERBS = {
    "train": "train an agent and test it",
    "resume": "go on with a run from its newest good checkpoint",
    "eval": "play with a run's kept model, on fresh seeds",
    "status": "show how runs stand that are going on, and how others ended",
    "stop": "end a run as Ctrl-C does, from anywhere that shares its disk",
    "scale": "change how many actors, learners or shards a run has while it goes on",
    "logs": "tell what happened in a run, and follow it while it goes on",
    "compare": "show runs side by side: a table and learning curves",
    "presets": "list the ready experiments and algorithms",
    "plan": "show how a run's roles are best arranged on this machine, and why",
    "probe": "find the fastest settings of a run on this machine and keep them",
    "bench": "measure speed, beside other libraries where they are installed",
    "doctor": "show what this machine and installation can do",
}
"""Each verb is a module of this package with a function `run(words) -> exit code`; it is imported when it is called."""


def command() -> int:
    """Carry out the command that this process was started for, and return its exit code, which is then its own.

    The libraries take a while to end; a further Ctrl-C must not cut that short. An interrupt that went through a string
    being executed, as dataclasses and numba have them, is remembered although it was handled, and the interpreter would
    end `python -m qfleet` by SIGINT; the next string makes it forget.
    """
    heard = [number for number in ENDINGS if signal.getsignal(number) not in (None, signal.SIG_IGN)]
    before = {number: signal.signal(number, lambda *_: None) for number in heard}  # whoever works heeds them
    keep_freed_memory()
    with brief_spinning():
        code = main()
    for number, handler in before.items():
        signal.signal(number, signal.SIG_IGN if code == INTERRUPTED else handler)
    exec("")
    return code


def main(argv: Sequence[str] | None = None) -> int:
    """Carry out one command and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        with WATCH.kept():
            code = _dispatch(words)
        sys.stdout.flush()  # here, where a closed pipe is still handled
        return code
    except (Exception, KeyboardInterrupt) as error:
        return report(error)


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0
    if words[0] == "--version":
        print(f"qfleet {__version__}")
        return 0
    verb, *rest = words
    if verb not in VERBS:
        raise ConfigError(f"unknown command '{verb}': one of {', '.join(VERBS)}.{did_you_mean(verb, VERBS)}")
    # A user's own `module:function` or environment lies where the command was given, as with `python -m`.
    with contextlib.suppress(FileNotFoundError):  # a folder that was deleted since
        if not {"", os.getcwd()} & set(sys.path):
            sys.path.append(os.getcwd())
    return int(importlib.import_module(f"qfleet.cli.{verb}").run(rest))


def _overview() -> str:
    lines = [f"  {verb:<9} {about}" for verb, about in VERBS.items()]
    return "\n".join(
        [
            "usage: qfleet COMMAND ...",
            "",
            "Deep Q-learning on any hardware you have, as fast as it allows.",
            "",
            *lines,
            "",
            "first steps:  qfleet train cartpole",
            "more:         qfleet COMMAND --help",
        ]
    )
