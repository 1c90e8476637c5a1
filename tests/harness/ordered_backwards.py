"""Honest backwards whose sums have a declared order, and how much of what their bounds leave around
the nominal gradients they use.

`python3 -m tests.harness.ordered_backwards INPUTS` emulates so many climbed inputs of each and
prints the largest part.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from tests.harness.backward_inputs import Inputs
from tests.harness.cancelling import cancelling, changed, what_is_saved
from tests.harness.emulation import Luck
from tests.harness.emulation_backward import NAMES, Backward, BackwardKernel
from tests.harness.honest_backwards import HALF, SINGLE, UNUSUAL, arithmetic, saver
from verify.arithmetic.dtypes import dtype_named
from verify.judging.lattice import explained
from verify.problem import Problem
from verify.tolerance.backward import gradient_truth

ASCENDING = {"head_dim": "ascending", "keys": "ascending", "rows": "ascending"}
WHOLE_FIRST = {"head_dim": "ascending", "keys": "whole_first", "rows": "whole_first"}


def ordered(
    kernel: BackwardKernel, whole: tuple[float, float] | None = None, **changes: object
) -> BackwardKernel:
    """The kernel with one chain per sum, in a declared order, and results in fp32."""
    order = ASCENDING if whole is None else WHOLE_FIRST
    name = changes.pop("name", kernel.name)
    return kernel.but(
        name=f"{name}, {order['rows']}",
        whole=whole,
        wide=True,
        **({"block_m": 0, "block_n": 0} | order | changes),
    )


TF32 = SINGLE.but(float32_products="tf32", forward=saver("sm_80", float32_products="tf32"))
HONEST = (
    ordered(SINGLE),
    ordered(SINGLE, (0.4, 0.8)),
    ordered(SINGLE, group="cast", name="fp32, cast heads"),
    ordered(HALF),
    ordered(HALF, (0.3, 1.0)),
    ordered(HALF, name="sm_80", forward=saver("sm_80")),
    ordered(HALF, name="sm_70", forward=saver("sm_70"), dtypes=("float16",)),
    ordered(TF32, name="tf32"),
    ordered(UNUSUAL[0], (0.5, 0.7)),  # prescaled K
    ordered(UNUSUAL[3]),  # dS of rounded P, scaled
    ordered(UNUSUAL[10]),  # a softmax of its own
)
SHAPES = (
    "sq=33,skv=48,d=64",
    "sq=20,skv=129,d=32,dv=16",
    "sq=70,skv=33,d=24,scale=0.3",
    "hq=4,hkv=2,sq=40,skv=30,d=16,mask=causal",
    "hq=3,hkv=1,sq=50,skv=50,d=8,mask=window.20.3",
    "b=2,hq=2,hkv=1,sq=20,skv=24,d=16,mask=causal+lengths.10_20.24_7",
    "sq=40,skv=40,d=16,softcap=3.0",
)


def parts(
    problem: Problem,
    kernel: BackwardKernel,
    luck: Luck,
    given: Inputs,
    aim: str = "dq",
    declared: BackwardKernel | None = None,
) -> dict[str, Tensor]:
    """By gradient: how far its elements are from the middle, as a part of how far they may be."""
    saved = what_is_saved(problem, kernel, luck, given)
    found = Backward(problem, kernel, luck, aim).run(given, saved)
    read = given.q, given.k, given.v, given.dout, saved.out.double(), saved.lse.double()
    truth = gradient_truth(problem, *read, arithmetic(problem, declared or kernel))
    assert truth.intervals is not None
    spans, single = truth.intervals, dtype_named("float32")
    return {n: explained(found[n], spans[n].middle, spans[n].reach, single) for n in NAMES}


def climbed(
    problem: Problem, kernel: BackwardKernel, seed: int, generations: int
) -> Iterator[float]:
    """The largest part of each input of a climb, one that is changed and kept if it is worse."""
    given, kept = cancelling(problem, seed) if seed % 3 else Inputs.of(problem), 0.0
    for step in range(generations):
        tried = changed(given, 1000 * seed + step) if step else given
        luck = Luck.AGAINST if step % 2 else Luck.NEAREST
        found = parts(problem, kernel, luck, tried, NAMES[(seed + step // 2) % 3])
        largest = max(float(x.max()) for x in found.values())
        if largest >= kept:
            given, kept = tried, largest
        yield largest


def turned(kernel: BackwardKernel, seed: int) -> BackwardKernel:
    """The same kernel; if it has blocks that it takes first, others."""
    if kernel.whole is None:
        return kernel
    at = torch.rand(2, generator=torch.Generator().manual_seed(seed)).sort().values
    return replace(kernel, whole=(float(at[0]), float(at[1])))


def main(inputs: int) -> int:
    """Climb so many inputs of each kernel and dtype; 1 if an element was refused."""
    refused = 0
    for kernel, dtype in ((each, dtype) for each in HONEST for dtype in each.dtypes):
        worst = 0.0
        for seed in range(inputs):
            problem = Problem.parse(f"{SHAPES[seed % len(SHAPES)]},dtype={dtype},seed={seed}")
            largest = max(climbed(problem, turned(kernel, seed), seed, 6))
            worst = max(worst, largest)
            if not largest <= 1:
                refused = 1
                print("REFUSED", kernel.name, problem.name, seed, largest, flush=True)
        print(f"{worst:7.4f}  {kernel.name}, {dtype}", flush=True)
    return refused


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main(int(sys.argv[1])))
