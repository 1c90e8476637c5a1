"""Inputs whose product-sums return towards zero, as far as a search takes them: what bounds of
partial sums must allow.

`python3 -m tests.harness.cancelling ELEMENTS` emulates honest kernels on such inputs until so many
elements of each tensor were compared, and prints the largest error over bound of each declaration.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from tests.harness.backward_inputs import Inputs, exact
from tests.harness.emulation import Emulation, Kernel, Luck, Result
from tests.harness.emulation_backward import NAMES, Backward, BackwardKernel
from tests.harness.honest_backwards import HONEST as BACKWARDS
from tests.harness.honest_backwards import UNUSUAL, arithmetic
from tests.meta.tolerance.test_tolerance import HONEST
from verify.arithmetic.dtypes import dtype_named
from verify.judging.comparison import compare
from verify.judging.truth import compute_truth
from verify.problem import Problem
from verify.tolerance.backward import gradient_truth
from verify.tolerance.forward import resolve
from verify.variant import Config


def signs(count: int, kind: int) -> Tensor:
    """Signs of so many terms: a first half and a second, alternating groups of 4, 8 or 16, or the
    larger at both ends."""
    at = torch.arange(count)
    if kind == 0:
        return torch.where(at < (count + 1) // 2, 1.0, -1.0)
    if kind < 4:
        return torch.where(at // (2 << kind) % 2 == 0, 1.0, -1.0)
    return torch.where((at < count // 4) | (at >= count - count // 4), 1.0, -1.0)


def cancelling(problem: Problem, seed: int) -> Inputs:
    """Inputs of the problem's shapes and dtype; rows differ by random factors near 1, and some keys
    are far larger."""
    generator = torch.Generator().manual_seed(seed)

    def rand(shape: tuple[int, ...]) -> Tensor:
        spread = 1.0 if seed % 3 else 0.02
        return 1 - spread * torch.rand(shape, generator=generator)

    dtype, p, kind = dtype_named(problem.dtype).torch, problem, seed % 5
    large = torch.exp2(-torch.randint(0, 6, (p.head_dim,), generator=generator).float())
    q = rand(p.shape_q) * large
    k = rand(p.shape_k) * signs(p.head_dim, kind) * 2.0 ** (seed % 4)
    if seed % 7 == 0:
        k[..., 0] *= 2.0**6
        k[..., -1] *= 2.0**6
    v = rand(p.shape_v) * signs(p.seqlen_kv, kind)[:, None]
    dout = rand(p.shape_out) * signs(p.head_dim_v, kind) * signs(p.seqlen_q, kind)[:, None]
    return Inputs(*(x.to(dtype) for x in (q, k, v, dout)))


def changed(given: Inputs, seed: int) -> Inputs:
    """The same with a few elements multiplied by a power of two or a number near 1."""
    generator = torch.Generator().manual_seed(seed)

    def change(x: Tensor) -> Tensor:
        moved = torch.exp2(torch.randint(-3, 4, x.shape, generator=generator).float())
        moved = moved * (1 + 0.01 * torch.rand(x.shape, generator=generator))
        chosen = torch.rand(x.shape, generator=generator) < 0.05
        return torch.where(chosen, x.float() * moved, x.float()).to(x.dtype)

    return Inputs(*(change(x) for x in (given.q, given.k, given.v, given.dout)))


def ones(problem: Problem, device: str = "cpu") -> dict[str, Tensor]:
    """Factors of inputs that have none."""
    return dict.fromkeys("qkv", torch.ones(problem.batch * problem.heads_q, 1, 1, device=device))


def forward_ratios(
    problem: Problem, kernel: Kernel, luck: Luck, given: Inputs
) -> dict[str, Tensor]:
    """Error over bound of O and LSE of an emulated run."""
    made = Emulation(problem, kernel, luck, ones(problem)).run(given.q, given.k, given.v)
    a = resolve(kernel.numerics, Config(), problem, kernel.arch)
    truth = compute_truth(problem, (given.q, given.k, given.v), [a])
    single = dtype_named("float32")
    out = compare(made.out, truth.out, truth.out_bound, problem.format_out).ratio
    lse = compare(made.lse, truth.lse, truth.lse_bound, single).ratio
    return {"out": out, "lse": lse}


def what_is_saved(problem: Problem, kernel: BackwardKernel, luck: Luck, given: Inputs) -> Result:
    """O and LSE that an emulated backward starts from: of its emulated forward, or exact ones for
    one that computes its own softmax."""
    if kernel.numerics.softmax.source == "own":
        return exact(problem, given)
    device = str(given.q.device)
    forward = Emulation(problem, kernel.forward, luck, ones(problem, device), device=device)
    return forward.run(given.q, given.k, given.v)


def backward_ratios(
    problem: Problem, kernel: BackwardKernel, luck: Luck, given: Inputs, aim: str = "dq"
) -> dict[str, Tensor]:
    """Error over bound of dQ, dK and dV of an emulated run."""
    saved = what_is_saved(problem, kernel, luck, given)
    found = Backward(problem, kernel, luck, aim).run(given, saved)
    a = arithmetic(problem, kernel)
    read = given.q, given.k, given.v, given.dout, saved.out.double(), saved.lse.double()
    truth = gradient_truth(problem, *read, a)
    return {
        n: compare(found[n], getattr(truth, n), getattr(truth, f"{n}_bound"), a.output).ratio
        for n in NAMES
    }


Trial = Callable[[Problem, Luck, Inputs], dict[str, Tensor]]


def of(kernel: Kernel | BackwardKernel) -> Trial:
    """What gives the ratios of that kernel."""
    if isinstance(kernel, Kernel):
        return lambda problem, luck, given: forward_ratios(problem, kernel, luck, given)
    return lambda problem, luck, given: backward_ratios(
        problem, kernel, luck, given, NAMES[given.q.numel() % 3]
    )


def climbed(
    trial: Trial, problem: Problem, seed: int, generations: int
) -> Iterator[tuple[float, int]]:
    """The largest ratio of each input of a climb, one that is changed and kept if it is worse; and
    how many elements were compared."""
    given, kept = cancelling(problem, seed), 0.0
    for step in range(generations):
        tried = changed(given, 1000 * seed + step) if step else given
        luck = Luck.AGAINST if step % 2 else Luck.NEAREST
        ratios = trial(problem, luck, tried)
        largest = max(float(x.nan_to_num(nan=torch.inf).max()) for x in ratios.values())
        if largest >= kept:
            given, kept = tried, largest
        yield largest, sum(x.numel() for x in ratios.values())


IN_ORDER = tuple(
    kernel.but(name=f"{kernel.name}, scores in order", order_head_dim="ascending")
    for kernel in (*HONEST[:6], HONEST[13], HONEST[14])
)
SHAPES = (
    "sq=6,skv=48,d=64",
    "sq=4,skv=129,d=32,dv=16",
    "sq=9,skv=33,d=128,scale=-0.02",
    "hq=4,hkv=2,sq=12,skv=30,d=16,mask=causal",
)


def main(elements: int) -> None:
    """Emulate until so many elements were compared, of all kernels together."""
    kernels = [*HONEST, *IN_ORDER, *BACKWARDS, *UNUSUAL]
    worst: dict[str, float] = {}
    compared = seed = 0
    while compared < elements:
        kernel = kernels[seed % len(kernels)]
        dtype = kernel.dtypes[seed // len(kernels) % len(kernel.dtypes)]
        shape = SHAPES[seed // 3 % len(SHAPES)]
        if isinstance(kernel, BackwardKernel) or kernel.style != "fused" or "scale=-" not in shape:
            problem = Problem.parse(f"{shape},dtype={dtype}")
            found = list(climbed(of(kernel), problem, seed, 4))
            largest = max(ratio for ratio, _ in found)
            worst[kernel.name] = max(worst.get(kernel.name, 0.0), largest)
            compared += sum(count for _, count in found)
            if not largest <= 1:
                print("REFUSED", kernel.name, problem.name, seed, largest, flush=True)
        seed += 1
    for name, ratio in worst.items():
        print(f"{ratio:6.3f}  {name}")
    print(f"{compared} elements, {seed} inputs")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]))
