"""What of the CUDA sources is mutated, and by which builds a mutant is tried."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache, cached_property

from tests.harness.ptx_host import Choice
from tests.mutants.cuda.operators import mutations, region_of
from tests.mutants.mutant import Mutant, in_turn, sample, source

# A header of kernels/ptx, and how many of its mutants are chosen.
GROUNDS = {
    "kernels/ptx/flash.cuh": 90,
    "kernels/ptx/pipeline.cuh": 90,
    "kernels/ptx/tile.cuh": 30,
    "kernels/ptx/policies.cuh": 30,
}
# Every line of the headers is compiled by one of these: each tiling, kind of mask and storage, sums
# in fp32 and in fp16, operands of 8 bits, one slot and several, one row tile and several, one tile
# of keys and several, one slice of V and several, rows that are padded and swizzled, sums of 8-bit
# products that begin at zero.
BUILDS = (
    Choice("split_q", 1, "bfloat16", 96, "band"),
    Choice("split_kv", 0, "bfloat16", 96, "table"),
    Choice("split_kv", 3, "float16", 64, "band"),
    Choice("share_kv", 1, "float16-narrow", 96, "full"),
    Choice("share_kv", 0, "bfloat16", 64, "full"),
    Choice("share_qkv", 0, "float16", 32, "band"),
    Choice("share_qkv", 3, "float16", 96, "table"),
    Choice("tiling_qk", 0, "float16-narrow", 96, "band"),
    Choice("tiling_qkv", 0, "float16-narrow", 32, "full"),
    Choice("split_q_fp8", 2, "float8_e4m3fn", 32, "table"),
    Choice("split_q_fp8", 0, "float8_e4m3fn", 64, "full"),
    Choice("split_q", 1, "float16", 64, "full", "transposed"),
    Choice("split_q", 2, "bfloat16", 32, "band", "transposed"),
    Choice("tiling_qk", 1, "bfloat16", 64, "band", "transposed"),
    Choice("split_q", 2, "float16-narrow", 32, "table"),
    Choice("tiling_qkv", 0, "bfloat16", 64, "table"),
    Choice("tiling_qk", 0, "bfloat16", 512, "band"),
    Choice("tiling_qk", 0, "float16", 512, "full", "transposed"),
    Choice("split_q_fp8", 0, "float8_e4m3fn", 64, "full", arch=890),
)


@dataclass(frozen=True)
class CudaMutant(Mutant):
    """One mutation of one file of CUDA C++."""

    @cached_property
    def key(self) -> str:
        """Of the innermost function's text, the place in it and the new text."""
        made = self.mutation
        text = source(self.edited)
        region = region_of(text, made)
        place = made.start - region.start, made.end - region.start
        told = text[region.start : region.end], place, made.after
        return hashlib.sha256(repr(told).encode()).hexdigest()[:8]


@cache
def mutants(edited: str, wanted: int) -> tuple[CudaMutant, ...]:
    """So many mutants of a file."""
    made = mutations(source(edited))
    return sample((CudaMutant(edited, mutation) for mutation in made), wanted)


def chosen() -> list[CudaMutant]:
    """All mutants of the raw-PTX kernels that are judged, the headers in turn."""
    return list(in_turn([list(mutants(edited, wanted)) for edited, wanted in GROUNDS.items()]))
