"""The probes' own kernels: compiled, loaded and launched.  Nothing else in verify touches kernels.cuda.

kernels.cuda is imported late: the judge's other parts do without it, and so does a machine without NVRTC.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

import torch

from verify.bundle import use_collection
from verify.variant import Resources

HERE = Path(__file__).resolve().parent
Macros = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Program:
    """One build of a .cu file of this folder: its entry point, which takes one structure by value, and its macros."""

    file: str
    entry: str
    macros: Macros


@dataclass(frozen=True)
class Launch:
    """How a program is launched: blocks, threads of each, and dynamic shared memory of each in bytes."""

    blocks: int
    threads: int
    shared_bytes: int = 0


def not_here() -> str | None:
    """Why no probe of the device can run on this machine, or None."""
    if not torch.cuda.is_available():
        return "no GPU"
    use_collection()
    from kernels.cuda.compile import available

    return available()


def compilable() -> str | None:
    """Why probes cannot even be compiled here, or None."""
    use_collection()
    from kernels.cuda.compile import compilable as reason

    return reason()


def compile_for(program: Program, arch: str) -> Resources:
    """Compile a program for "sm_90a"..., which needs no device; raises RuntimeError with the compiler's log."""
    use_collection()
    from kernels.cuda.compile import Source, compile_source

    return compile_source(Source(HERE / program.file, program.entry, program.macros), arch).resources


def device_arch() -> str:
    """What to compile for the current device: "sm_86", "sm_90a"."""
    use_collection()
    from kernels.cuda.compile import device_arch as arch_of

    return arch_of(torch.device("cuda", torch.cuda.current_device()))


def run(program: Program, how: Launch, arguments: ctypes.Structure) -> None:
    """Compile for the current device, launch and wait.

    Raises RuntimeError where the compiler, the driver or the kernel fails, with its words.
    """
    use_collection()
    from kernels.cuda.compile import Source, compile_source, launch, load

    source = Source(HERE / program.file, program.entry, program.macros)
    kernel = load(compile_source(source, device_arch()))
    launch(kernel, (how.blocks,), (how.threads,), how.shared_bytes, arguments)
    torch.cuda.synchronize()
