"""Building: a program under a tool tells that it compiles, so that its deadline does not run.

NVRTC compiles inside the program, where no compiler's process shows it; a CuTe kernel takes a
minute on a busy machine.  The program changes its name meanwhile (`verify.cell.under_tool.BUILDS`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from verify.cell.under_tool import BUILDS
from verify.variant import Binary

_OWN_NAME = Path("/proc/self/comm")


def watch() -> None:
    """Tell of every compilation from now on.  Call it before kernel files are loaded."""
    from verify.cuda import compile as cuda

    compile_source: Callable[..., Binary] = cuda.compile_source

    def told(*source: object) -> Binary:
        with telling():
            return compile_source(*source)

    cuda.compile_source = told  # type: ignore[assignment]


def watch_triton() -> None:
    """The same for what Triton compiles before a launch.  Call it when Triton is loaded, and before
    its first launch: a kernel then takes the compiler from there.

    (Triton's hooks around a compilation would do, but it writes all constants of a kernel as JSON
    for them, which Gluon's need not be.)
    """
    from triton import compiler

    compile_kernel: Callable[..., object] = compiler.compile

    def told(*source: object, **options: object) -> object:
        with telling():
            return compile_kernel(*source, **options)

    compiler.compile = told


@contextlib.contextmanager
def telling() -> Iterator[None]:
    """Tell that this process compiles meanwhile."""
    name = _OWN_NAME.read_text(encoding="utf-8").strip() if _OWN_NAME.exists() else ""
    _call_itself(BUILDS)
    try:
        yield
    finally:
        _call_itself(name)


def _call_itself(name: str) -> None:
    with contextlib.suppress(OSError):
        _OWN_NAME.write_text(name, encoding="utf-8")
