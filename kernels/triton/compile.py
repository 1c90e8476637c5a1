"""Compiles a launch of a Triton or Gluon kernel without a GPU, and reads what ptxas says it needs.

Triton's own binder turns the launch's arguments, tensors on the "meta" device, into signature and
specialisation: the binary is that which such a launch would use on the target.  It lies in Triton's
cache as after a launch.  Needs no driver.  Holds for Triton 3.6 and 3.7, whose binder, `_pack_args`
and `make_cubin` are not public.
"""

import contextlib
import io
import re
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import create_function_from_signature

from kernels.triton.common import Launch
from references.masks import Causal, Full, Lengths, Mask, Window
from verify.variant import AttentionArgs, Binary, Config, Resources, arch_named, compiled_archs

_USED = re.compile(r"Used (\d+) registers")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


def compilable() -> str | None:
    """Why nothing is compiled here, or None."""
    if triton.knobs.runtime.interpret:
        return (
            "Triton interprets here and compiles nothing: unset TRITON_INTERPRET before it is"
            " imported"
        )
    return None


def compiled(launch: Launch, arch: str) -> Any:
    """Triton's CompiledKernel of that launch for one of `compiled_archs()`: `.asm["ptx"]`,
    `.asm["cubin"]`, `.metadata`.

    Raises RuntimeError where Triton interprets, ValueError for another arch, and what Triton or
    ptxas raise.
    """
    reason = compilable()
    if reason is not None:
        raise RuntimeError(reason)
    kernel, backend = launch.kernel, make_backend(target(arch))
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, options = bind(*launch.arguments, **launch.keywords)
    options, signature, constants, attributes = kernel._pack_args(
        backend, launch.keywords, bound, specialization, options
    )
    language = GluonASTSource if kernel.is_gluon() else ASTSource
    source = language(kernel, signature, constants, attributes)
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


def expected(dtype: str, *, aligned: bool) -> tuple[str, ...]:
    """The instructions that a binary with matrix products must contain: MMA but for fp32, whose
    products are exact, and asynchronous copies of aligned rows."""
    products = () if dtype == "float32" else ("MMA",)
    return (*products, "LDGSTS") if aligned else products


def target(arch: str) -> GPUTarget:
    """Triton's target for one of `compiled_archs()`; it adds the "a" of "sm_90a" itself.  Raises
    ValueError."""
    capability = arch_named(arch).capability
    if arch not in compiled_archs() or capability is None:
        raise ValueError(f"arch: {arch!r} is none of {', '.join(compiled_archs())}")
    return GPUTarget("cuda", 10 * capability[0] + capability[1], 32)


@contextlib.contextmanager
def _ptxas_log() -> Any:
    """What `ptxas -v` writes meanwhile: Triton always asks it, and prints the answer if told to."""
    with triton.knobs.nvidia.scope(), contextlib.redirect_stdout(io.StringIO()) as log:
        triton.knobs.nvidia.dump_ptxas_log = True
        yield log


# A mask of each kind of build, for a batch of two.
MASKS: dict[str, Mask] = {
    "full": Full(),
    "causal": Causal(),
    "window": Window(256, 0),
    "interval": Lengths((700, 1024), (900, 1024)),
}


def meta(shape: tuple[int, ...], dtype: str, *, aligned: bool = True) -> Tensor:
    """A tensor without memory; if not aligned, each row is followed by one element that is not its
    own."""
    tensor = torch.empty(
        (*shape[:-1], shape[-1] + (0 if aligned else 1)), dtype=getattr(torch, dtype), device="meta"
    )
    return tensor[..., : shape[-1]]


def arguments(
    config: Config, dtype: str, head_dim: int, kind: str, *, aligned: bool = True
) -> AttentionArgs:
    """Arguments without memory that lead to the build of that dtype, head dim, key of MASKS and
    alignment.

    Triton specialises nothing else, so that sizes and scale are any.
    """
    q, k, v = (meta((2, heads, 1024, head_dim), dtype, aligned=aligned) for heads in (4, 2, 2))
    return AttentionArgs(
        q=q, k=k, v=v, mask=MASKS[kind], softmax_scale=0.1, score_mod=None, config=config
    )
