"""Compiles a launch of a Gluon kernel without a GPU, as `kernels.triton.compile` does one of
Triton's, and reads what ptxas says that it needs."""

from typing import Any

import triton
from triton.compiler import make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import create_function_from_signature

from kernels.triton.common import Launch
from kernels.triton.compile import _FRAME, _USED, _ptxas_log, target
from verify.variant import Binary, Resources


def compilable() -> str | None:
    """Why Gluon compiles nothing here, or None."""
    if triton.knobs.runtime.interpret:
        return "Triton interprets here: unset TRITON_INTERPRET before it is imported"
    return None


def compiled(launch: Launch, arch: str) -> Any:
    """Triton's CompiledKernel of that launch; raises RuntimeError where nothing can be compiled,
    ValueError for an arch that is none of `compiled_archs()`, and what Triton or ptxas raise."""
    reason = compilable()
    if reason is not None:
        raise RuntimeError(reason)
    kernel, backend = launch.kernel, make_backend(target(arch))
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, options = bind(*launch.arguments, **launch.keywords)
    options, signature, constants, attributes = kernel._pack_args(
        backend, launch.keywords, bound, specialization, options
    )
    source = GluonASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=backend.target, options=options.__dict__)


def binary(launch: Launch, arch: str) -> Binary:
    """The binary of `compiled`, with what it needs; raises as that does, and ValueError if ptxas
    does not say."""
    with _ptxas_log() as log:
        kernel = compiled(launch, arch)
        if not log.getvalue():  # it was in the cache: assemble its PTX again, with the same options
            backend = make_backend(target(arch))
            options = backend.parse_options(launch.keywords)
            backend.make_cubin(kernel.asm["ptx"], {}, options, backend.target.arch)
    used, frame = _USED.search(log.getvalue()), _FRAME.search(log.getvalue())
    if used is None or frame is None:
        raise ValueError(
            f"ptxas -v did not say what {launch.kernel.__name__} needs on {arch}:"
            f" {log.getvalue()!r}"
        )
    stack, stores, loads = map(int, frame.groups())
    needs = Resources(int(used[1]), kernel.metadata.shared, stack, stores, loads)
    return Binary(kernel.asm["cubin"], kernel.metadata.name, needs)
