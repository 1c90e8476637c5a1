"""CUDA C++ to a kernel that runs: NVRTC through cuda.core, a cache on disk, loading and launching
beside torch.

`compile_source` needs neither driver nor device, so that every kernel can be compiled for every
architecture anywhere.  What it made is kept under a key that names all that went in: the texts of
the source and of every header that it includes, options, architecture and NVRTC's version.  Whoever
finds no entry compiles under a lock, so that workers side by side compile once.

cuda.core is imported late: a kernel file can be imported, and its declaration read, where it is not
installed.
"""

from __future__ import annotations

import ctypes
import io
import json
import os
import re
import tempfile
from dataclasses import asdict, dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock

from verify.bundle import ROOT
from verify.variant import Resources, arch_of

HEADERS = ROOT / "kernels" / "cuda"
"""Where ptx.cuh is: every source can include it."""


class CompileError(RuntimeError):
    """NVRTC or ptxas refused a source; the message is their log."""


class LaunchError(RuntimeError):
    """The driver refused a call, or arguments do not fit the kernel's parameters."""


@dataclass(frozen=True)
class Source:
    """One build of a .cu file.

    entry: an `extern "C"` kernel in it.  defines: macros.  includes: directories that are searched
    after the file's own and kernels/cuda, before the toolkit's.  options: further keywords of
    `cuda.core.ProgramOptions`, with values whose repr tells them apart.
    """

    path: Path
    entry: str
    defines: tuple[tuple[str, str], ...] = ()
    includes: tuple[Path, ...] = ()
    options: tuple[tuple[str, object], ...] = ()


@dataclass(frozen=True)
class Binary:
    """A compiled source.  `resources.shared` is what is declared statically: dynamic shared memory
    is the launch's."""

    cubin: bytes
    entry: str
    resources: Resources


@dataclass(frozen=True, eq=False)
class Kernel:
    """A loaded entry point, for every device of its architecture.  sizes: of its parameters, in
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
    """The source compiled for "sm_90a"..., from the cache if it holds it.

    Raises CompileError with the compiler's log, and with `compilable`'s words where there is no
    compiler.
    """
    reason = compilable()
    if reason is not None:
        raise CompileError(reason)
    entry = cache_directory() / f"{_key(source, arch)}.cubin"
    found = _read(entry)
    if found is not None:
        return found
    entry.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(entry.with_suffix(".lock")):
        found = _read(entry)  # another worker may have been first
        if found is None:
            found = _compile(source, arch)
            _write(entry, found)
    return found


def cache_directory() -> Path:
    """Where compiled kernels are kept: VERIFY_CUDA_CACHE, or attention-verify/cuda under the user's
    cache directory."""
    chosen = os.environ.get("VERIFY_CUDA_CACHE")
    user = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(chosen) if chosen else Path(user) / "attention-verify" / "cuda"


def resources_from(log: str, entry: str) -> Resources:
    """What `ptxas -v` says of that entry point; raises ValueError if it says nothing of it."""
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


@cache
def toolkit_includes() -> tuple[Path, ...]:
    """Directories of the CUDA toolkit's headers and of CCCL's, each of wheels, else CUDA_HOME, else
    /usr/local/cuda."""
    try:
        import nvidia

        wheels = [Path(path) / "cu13" for path in nvidia.__path__]
    except ImportError:
        wheels = []
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    roots = [*wheels, *(Path(home) for home in homes if home), Path("/usr/local/cuda")]
    toolkits = [root / "include" for root in roots if (root / "include" / "cuda_fp16.h").is_file()]
    toolkits.sort(
        key=lambda path: not (path / "crt" / "host_defines.h").is_file()
    )  # wheels may lack what a host compiler needs
    cccl = [
        root / "include" / "cccl"
        for root in roots
        if (root / "include" / "cccl" / "cuda" / "std" / "limits").is_file()
    ]
    return (*toolkits[:1], *cccl[:1])


def _compile(source: Source, arch: str) -> Binary:
    from cuda.core import Program, ProgramOptions

    options: dict[str, Any] = {
        "name": _shown(source.path),
        "arch": arch,
        "std": "c++17",
        "define_macro": list(source.defines) or None,
        "include_path": [str(path) for path in _include_path(source)],
        "lineinfo": True,  # what a sanitizer's report names; changes no instruction
        # NVRTC's own cache, which it keeps where there is a driver, gives a binary without ptxas'
        # words
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
            f"{_shown(source.path)} for {arch}: {error}\n{log.getvalue()}".rstrip()
        ) from error


def _shown(path: Path) -> str:
    resolved = path.resolve()
    return resolved.relative_to(ROOT).as_posix() if resolved.is_relative_to(ROOT) else str(resolved)


def _include_path(source: Source) -> list[Path]:
    return [source.path.resolve().parent, HEADERS, *source.includes, *toolkit_includes()]


def _nvrtc_version() -> str:
    from cuda.bindings import nvrtc

    status, major, minor = nvrtc.nvrtcVersion()
    if int(status):
        raise RuntimeError(f"nvrtcVersion: {status}")
    return f"{major}.{minor}"


# The cache.

_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*[<"]([^>"\n]+)[>"]', re.MULTILINE)


def _key(source: Source, arch: str) -> str:
    """Hash of all that the binary depends on."""
    options = (
        arch,
        source.entry,
        source.defines,
        source.options,
        _nvrtc_version(),
        _shown(source.path),
    )
    return sha256(b"".join([repr(options).encode(), *_hashes(source)])).hexdigest()[:40]


def _hashes(source: Source) -> list[bytes]:
    """Hashes of the source and of every header that it includes, transitively, whatever `#if`
    stands before it."""
    path = _include_path(source)
    pending, seen, hashes = [source.path.resolve()], set[Path](), []
    while pending:
        file = pending.pop()
        if file in seen:
            continue
        seen.add(file)
        status = file.stat()
        digest, names = _scan(file, status.st_mtime_ns, status.st_size)
        hashes.append(digest)
        for name in names:
            places = (directory / name for directory in (file.parent, *path))
            pending += [place.resolve() for place in places if place.is_file()][:1]
    return hashes


@cache
def _scan(file: Path, modified: int, size: int) -> tuple[bytes, tuple[str, ...]]:
    """A file's hash and what it includes, as of that time of change."""
    text = file.read_bytes()
    return sha256(text).digest(), tuple(name.decode() for name in _INCLUDE.findall(text))


