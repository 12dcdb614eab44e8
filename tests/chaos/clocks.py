"""Wall clocks that jump by hours in some processes of a run, while monotonic clocks and the machine's own go on."""

from __future__ import annotations

import mmap
import shutil
import struct
import subprocess
from pathlib import Path

import numpy as np

CLOCKS = 4
"""As `wall_clock.c` has them: processes go by one of so many, as their numbers say."""
HOURS = 12.0
FILE = "WALL_CLOCK"
_HOUR_NS = 3600 * 10**9


def why_not() -> str:
    """Return what keeps clocks from jumping here, empty if nothing."""
    return "" if shutil.which("cc") else "needs a C compiler (cc)"


def environment(folder: Path) -> dict[str, str]:
    """Make clocks that are right in a folder; return what processes must find in their environment to go by them."""
    library, clocks = folder / "wall_clock.so", folder / "clocks"
    source = Path(__file__).with_name("wall_clock.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"], check=True)
    clocks.write_bytes(struct.pack(f"<{CLOCKS}q", *[0] * CLOCKS))
    return {"LD_PRELOAD": str(library), FILE: str(clocks)}


def jump(path: Path, rng: np.random.Generator) -> None:
    """Have each of the clocks be wrong by other hours than before, forward or back."""
    offsets = (rng.uniform(-HOURS, HOURS, CLOCKS) * _HOUR_NS).astype(np.int64)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), offsets.nbytes) as clocks:
        clocks[:] = offsets.tobytes()
