"""Confinement: which files a kernel process may read and write, enforced by Landlock.

Landlock is an allow-list that a process sets for itself and for all that it starts, and that can
never be removed.  A kernel process may write its scratch directory, compiler caches and device
nodes.  It may read everything but the hidden directories (the evidence of runs).  Also, a confined
process cannot inspect a process outside (ptrace, /proc/<pid>/mem, environ, fd) and, from ABI 6 on,
cannot send it a signal.  docs/security.md says how far this protection goes.

Directories can be listed everywhere: a right on a directory holds for everything below it, so the
parents of a hidden directory cannot have that right.
"""

from __future__ import annotations

import contextlib
import ctypes
import getpass
import os
import re
import stat
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from verify.machine.places import mps_pipes

# the same on every architecture but alpha
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION, _PATH_BENEATH = 1, 1
_PR_SET_NO_NEW_PRIVS = 38
# Before ABI 2 no file can be moved to another directory, which compilers do in their caches.
_LEAST_ABI = 2

_WRITE_FILE, _READ_FILE, _TRUNCATE = 1 << 1, 1 << 2, 1 << 14
_REFER = 1 << 13
# Removing directories and files; making directories, files, sockets, pipes and links.
_CHANGE = sum(1 << bit for bit in (4, 5, 7, 8, 9, 10, 12))
_MAKE_DEVICES = 1 << 6 | 1 << 11  # always forbidden
_SCOPE_SIGNAL = 1 << 1

_CAPABILITIES_VERSION = 0x20080522
# Files of other users (0 to 4), locked memory (14) and priorities (23, 24: limits).
_KEPT_CAPABILITIES = (0, 1, 2, 3, 4, 14, 23, 24)

_NODES = ("null", "zero", "full", "random", "urandom", "shm", "dri", "dxg", "infiniband", "kfd")
_SWITCH = "VERIFY_CONFINE"  # "0" switches confinement off, for debuggers and profilers
_EXTRA = "VERIFY_WRITABLE"  # more directories, for kernels that keep caches


@dataclass(frozen=True)
class Confinement:
    """Paths that a kernel process may not read, and those that it may write: absolute, without
    symbolic links."""

    hidden: tuple[str, ...]
    writable: tuple[str, ...]


