"""The probes' own kernels: compiled, loaded and launched."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

import torch

from verify.cuda import compile
from verify.variant import Resources

HERE = Path(__file__).resolve().parent
Macros = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Program:
    """One build of a .cu file of this folder: its entry point, which takes one structure by value,
    and its macros."""

    file: str
    entry: str
    macros: Macros


@dataclass(frozen=True)
class Launch:
    """How a program is launched: blocks, threads of each, and dynamic shared memory of each in
    bytes."""

    blocks: int
    threads: int
    shared_bytes: int = 0


def not_here() -> str | None:
    """Why no probe of the device can run on this machine, or None."""
    if not torch.cuda.is_available():
        return "no GPU"
    return compile.available()


def compilable() -> str | None:
    """Why probes cannot even be compiled here, or None."""
    return compile.compilable()


def compile_for(program: Program, arch: str) -> Resources:
    """Compile a program for "sm_90a"..., which needs no device; raises RuntimeError with the
    compiler's log."""
    return compile.compile_source(
        compile.Source(HERE / program.file, program.entry, program.macros), arch
    ).resources


def device_arch() -> str:
    """What to compile for the current device: "sm_86", "sm_90a"."""
    return compile.device_arch(torch.device("cuda", torch.cuda.current_device()))


def run(program: Program, how: Launch, arguments: ctypes.Structure) -> None:
    """Compile for the current device, launch and wait.

    Raises RuntimeError where the compiler, the driver or the kernel fails, with its words.
    """
    source = compile.Source(HERE / program.file, program.entry, program.macros)
    kernel = compile.load(compile.compile_source(source, device_arch()))
    compile.launch(kernel, (how.blocks,), (how.threads,), how.shared_bytes, arguments)
    torch.cuda.synchronize()
