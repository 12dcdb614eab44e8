"""Compiles Triton kernels for a Hopper GPU on a machine that has none: what the interpreter accepts may not compile."""

from __future__ import annotations

import os
import subprocess
import sys
from types import ModuleType
from typing import Any

import torch

_POINTERS = {
    torch.bool: "*i1",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
}


class CompileOnly:
    """Stands in for a kernel: a launch compiles it for the arguments' types, and nothing runs."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self._compile

    def _compile(self, *args: Any, num_warps: int = 4, **named: Any) -> None:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        signature, constants = {}, {}
        for place, parameter in enumerate(self._kernel.params):
            value = args[place] if place < len(args) else named[parameter.name]
            signature[parameter.name] = kind = _kind(value, parameter.is_constexpr)
            if kind == "constexpr":
                constants[(place,)] = value
        source = ASTSource(self._kernel, signature, constants)
        triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps})
        print("compiled", self._kernel.__name__)


def _kind(value: Any, constant: bool) -> str:
    if constant or value is None:
        return "constexpr"
    if isinstance(value, torch.Tensor):
        return _POINTERS[value.dtype]
    return "i32" if isinstance(value, int) else "fp32"


def compile_only(module: ModuleType, *names: str) -> None:
    """Replace the named kernels of a module."""
    for name in names:
        setattr(module, name, CompileOnly(getattr(module, name)))


def compiled_by(code: str) -> list[str]:
    """Run code in a new process without the interpreter; return the kernels that it compiled."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([os.path.dirname(__file__), environment.get("PYTHONPATH", "")])
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    return [line.removeprefix("compiled ") for line in result.stdout.splitlines()]
