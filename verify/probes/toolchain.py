"""Compiles, loads and launches the probes' kernels."""

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
    """One build of a .cu file of this folder: its entry point (with one structure, passed by value,
    as parameter) and its macros."""

    file: str
    entry: str
    macros: Macros


@dataclass(frozen=True)
class Launch:
    """A launch's configuration: blocks, threads per block, dynamic shared memory per block in
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
    """Compile a program for an architecture such as "sm_90a"; needs no device.

    Raises RuntimeError with the compiler's log.
    """
    return compile.compile_source(
        compile.Source(HERE / program.file, program.entry, program.macros), arch
    ).resources


def device_arch() -> str:
    """The architecture to compile for on the current device, such as "sm_86" or "sm_90a"."""
    return compile.device_arch(torch.device("cuda", torch.cuda.current_device()))


def run(program: Program, how: Launch, arguments: ctypes.Structure) -> None:
    """Compile for the current device, launch and wait.

    Raises RuntimeError with the message of the compiler, the driver or the kernel if one fails.
    """
    source = compile.Source(HERE / program.file, program.entry, program.macros)
    kernel = compile.load(compile.compile_source(source, device_arch()))
    compile.launch(kernel, (how.blocks,), (how.threads,), how.shared_bytes, arguments)
    torch.cuda.synchronize()