class _Ruleset(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _layout_ = "ms"
    _fields_ = (("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32))


class _CapabilityHeader(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Capabilities(ctypes.Structure):
    _fields_ = (
        ("effective", ctypes.c_uint32),
        ("permitted", ctypes.c_uint32),
        ("inheritable", ctypes.c_uint32),
    )


@cache
def abi() -> int:
    """The version of Landlock's ABI on this system; 0 if it has no Landlock."""
    try:
        version = ctypes.CDLL(None, use_errno=True).syscall(
            _CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION
        )
    except (AttributeError, OSError):
        return 0
    return max(int(version), 0)


def enabled() -> bool:
    """Whether kernel processes are confined: Landlock is new enough, and VERIFY_CONFINE is not
    0."""
    return os.environ.get(_SWITCH) != "0" and abi() >= _LEAST_ABI


def state() -> str:
    """A text for a run's record: how cells are confined on this system, or why they are not."""
    if os.environ.get(_SWITCH) == "0":
        return f"not confined: {_SWITCH}=0"
    if abi() == 0:
        return "not confined: this kernel has no Landlock"
    if abi() < _LEAST_ABI:
        return f"not confined: this kernel's Landlock is of ABI {abi()}, {_LEAST_ABI} is needed"
    return f"confined by Landlock (ABI {abi()})"


def confinement(hidden: Iterable[Path]) -> Confinement | None:
    """The rules for kernel processes, or None if they are not confined; creates missing caches."""
    if not enabled():
        return None
    writable = []
    for path in _caches():
        with contextlib.suppress(OSError):
            path.mkdir(parents=True, exist_ok=True)
        writable.append(str(path.resolve()))
    return Confinement(tuple(str(path.resolve()) for path in hidden), tuple(writable))


def variables() -> dict[str, str]:
    """Environment variables that keep caches in place, although each kernel process has its own
    temporary directory."""
    return {"TORCHINDUCTOR_CACHE_DIR": str(_inductor())}


def _home() -> Path:
    """The user's home directory; the temporary directory if there is none, as in containers."""
    try:
        return Path.home()
    except RuntimeError:
        return Path(tempfile.gettempdir())


def user_cache() -> Path:
    """The user's cache directory: XDG_CACHE_HOME, or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or _home() / ".cache")


def _inductor() -> Path:
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if folder:
        return Path(folder)
    try:
        user = getpass.getuser()
    except (KeyError, ImportError, OSError):
        user = f"uid_{os.getuid()}"
    return Path(tempfile.gettempdir(), "torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", user))


def _caches() -> Iterator[Path]:
    """The caches of compilers and libraries, and the directories that the user adds."""
    home = _home()
    yield user_cache()  # torch's extensions, ours, and many others
    yield Path(os.environ.get("TRITON_HOME") or home, ".triton")
    yield Path(os.environ.get("CUDA_CACHE_PATH") or home / ".nv")
    yield _inductor()
    names = (
        "TRITON_CACHE_DIR",
        "TORCH_EXTENSIONS_DIR",
        "VERIFY_CUDA_CACHE",
        "CUTE_DSL_CACHE_DIR",
        "NUMBA_CACHE_DIR",
    )
    for name in names:
        if os.environ.get(name):
            yield Path(os.environ[name])
    for entry in os.environ.get(_EXTRA, "").split(os.pathsep):
        if entry:
            yield Path(entry)


# The rest runs in the kernel process.


def confine(to: Confinement, scratch: str) -> None:
    """Confine this thread, and all that it starts, to `to` and its scratch directory.

    Raises OSError if the system refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    version = abi()
    write = _WRITE_FILE | _CHANGE | _REFER | (_TRUNCATE if version >= 3 else 0)
    attributes = _Ruleset(
        write | _READ_FILE | _MAKE_DEVICES, 0, _SCOPE_SIGNAL if version >= 6 else 0
    )
    size = 8 if version < 4 else 16 if version < 6 else 24
    ruleset = _checked(
        libc.syscall(_CREATE_RULESET, ctypes.byref(attributes), ctypes.c_size_t(size), 0)
    )
    try:
        for path in _readable([Path(path) for path in to.hidden]):
            _allow(libc, ruleset, path, _READ_FILE)
        for path in [Path(path) for path in (*to.writable, scratch)]:
            _allow(libc, ruleset, path, write | _READ_FILE)
        for path in _devices():
            _allow(libc, ruleset, path, write | _READ_FILE)
        _checked(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
        _drop_capabilities(libc)
        _checked(libc.syscall(_RESTRICT_SELF, ruleset, 0))
    finally:
        os.close(ruleset)


def _drop_capabilities(libc: ctypes.CDLL) -> None:
    """Keep only root's rights on files: the others give access to other processes and to the
    machine in spite of Landlock."""
    header = _CapabilityHeader(_CAPABILITIES_VERSION, 0)
    sets = (_Capabilities * 2)()
    _checked(libc.capget(ctypes.byref(header), sets))
    for half, data in enumerate(sets):
        kept = sum(
            1 << number - 32 * half
            for number in _KEPT_CAPABILITIES
            if 32 * half <= number < 32 * (half + 1)
        )
        for name in ("effective", "permitted", "inheritable"):
            setattr(data, name, getattr(data, name) & kept)
    _checked(libc.capset(ctypes.byref(header), sets))


def _devices() -> Iterator[Path]:
    """Device nodes, and the other paths that a GPU driver writes: names of this process's threads,
    pipes of MPS."""
    yield from (Path("/dev") / name for name in _NODES)
    yield from sorted(Path("/dev").glob("nvidia*"))
    yield Path("/proc") / str(os.getpid())
    yield mps_pipes()
    yield Path(os.environ.get("CUDA_MPS_LOG_DIRECTORY", "/var/log/nvidia-mps"))


def _readable(hidden: list[Path]) -> Iterator[Path]:
    """Everything but `hidden`: the siblings of each directory on the path to a hidden one.

    Symbolic links are skipped: their targets are siblings of some directory too.
    """
    on_the_way = {parent for path in hidden for parent in path.parents}
    for folder in sorted(on_the_way or {Path("/")}):
        if any(folder.is_relative_to(path) for path in hidden):
            continue
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                path = Path(entry.path)
                if path not in on_the_way and path not in hidden and not entry.is_symlink():
                    yield path


def _allow(libc: ctypes.CDLL, ruleset: int, path: Path, access: int) -> None:
    """Allow `access` to a file, or below a directory.  A path that does not exist or cannot be
    opened stays forbidden."""
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            access &= _WRITE_FILE | _READ_FILE | _TRUNCATE
        rule = _PathBeneath(access, fd)
        # Sockets and files of internal file systems can have no rule (EBADFD); they need none.
        libc.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, ctypes.byref(rule), 0)
    finally:
        os.close(fd)


def _checked(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"Landlock: {os.strerror(ctypes.get_errno())}")
    return result