def _read(path: Path) -> Binary | None:
    """The entry, or None if there is none or if it is torn: its first line holds the hash of the
    rest."""
    try:
        head, cubin = path.read_bytes().split(b"\n", 1)
        data = json.loads(head)
        if data["sha256"] != sha256(cubin).hexdigest():
            return None
        return Binary(cubin, data["entry"], Resources(**data["resources"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(path: Path, binary: Binary) -> None:
    head = {
        "sha256": sha256(binary.cubin).hexdigest(),
        "entry": binary.entry,
        "resources": asdict(binary.resources),
    }
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as file:
        file.write(json.dumps(head).encode() + b"\n" + binary.cubin)
    os.replace(file.name, path)


# Running.


@cache
def available() -> str | None:
    """Why CUDA C++ kernels cannot run here, or None."""
    # First the device: without a driver, cuda.core's loader may hang.
    if not torch.cuda.is_available():
        return "no CUDA device"
    return compilable()


def device_arch(device: torch.device) -> str:
    """What to compile for that device: "sm_86", and from Hopper on with the suffix that unlocks its
    own instructions."""
    return arch_of(torch.cuda.get_device_capability(device)).target


_loaded: dict[tuple[bytes, str], Kernel] = {}


def load(binary: Binary) -> Kernel:
    """The binary's entry point, loaded once per process; raises LaunchError where nothing can
    run."""
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
    """Launch on torch's current device and stream: wrap in `torch.cuda.device_of(tensor)`.

    shared_bytes: dynamic shared memory per block.  args, one per parameter: an address (int), a
    ctypes value or structure, or a numpy scalar; their sizes must be those of the parameters.
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
    """The primary context of torch's current device, which a thread that has run nothing yet does
    not have."""
    from cuda.core import Device

    Device(torch.cuda.current_device()).set_current()


_allowed: dict[tuple[Kernel, int], int] = {}


def _allow_shared(kernel: Kernel, shared_bytes: int, device: int) -> None:
    """More than 48 KiB of dynamic shared memory must be asked for, per kernel and device; the most
    so far stays allowed."""
    from cuda.bindings import driver

    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    if shared_bytes > _allowed.get((kernel, device), 48 * 1024):
        (status,) = driver.cuKernelSetAttribute(
            attribute, shared_bytes, kernel.handle.handle, device
        )
        _check(status, f"{kernel.entry}: {shared_bytes} bytes of shared memory")
        _allowed[kernel, device] = shared_bytes


def _value(arg: object) -> Any:
    """An argument as a ctypes object that lives until the launch has copied it."""
    if isinstance(arg, int) and not isinstance(arg, bool):
        return ctypes.c_uint64(arg)
    if isinstance(arg, ctypes.Structure | ctypes._SimpleCData):
        return arg
    if isinstance(arg, np.generic):
        return ctypes.create_string_buffer(arg.tobytes(), arg.itemsize)
    raise LaunchError(
        f"{type(arg).__name__} is no kernel argument: give an address, a ctypes value or a numpy"
        " scalar"
    )


def _check(status: Any, what: str) -> None:
    if int(status):
        raise LaunchError(f"{what}: {getattr(status, 'name', status)}")
