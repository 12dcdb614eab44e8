"""Memory that is freed is kept for the next time."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

if not hasattr(ctypes.CDLL(None), "mallopt"):
    pytest.skip("only GNU's malloc can be told to keep memory", allow_module_level=True)

ROUNDS = """
import ctypes, resource, sys
from qfleet.core.memory import keep_freed_memory
if "kept" in sys.argv:
    keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]

def work():
    pieces = [libc.malloc(4 << 20) for _ in range(16)]
    for piece in pieces:
        ctypes.memset(piece, 1, 4 << 20)
    for piece in reversed(pieces):
        libc.free(piece)

for _ in range(4):
    work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    work()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(*words: str, **environment: str) -> int:
    """Return how often memory had to be mapped while the same 64 MB were used ten times."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", ROUNDS, *words], env={**inherited, **environment}, capture_output=True, check=True
    )
    return int(done.stdout)


def test_memory_that_is_freed_is_not_mapped_anew() -> None:
    pages = 10 * (64 << 20) // os.sysconf("SC_PAGE_SIZE")
    assert faults() > pages // 10, "or this test shows nothing"
    assert faults("kept") < pages // 100


def test_what_somebody_has_set_up_stays() -> None:
    assert faults("kept", MALLOC_TRIM_THRESHOLD_="131072") > 10 * faults("kept")
