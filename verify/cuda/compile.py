"""Compiles, loads and launches CUDA C++: NVRTC through cuda.core, a cache on disk, torch's streams.

`compile_source` needs neither driver nor device, so any machine can compile every kernel for every
architecture.  The cache stores a binary under a hash of everything that it depends on: the texts of
the source and of all headers that it includes, options, architecture and NVRTC's version.  A worker
that finds no entry compiles under a lock, so that parallel workers compile only once.

cuda.core is imported late, so that kernel files can be imported, and their declarations read, on a
machine without it.
"""

from __future__ import annotations

import ctypes
import io
import json
import os
import re
import tempfile
from dataclasses import asdict, dataclass, replace
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock

from verify.bundle import ROOT
from verify.cuda import toolkit
from verify.cuda.includes import included
from verify.cuda.telling import telling
from verify.variant import Binary, Build, Resources, arch_of

HEADERS = ROOT / "kernels" / "cuda"
"""The directory of ptx.cuh, which every source can include."""


class CompileError(RuntimeError):
    """NVRTC or ptxas refused a source; the message is their log."""


class LaunchError(RuntimeError):
    """The driver refused a call, or the arguments do not fit the kernel's parameters."""


@dataclass(frozen=True)
class Source:
    """One build of a .cu file.

    entry: an `extern "C"` kernel in it.  defines: macros.  includes: directories to search after
    the file's directory and kernels/cuda, and before the toolkit's.  options: more keywords of
    `cuda.core.ProgramOptions`; different values must have different reprs.
    """

    path: Path
    entry: str
    defines: tuple[tuple[str, str], ...] = ()
    includes: tuple[Path, ...] = ()
    options: tuple[tuple[str, object], ...] = ()


@dataclass(frozen=True, eq=False)
class Kernel:
    """A loaded entry point, for every device of its architecture.  sizes: its parameters' sizes in
    bytes."""

    handle: Any  # cuda.core's Kernel, which keeps its library loaded
    entry: str
    sizes: tuple[int, ...]


# Compilation.


@cache
def compilable() -> str | None:
    """Why CUDA C++ cannot be compiled here, or None."""
    try:
        from cuda.core import ObjectCode, Program, ProgramOptions  # noqa: F401

        _nvrtc_version()
    except (ImportError, RuntimeError) as error:
        return f"no NVRTC through cuda.core: {error}"
    return None


def compile_source(source: Source, arch: str) -> Binary:
    """Compile the source for an architecture such as "sm_90a", or take it from the cache.

    Raises CompileError with the compiler's log, or with the text of `compilable` if there is no
    compiler.
    """
    reason = compilable()
    if reason is not None:
        raise CompileError(reason)
    entry = cache_directory() / f"{_key(source, arch)}.cubin"
    binary = _read(entry)
    if binary is not None:
        return binary
    entry.parent.mkdir(parents=True, exist_ok=True)
    # The holder of the lock can be another process that compiles the same kernel.
    with telling(), FileLock(entry.with_suffix(".lock")):
        binary = _read(entry)  # another worker can have been first
        if binary is None:
            binary = _compile(source, arch)
            _keep(entry, binary)
    return binary


def build_of(
    name: str,
    source: Source,
    arch: str,
    *,
    shared: int,
    spill_budget: int | None = 0,
    expects: tuple[str, ...] = (),
) -> Build:
    """The build of a source, with what it declares (see `verify.variant.Build`).

    shared: dynamic shared memory of a launch, in bytes per block.
    """

    def compile_() -> Binary:
        binary = compile_source(source, arch)
        needs = binary.resources
        return replace(binary, resources=replace(needs, shared=needs.shared + shared))

    return Build(name, compile_, spill_budget, expects)


def cache_directory() -> Path:
    """The directory of compiled kernels: VERIFY_CUDA_CACHE, or attention-verify/cuda in the user's
    cache directory."""
    setting = os.environ.get("VERIFY_CUDA_CACHE")
    user = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(setting) if setting else Path(user) / "attention-verify" / "cuda"


