"""`qfleet doctor`: what this machine and this installation can do, and what is missing for the rest."""

from __future__ import annotations

import importlib.util
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from qfleet.cli.flags import parse_options, wants_help
from qfleet.cli.helptext import help_page
from qfleet.cli.settings import settings_of
from qfleet.core.config import Config
from qfleet.core.errors import ConfigError
from qfleet.core.shared_memory import ELSEWHERE, free_shared_memory, shared_memory_root

if TYPE_CHECKING:
    from qfleet.accel.cache import Entry

USAGE = "qfleet doctor [--json]"
EXTRAS = {
    "fast": (("numba",), "compiled loops on the CPU: prioritised replay and fused runs, several times faster"),
    "atari": (("ale_py",), "Atari games"),
    "box2d": (("Box2D",), "LunarLander and other Box2D environments"),
    "envpool": (("envpool",), "environments stepped by EnvPool's threads"),
    "media": (("PIL", "pygame"), "recordings (eval --record) and drawn environments"),
    "plot": (("matplotlib",), "learning curves as pictures (compare --output)"),
    "prometheus": (("prometheus_client",), "metrics for Prometheus (--track.prometheus PORT)"),
    "ray": (("ray",), "runs on many machines (--placement ray)"),
    "track": (("tensorboard", "wandb"), "TensorBoard and Weights & Biases"),
}
"""Extra -> (the modules it brings, what they are for)."""


class DoctorOptions(Config):
    """Flags of `doctor`."""

    as_json: bool = Field(False, alias="json")
    """Print the findings as JSON."""


def run(words: Sequence[str]) -> int:
    """Carry out the command."""
    if wants_help(words):
        print(help_page(USAGE, "Show what this machine and installation can do.", settings_of(DoctorOptions, {})))
        return 0
    given = parse_options(DoctorOptions, words, "", USAGE)
    findings = examine()
    print(json.dumps(findings, indent=1) if given.as_json else _text(findings))
    return 0


def examine() -> dict[str, Any]:
    """Return the findings as plain values."""
    from qfleet.control.summary import hardware
    from qfleet.core.versions import versions

    return {
        "versions": versions(),
        "hardware": hardware(),
        "gpu": _gpu(),
        "accel": _accel(),
        "extras": {extra: _extra(modules, purpose) for extra, (modules, purpose) in EXTRAS.items()},
        "shared_memory": _shared_memory(),
        "writable": {name: _writable(path) for name, path in _directories().items()},
    }


def _gpu() -> str:
    import torch

    from qfleet.accel.hardware import why_no_cuda

    if reason := why_no_cuda():
        return f"none: {reason}"
    capability = ".".join(map(str, torch.cuda.get_device_capability()))
    return f"CUDA {torch.version.cuda}, compute capability {capability}"


