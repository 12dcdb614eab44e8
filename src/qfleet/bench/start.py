"""What qfleet costs besides the work itself: the time of its import, and the share of the host loop."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from qfleet.bench.table import Row
from qfleet.control.monitor import Callbacks, Monitor
from qfleet.core.saving import Saving
from qfleet.core.usercode import UserCode
from qfleet.envs import env_spec
from qfleet.experiment import with_changes
from qfleet.presets import preset
from qfleet.program import build_program, place
from qfleet.runtime.graph import open_handles

IMPORT_S, HOST_SHARE = 0.6, 0.02
ROUNDS = 7


def measure() -> list[Row]:
    """Time imports in fresh interpreters, and account for a short inline run."""
    torch, everything = [], []
    for _ in range(ROUNDS):  # in turns, so that other load hits both
        torch.append(_import_s("torch"))
        everything.append(_import_s("qfleet.api"))
    extra = statistics.median(everything) - statistics.median(torch)
    share = _host_share()
    return [
        Row(
            what="import of all that training needs, more than `import torch` (CPU time)",
            ours=f"{extra:.2f} s",
            goal=f"at most {IMPORT_S} s",
            met=extra <= IMPORT_S,
        ),
        Row(
            what="host loop and monitor, share of an inline run",
            ours=f"{share:.1%}",
            goal=f"under {HOST_SHARE:.0%}",
            met=share < HOST_SHARE,
        ),
    ]


def _save_nothing(env_steps: int, *_: object) -> Saving:
    return Saving(env_steps, Path, lambda: None)


def _import_s(module: str) -> float:
    code = f"import time; import {module}; print(time.process_time())"
    return float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def _host_share() -> float:
    """Return which share of the time of a run was spent outside its roles."""
    quiet = {"env_steps": 8_000, "evaluation.every": 10**9, "checkpoint.every": 10**9, "evaluation.target": None}
    experiment = with_changes(preset("cartpole"), quiet)
    with tempfile.TemporaryDirectory() as directory:
        program = build_program(experiment, env_spec(experiment.env), UserCode(), Path(directory))
        placement = place(program, experiment)
        handles = open_handles(program.monitor, placement.open)
        monitor = Monitor(experiment, placement, handles, [], Callbacks(), _save_nothing)
        monitor.run()
        seconds = monitor.elapsed_s
        busy = sum(report.busy_s for report in placement.reports())
        placement.close()
    return 1 - busy / seconds