def resources_from(log: str, entry: str) -> Resources:
    """The resources that `ptxas -v` reports for the entry point.  Raises ValueError if it reports
    none."""
    for part in re.split(r"Compiling entry function ", log)[1:]:
        if not part.startswith(f"'{entry}'"):
            continue
        frame = re.search(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", part
        )
        used = re.search(r"Used (\d+) registers", part)
        if frame is None or used is None:
            break
        stack, stores, loads = (int(number) for number in frame.groups())
        shared = re.search(r"(\d+) bytes smem", part)
        return Resources(int(used[1]), int(shared[1]) if shared else 0, stack, stores, loads)
    raise ValueError(f"ptxas reports no resources of {entry}")


def _compile(source: Source, arch: str) -> Binary:
    from cuda.core import Program, ProgramOptions

    options: dict[str, Any] = {
        "name": _source_name(source.path),
        "arch": arch,
        "std": "c++17",
        "define_macro": list(source.defines) or None,
        "include_path": [str(path) for path in _include_path(source)],
        "lineinfo": True,  # for sanitizer reports; changes no instruction
        # With a driver NVRTC keeps its own cache, whose binaries come without ptxas' output.
        "no_cache": True,
    }
    options |= dict(source.options)
    options["ptxas_options"] = ["-v", *options.get("ptxas_options", ())]
    log = io.StringIO()
    try:
        program = Program(source.path.read_text(encoding="utf-8"), "c++", ProgramOptions(**options))
        code = program.compile("cubin", logs=log)
        return Binary(bytes(code.code), source.entry, resources_from(log.getvalue(), source.entry))
    except Exception as error:
        raise CompileError(
            f"{_source_name(source.path)} for {arch}: {error}\n{log.getvalue()}".rstrip()
        ) from error


def _source_name(path: Path) -> str:
    resolved = path.resolve()
    return resolved.relative_to(ROOT).as_posix() if resolved.is_relative_to(ROOT) else str(resolved)


def _include_path(source: Source) -> list[Path]:
    return [source.path.resolve().parent, HEADERS, *source.includes, *toolkit.includes()]


def _nvrtc_version() -> str:
    from cuda.bindings import nvrtc

    status, major, minor = nvrtc.nvrtcVersion()
    if int(status):
        raise RuntimeError(f"nvrtcVersion: {status}")
    return f"{major}.{minor}"


# The cache.


def _key(source: Source, arch: str) -> str:
    """A hash of everything that the binary depends on."""
    options = (
        arch,
        source.entry,
        source.defines,
        source.options,
        _nvrtc_version(),
        _source_name(source.path),
    )
    texts = included(source.path, _include_path(source))
    return sha256(repr(options).encode() + b"".join(text.digest for text in texts)).hexdigest()[:40]


