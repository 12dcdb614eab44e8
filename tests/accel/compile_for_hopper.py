"""Compiles kernels for an H200 without having one: the interpreter accepts what the compiler does not."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

SHARED = 227 * 1024
"""Bytes of shared memory that a program can have on an H200, which compiles more and then does not launch it."""


def compile_for_hopper(module: str, cache: Path) -> list[str]:
    """Return the PTX of what `every_launch` of a test module launches, from a process without the interpreter.

    All of it can be launched: none needs too much shared memory.
    """
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    command = [sys.executable, __file__, module]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


class Hopper:
    """As much of a Triton driver as compilation asks for."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def main(module: str) -> None:
    """Print the PTX of all launches, in their order, as JSON."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    code: list[str] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        compiled = run(self, *args, grid=grid, warmup=True, **options)
        assert compiled.metadata.shared <= SHARED, f"{compiled.metadata.shared} bytes for {compiled.metadata.name}"
        code.append(compiled.asm["ptx"])

    driver.set_active(Hopper())
    JITFunction.run = compile_only
    importlib.import_module(module).every_launch()
    print(json.dumps(code))


if __name__ == "__main__":
    main(sys.argv[1])
