"""The peers: other libraries, each run by a script of the repository in an environment of its own."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from qfleet.core.errors import QfleetError

SCRIPTS = Path("benchmarks/peers")


def peer_python(environment: Path | None) -> Path | None:
    """Return the interpreter of the peers' environment, or None if there is none."""
    if environment is None:
        return None
    python = environment / "bin" / "python"
    if not python.exists():
        raise QfleetError(
            f"{environment} is no environment of peers; make it with: bash {SCRIPTS}/setup.sh {environment}"
        )
    return python


def run_peer(python: Path, script: str, *words: str) -> dict[str, Any]:
    """Run one of the peers' scripts with one thread and return the JSON object in the last line that it prints."""
    command = [str(python), str(SCRIPTS / script), *words]
    result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if result.returncode:
        raise QfleetError(f"the peer failed: {' '.join(command)}\n{result.stderr.strip()[-2000:]}")
    found: dict[str, Any] = json.loads(result.stdout.strip().splitlines()[-1])
    return found