def _read(path: Path) -> Binary | None:
    """The cached binary, or None if there is none or if it is damaged: its first line holds the
    hash of the rest."""
    try:
        head, cubin = path.read_bytes().split(b"\n", 1)
        data = json.loads(head)
        if data["sha256"] != sha256(cubin).hexdigest():
            return None
        return Binary(cubin, data["entry"], Resources(**data["resources"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _keep(path: Path, binary: Binary) -> None:
    head = {
        "sha256": sha256(binary.cubin).hexdigest(),
        "entry": binary.entry,
        "resources": asdict(binary.resources),
    }
    write_whole(path, json.dumps(head).encode() + b"\n" + binary.cubin)


def write_whole(path: Path, data: bytes) -> None:
    """Write a file of the cache so that no process ever sees a part of it."""
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as file:
        file.write(data)
    os.replace(file.name, path)


# Running.


@cache
def available() -> str | None:
    """Why CUDA C++ kernels cannot run here, or None."""
    # Check the device first: without a driver, cuda.core's loader can hang.
    if not torch.cuda.is_available():
        return "no CUDA device"
    return compilable()


def device_arch(device: torch.device) -> str:
    """The architecture to compile for: "sm_86", and from Hopper on with the suffix that enables the
    architecture's specific instructions ("sm_90a")."""
    return arch_of(torch.cuda.get_device_capability(device)).target


_loaded: dict[tuple[bytes, str], Kernel] = {}


def load(binary: Binary) -> Kernel:
    """The binary's entry point, loaded once per process.  Raises LaunchError if no CUDA kernel can
    run here."""
    key = (sha256(binary.cubin).digest(), binary.entry)
    if key not in _loaded:
        reason = available()
        if reason is not None:
            raise LaunchError(reason)
        from cuda.core import ObjectCode

        torch.cuda.init()  # type: ignore[no-untyped-call]
        _make_current()
        handle = ObjectCode.from_cubin(binary.cubin, name=binary.entry).get_kernel(binary.entry)
        _loaded[key] = Kernel(
            handle, binary.entry, tuple(info.size for info in handle.arguments_info)
        )
    return _loaded[key]


def launch(
    kernel: Kernel, grid: tuple[int, ...], block: tuple[int, ...], shared_bytes: int, *args: object
) -> None:
    """Launch on torch's current device and stream; use `torch.cuda.device_of(tensor)` to select
    them.

    shared_bytes: dynamic shared memory per block.  args: one per parameter, an address (int), a
    ctypes value or structure, or a numpy scalar; their sizes must equal the parameters' sizes.
    Raises LaunchError, before or at the launch.
    """
    from cuda.bindings import driver

    values = [_value(arg) for arg in args]
    sizes = tuple(ctypes.sizeof(value) for value in values)
    if sizes != kernel.sizes:
        raise LaunchError(
            f"{kernel.entry}: arguments of {sizes} bytes, where its parameters have {kernel.sizes}"
        )
    _make_current()
    _allow_shared(kernel, shared_bytes, torch.cuda.current_device())
    pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
    stream = torch.cuda.current_stream().cuda_stream
    dims = (*(*grid, 1, 1)[:3], *(*block, 1, 1)[:3])
    (status,) = driver.cuLaunchKernel(
        int(kernel.handle.handle), *dims, shared_bytes, stream, ctypes.addressof(pointers), 0
    )
    _check(status, f"{kernel.entry}: launch of {grid} x {block} with {shared_bytes} bytes")


def _make_current() -> None:
    """Make the primary context of torch's current device current; a new thread has none."""
    from cuda.core import Device

    Device(torch.cuda.current_device()).set_current()


_allowed: dict[tuple[Kernel, int], int] = {}


def _allow_shared(kernel: Kernel, shared_bytes: int, device: int) -> None:
    """Request more than 48 KiB of dynamic shared memory, which CUDA requires per kernel and device.
    The largest request so far stays allowed."""
    from cuda.bindings import driver

    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    if shared_bytes > _allowed.get((kernel, device), 48 * 1024):
        (status,) = driver.cuKernelSetAttribute(
            attribute, shared_bytes, kernel.handle.handle, device
        )
        _check(status, f"{kernel.entry}: {shared_bytes} bytes of shared memory")
        _allowed[kernel, device] = shared_bytes


def _value(arg: object) -> Any:
    """An argument as a ctypes object; the caller keeps it until the launch has copied it."""
    if isinstance(arg, int) and not isinstance(arg, bool):
        return ctypes.c_uint64(arg)
    if isinstance(arg, ctypes.Structure | ctypes._SimpleCData):
        return arg
    if isinstance(arg, np.generic):
        return ctypes.create_string_buffer(arg.tobytes(), arg.itemsize)
    raise LaunchError(
        f"{type(arg).__name__} is not a kernel argument: give an address, a ctypes value or a numpy"
        " scalar"
    )


def _check(status: Any, call: str) -> None:
    if int(status):
        raise LaunchError(f"{call}: {getattr(status, 'name', status)}")
