"""Compiles ahead what a campaign asks of the CuTe variants:
`python -m tests.harness.cute_builds [ARCH [PROCESSES]]`.

For each config, dtype and head dim of each variant, into the cache of compiled kernels
(VERIFY_CUDA_CACHE).  A build takes 15 to 30 s of one core and needs no GPU, so a machine without
one can make them for one with one: 168 of them for sm_90a, 26 MB as a tar.xz.  The cache's keys
hold NVRTC's version, which must be the same on both.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import product
from multiprocessing import get_context

from kernels.cute import flash_backward, flash_forward, hopper_forward, hopper_fp8_forward
from kernels.cute.flash_backward_walks import sums_launch, walk_launch
from verify.cuda.compile import Source, compile_source
from verify.machine.cores import cores
from verify.variant import Config, Variant

FORWARDS = (*flash_forward.VARIANTS, hopper_forward.VARIANT, *hopper_fp8_forward.VARIANTS)


def _choices(variant: Variant) -> Iterator[tuple[Config, str, int]]:
    support = variant.support
    return product(variant.configs, support.dtypes, support.head_dims)


def sources() -> list[Source]:
    """All of them, each once."""
    found = []
    for variant in FORWARDS:
        family = variant.forward.__self__  # type: ignore[union-attr]
        found += [family.make(*choice, "").source for choice in _choices(variant)]
    for variant in flash_backward.VARIANTS:
        walks = variant.backward.__self__  # type: ignore[union-attr]
        for config, dtype, head_dim in _choices(variant):
            found.append(sums_launch(dtype, head_dim).source)
            found += [walk_launch(w, config, dtype, head_dim).source for w in walks.of(head_dim)]
    return list(dict.fromkeys(found))


def _seconds(source: Source, arch: str) -> float:
    begun = time.monotonic()
    compile_source(source, arch)
    return time.monotonic() - begun


def main(arch: str = "sm_90a", processes: str = "") -> int:
    wanted, failed = sources(), 0
    with ProcessPoolExecutor(int(processes or cores()), get_context("spawn")) as pool:
        asked = {pool.submit(_seconds, source, arch): source for source in wanted}
        for number, done in enumerate(as_completed(asked), 1):
            error = done.exception()
            failed += error is not None
            said = repr(error) if error else f"{done.result():.1f} s"
            print(f"{number} of {len(wanted)}: {asked[done].path.name} {said}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