def _accel() -> dict[str, Any]:
    """Return how updates are made fast here: what is usable, what is shipped, what probes found."""
    import torch

    from qfleet.accel import cache
    from qfleet.accel.hardware import UNTESTED, look
    from qfleet.accel.table import EAGER, shipped

    hardware = look(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    entries, complaint = cache.read()
    rows = {
        f"{agent} agents on {inputs}": shipped(hardware, agent, inputs)
        for agent in ("rollout", "replay")
        for inputs in ("vectors", "images")
    }
    if hardware.kind == "cpu":
        table = shipped(hardware, "replay", "vectors")
        frames = shipped(hardware, "replay", "frames")[0].replace(kernels=False)
        rows = {"small dense networks": table, "frames": (frames, table[1]), "all others": (EAGER, table[1])}
    return {
        "device": f"{hardware.kind} ({hardware.name})",
        "usable": {name: hardware.obstacles.get(name, "yes") for name in ("precision", "compile", "kernels", "graphs")},
        "shipped": {name: f"{settings.words(hardware.kind)} ({why})" for name, (settings, why) in rows.items()},
        "cached": {
            "path": str(cache.cache_path()),
            "choices": [_probed(entry) for entry in entries],
            "complaint": complaint,
        },
        "untested": list(UNTESTED),
    }


def _probed(entry: Entry) -> str:
    """Return what a probe found and for what, in one line."""
    work, (kind, *name) = entry.key.get("workload", {}), entry.key.get("hardware", [""])
    leaves = ", ".join("x".join(map(str, leaf["shape"])) for leaf in work.get("observations", {}).values())
    network = work.get("network", {}).get("kind", "?")
    what = f"{work.get('agent', {}).get('kind', '?')} agent, {network} on {leaves or '?'}, {work.get('envs', '?')} envs"
    return f"{what}, {' '.join(map(str, name[:1])) or '?'}: {entry.settings.words(kind)} ({entry.why})"


def _extra(modules: Sequence[str], purpose: str) -> dict[str, Any]:
    from qfleet.replay.sumtree import numba_problem

    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    # Only numba is known to be installed and unusable: it refuses versions of NumPy that are newer than itself.
    broken = numba_problem() if "numba" in modules and not missing else ""
    return {"present": not missing and not broken, "missing": missing, "broken": broken, "enables": purpose}


def _shared_memory() -> dict[str, Any]:
    try:
        return {"path": str(shared_memory_root()), "free_gib": round(free_shared_memory() / 2**30, 2)}
    except ConfigError as error:
        return {"path": os.environ.get(ELSEWHERE, ""), "free_gib": None, "complaint": str(error)}


def _directories() -> dict[str, Path]:
    """Return the directories that something writes to, by what it is."""
    from_numba = os.environ.get("NUMBA_CACHE_DIR")
    package = Path(__file__).parents[1]
    return {
        "working directory": Path.cwd(),
        "temporary files": Path(tempfile.gettempdir()),
        "compiled functions (numba)": Path(from_numba) if from_numba else package / "replay",
    }


def _writable(path: Path) -> dict[str, Any]:
    nearest = next(parent for parent in (path, *path.parents) if parent.exists())
    return {"path": str(path), "writable": os.access(nearest, os.W_OK)}


def _text(findings: dict[str, Any]) -> str:
    machine, shared = findings["hardware"], findings["shared_memory"]
    lines = ["versions"]
    lines += [f"  {name:<10} {number}" for name, number in findings["versions"].items()]
    lines += ["machine", f"  {machine['cores']} cores ({machine['cpu']}), {machine['memory_gib']} GiB memory"]
    lines += [f"  GPU: {', '.join([*machine['gpus'], findings['gpu']])}"]
    free = shared["complaint"] if shared["free_gib"] is None else f"{shared['free_gib']} GiB free"
    lines += [f"  shared memory ({shared['path']}): {free}"]
    lines += _accel_lines(findings["accel"])
    lines += ["extras (pip install 'qfleet[NAME]')"]
    for name, extra in findings["extras"].items():
        reason = extra["broken"] or f"{', '.join(extra['missing'])} missing"
        lines.append(f"  {name:<10} {'yes' if extra['present'] else f'no ({reason})':<28} {extra['enables']}")
    lines += ["writable"]
    for name, place in findings["writable"].items():
        lines.append(f"  {'yes' if place['writable'] else 'NO ':<4} {name}: {place['path']}")
    return "\n".join(lines)


def _accel_lines(accel: dict[str, Any]) -> list[str]:
    cached = accel["cached"]
    lines = [f"fused updates on {accel['device']}"]
    lines += [f"  {name:<9} {text if text == 'yes' else f'no: {text}'}" for name, text in accel["usable"].items()]
    for text in dict.fromkeys(accel["shipped"].values()):
        names = [name for name, same in accel["shipped"].items() if same == text]
        lines.append(f"  shipped, where it fits: {text} for {', '.join(names)}")
    lines += [f"  {len(cached['choices'])} choices of `qfleet probe` in {cached['path']}"]
    lines += [f"    {choice}" for choice in cached["choices"]]
    lines += [f"  {cached['complaint']}"] if cached["complaint"] else []
    return [*lines, f"  {', '.join(accel['untested'])}: the device-agnostic code, untested"]
