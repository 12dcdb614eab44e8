"""`qfleet stop`: ends a run as Ctrl-C does, from any machine that shares its disk, and says how it ended."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from qfleet.cli.flags import parse_options, wants_help
from qfleet.core.config import Config
from qfleet.core.errors import ConfigError, QfleetError
from qfleet.observe.text import count

if TYPE_CHECKING:
    from qfleet.operating import Standing

USAGE = "qfleet stop RUN_DIR"
WAIT_S, LOOK_S = 60.0, 0.1
"""How long the end is waited for, and how often it is looked for; a run takes ten seconds at most."""


class StopOptions(Config):
    """Flags of `stop`: none."""

    run_dir: Path
    """The directory of the run."""


def run(words: Sequence[str]) -> int:
    """Carry out the command."""
    if wants_help(words):
        print(f"usage: {USAGE}\n\nEnd a run as Ctrl-C does: it saves a checkpoint and can be resumed.")
        return 0
    given = parse_options(StopOptions, words, "run_dir", USAGE)

    from qfleet.operating import one_run, standing
    from qfleet.runtime import ownership

    path = one_run(given.run_dir)
    before = standing(path)
    if before.state == "stopped":
        print(f"{path} had stopped already: {before.note}")
        return 0
    if before.state != "running":
        raise ConfigError(f"{path} cannot be stopped: it is not running. {_ended(before)}")
    ownership.request_end(path)
    until = time.monotonic() + WAIT_S
    while (sight := ownership.look(path)).alive:
        if time.monotonic() >= until:
            doubt = f" ({sight.doubt})" if sight.doubt else ""
            raise QfleetError(
                f"{path} was asked to end and still runs after {WAIT_S:.0f} s{doubt}; it will end when it gets to it."
                f" It is driven by {sight.owner}, where its process can be killed; then go on with `qfleet resume`"
            )
        time.sleep(LOOK_S)
    after = standing(path)
    if after.state in ("failed", "dead"):
        raise QfleetError(f"{path} was asked to end. {_ended(after)}")
    print(_ended(after))
    return 0


def _ended(one: Standing) -> str:
    """Return how a run ended and how it can go on."""
    if one.state == "finished":
        return f"It finished at {count(one.env_steps or 0)} steps ({one.note})"
    saved = "nothing was saved"
    if one.checkpoint is not None:
        saved = f"saved at {count(one.checkpoint['env_steps'])} steps; go on with: qfleet resume {one.run}"
    how = {"stopped": "It stopped", "failed": "It failed", "dead": "It died"}[one.state]
    return f"{how} ({one.note}); {saved}"
