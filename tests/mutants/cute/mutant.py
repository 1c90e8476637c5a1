"""What of the CuTe sources is mutated, and by which builds a mutant is tried."""

from __future__ import annotations

from tests.harness.ptx_host import Choice
from tests.mutants.cuda.mutant import CudaMutant, mutants
from tests.mutants.mutant import in_turn

# A file of kernels/cute, and how many of its mutants are chosen.
GROUNDS = {
    "kernels/cute/flash_forward.cu": 40,
    "kernels/cute/fused_softmax.cuh": 25,
    "kernels/cute/intervals.cuh": 20,
    "kernels/cute/tiles.cuh": 15,
}
# Tiles of 64 rows and of 128, pieces of 32 columns and of several, either dtype; and a tile of 128
# keys, whose softmax is lazy.
BUILDS = (
    Choice("cute_flash", 0, "bfloat16", 32, "any"),
    Choice("cute_flash", 1, "float16", 96, "any"),
    Choice("cute_flash", 3, "float16", 64, "any"),
)


def chosen() -> list[CudaMutant]:
    """All mutants of the CuTe forward that are judged, the files in turn."""
    return list(in_turn([list(mutants(edited, wanted)) for edited, wanted in GROUNDS.items()]))
