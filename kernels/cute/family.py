"""What the CuTe variants share on the host: the headers they need, how a source becomes a build,
and what the forwards declare alike.

A variant's file takes from here and from kernels/cuda/family.py, so that an edit of one variant
concerns no other.
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Mapping
from pathlib import Path

from kernels.ptx.tiling import MASKS
from verify.cuda.compile import CompileError, Source
from verify.cuda.compile import available as cuda_available
from verify.cuda.compile import compilable as cuda_compilable
from verify.cuda.toolkit import includes as toolkit_includes
from verify.variant import (
    Contract,
    Maximum,
    Numerics,
    Order,
    Output,
    Products,
    RowSum,
    Softmax,
    Support,
)

WARPS = 4  # of a block of sm_80's variants
STAGES = 2  # of their pipeline
HEAD_DIMS = tuple(range(32, 257, 32))
ELEMENTS = {"float16": "half_t", "bfloat16": "bfloat16_t"}


def headers() -> Path | None:
    """The directory that holds cute/ and cutlass/: of CUTLASS_PATH, itself or its include/, else of
    nvidia-cutlass."""
    chosen = os.environ.get("CUTLASS_PATH")
    roots = [Path(chosen), Path(chosen) / "include"] if chosen else []
    package = importlib.util.find_spec("cutlass_library")
    for location in package.submodule_search_locations or () if package is not None else ():
        roots.append(Path(location) / "source" / "include")
    return next((root for root in roots if (root / "cute" / "tensor.hpp").is_file()), None)


def available() -> str | None:
    """Why this variant cannot run here, or None."""
    return cuda_available() or _headers_missing()


def compilable() -> str | None:
    """Why it cannot be compiled here, or None."""
    return cuda_compilable() or _headers_missing()


def _headers_missing() -> str | None:
    if headers() is None:
        return (
            "no CuTe headers: set CUTLASS_PATH, or install nvidia-cutlass without its dependencies"
        )
    if not any(
        (directory / "cuda" / "std" / "limits").is_file() for directory in toolkit_includes()
    ):
        return "no CCCL headers, which CuTe includes: install nvidia-cuda-cccl"
    return None


def cute_source(path: Path, entry: str, defines: Mapping[str, object]) -> Source:
    """A build of a source that includes CuTe; raises CompileError where headers are missing."""
    directory, missing = headers(), _headers_missing()
    if directory is None or missing is not None:
        raise CompileError(missing or "")
    return Source(
        path,
        entry,
        defines=tuple((name, str(value)) for name, value in defines.items()),
        includes=(directory,),
        # CuTe leaves many a constexpr function without __device__.
        options=(("device_as_default_execution_space", True),),
    )


SUPPORT = Support(
    dtypes=tuple(ELEMENTS),
    head_dims=HEAD_DIMS,
    masks=MASKS,
    intersections=True,
    grouped_heads=True,
    min_seqlen=0,
    layouts="aligned",
    devices=("cuda",),
    capability=(8, 0),
)

NUMERICS = Numerics(
    products=Products(operands="input", instruction="mma.sync", accumulator="float32"),
    softmax=Softmax(
        scores="float32",
        exp="ex2.approx",
        maximum=Maximum(key_order="ascending"),
        # a row's columns lie in four neighbouring lanes
        row_sum=RowSum(lanes=4, apart=True, lse="log2"),
    ),
    output=Output(probability="input"),
    order=Order(head_dim="ascending"),  # `multiply` takes one step of head_dim after another
)

CONTRACT = Contract(
    lse="natural",
    empty_row_out=0.0,
    empty_row_lse=-math.inf,
    deterministic=True,
    # NaN in V at a key that a row of the tile sees reaches, as 0 * NaN in P V, the rows of that
    # tile that do not.
    masked_values="finite",
    batch_invariant=True,
)
