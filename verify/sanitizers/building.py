"""Building: a program under a tool tells when Triton compiles, so that its deadline does not run.

Under a tool Triton's own passes take long before ptxas, whose process shows that it compiles.
NVRTC's builds tell everywhere (`verify.cuda.telling`).
"""

from __future__ import annotations

from collections.abc import Callable

from verify.cuda.telling import telling


def watch_triton() -> None:
    """Tell of all that Triton compiles from now on.  Call it when Triton is loaded, and before its
    first launch: a kernel then takes the compiler from there.

    (Triton's hooks around a compilation would do, but it writes all constants of a kernel as JSON
    for them, which Gluon's need not be.)
    """
    from triton import compiler

    compile_kernel: Callable[..., object] = compiler.compile

    def told(*source: object, **options: object) -> object:
        with telling():
            return compile_kernel(*source, **options)

    compiler.compile = told
