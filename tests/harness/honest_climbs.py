"""Climbs of emulated honest kernels towards the limits of their bounds, for `tests.honest_sweep`.

A climb draws the inputs of many heads at once, changes a twentieth of their elements, and keeps, of
each head, the inputs whose results come nearer to a limit.  Judged are the bound and, where more is
known, the interval before the last rounding.

An element counts once for each exact value that it was judged against.  So a generation counts no
element whose exact value is that of the inputs it was changed from: no input that it depends on
has changed.  Nor does an element count of which nothing is asked (a row without a key, an infinite
bound), or that must be zero (a bound of 0).  All of them are judged.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from tests.harness import honest_backwards, ordered_backwards, ordered_forwards
from tests.harness.backward_inputs import Inputs
from tests.harness.cancelling import IN_ORDER, cancelling, ones, what_is_saved
from tests.harness.emulation import Emulation, Kernel, Luck
from tests.harness.emulation_backward import NAMES, Backward, BackwardKernel
from tests.log_sum_sweep import kernels as of_log_sums
from tests.meta.tolerance.test_tolerance import HONEST as FORWARDS
from verify.arithmetic.dtypes import dtype_named
from verify.judging.comparison import compare
from verify.judging.known_forward import natural_reach
from verify.judging.lattice import explained
from verify.judging.truth import compute_truth_on
from verify.problem import Problem
from verify.problem.distributions import ordinary
from verify.tolerance.backward import gradient_truth
from verify.tolerance.forward import resolve
from verify.variant import Config

GENERATIONS = 6
EVERY = 20  # of so many elements of an input, a generation changes one
BACKWARDS = (
    *honest_backwards.HONEST,
    *honest_backwards.UNUSUAL,
    *honest_backwards.ALPHA,
    *ordered_backwards.HONEST,
)
# Heads climb by themselves.  Most elements are of shapes with many rows of few keys: with a narrow
# V for LSE, of which a row has one, with a wide one for O.  The others have longer sums, and masks.
FORWARD_SHAPES = (
    "hq=128,hkv=128,sq=512,skv=5,d=4,dv=1",
    "hq=16,hkv=8,sq=64,skv=70,d=32,mask=window.40.0",
    "hq=32,hkv=32,sq=64,skv=24,d=8,dv=64,scale=1.0",
    "hq=4096,hkv=4096,sq=16,skv=16,d=4,dv=1,mask=causal",
    "hq=128,hkv=128,sq=400,skv=9,d=8,dv=1,scale=1.0",
    "hq=256,hkv=128,sq=200,skv=9,d=16,dv=3",
    "hq=24,hkv=24,sq=40,skv=64,d=24,mask=causal",
    "hq=24,hkv=24,sq=200,skv=40,d=16",
    "hq=128,hkv=128,sq=512,skv=7,d=8,dv=2",
    "hq=16,hkv=16,sq=8,skv=200,d=64",
    "hq=32,hkv=32,sq=256,skv=17,d=8",
)
BACKWARD_SHAPES = (
    "hq=64,hkv=64,sq=24,skv=20,d=64",
    "hq=16,hkv=8,sq=33,skv=40,d=16,mask=causal",
    "hq=12,hkv=12,sq=33,skv=50,d=24,mask=window.20.3",
    "hq=256,hkv=128,sq=16,skv=24,d=32,mask=causal",
    "hq=192,hkv=192,sq=12,skv=12,d=64,scale=0.3",
    "hq=8,hkv=8,sq=24,skv=72,d=64",
    "hq=16,hkv=16,sq=40,skv=48,d=32",
)
_DISTRIBUTIONS = tuple(ordinary())


@dataclass(frozen=True, eq=False)
class Judged:
    """The elements of one tensor: how far each is from a limit (at most 1 if it is accepted), its
    exact value in fp64, and whether anything is asked of it."""

    ratio: Tensor
    exact: Tensor
    asked: Tensor


@dataclass(frozen=True)
class Declared:
    """An emulated kernel in one dtype."""

    kernel: Kernel | BackwardKernel
    dtype: str

    @property
    def name(self) -> str:
        """What the journal calls it."""
        kind = "backward" if isinstance(self.kernel, BackwardKernel) else "forward"
        return f"{kind}: {self.kernel.name}, {self.dtype}"

    @property
    def tensors(self) -> tuple[str, ...]:
        """What it computes."""
        return NAMES if isinstance(self.kernel, BackwardKernel) else ("out", "lse")

    def problem(self, turn: int, batch: int = 1) -> Problem:
        """The problem of a climb.  Every other turn has one of the distributions; declarations
        begin with different ones."""
        shapes = BACKWARD_SHAPES if isinstance(self.kernel, BackwardKernel) else FORWARD_SHAPES
        text = f"b={batch},{shapes[turn % len(shapes)]},dtype={self.dtype}"
        problem = Problem.parse(text + (",out=bfloat16" if "float8" in self.dtype else ""))
        drawn = (zlib.crc32(self.name.encode()) + turn // 2) % len(_DISTRIBUTIONS)
        return replace(problem, distribution=_DISTRIBUTIONS[drawn], seed=turn)

    def judged(
        self, problem: Problem, luck: Luck, given: Inputs, aim: str, turn: int
    ) -> dict[str, Judged]:
        """By tensor, the elements of one emulated run, on the inputs' device."""
        if isinstance(self.kernel, BackwardKernel):
            kernel = ordered_backwards.turned(self.kernel, turn)
            return _of_gradients(problem, kernel, luck, given, aim if aim in NAMES else "dq")
        return _of_forward(problem, self.kernel, luck, given)


def declared() -> dict[str, Declared]:
    """Every declaration of the harness, by name."""
    kernels = (*FORWARDS, *IN_ORDER, *ordered_forwards.HONEST, *of_log_sums(), *BACKWARDS)
    found = (Declared(kernel, dtype) for kernel in kernels for dtype in kernel.dtypes)
    return {one.name: one for one in found}


def _of_forward(problem: Problem, kernel: Kernel, luck: Luck, given: Inputs) -> dict[str, Judged]:
    place = given.q.device
    emulation = Emulation(problem, kernel, luck, ones(problem, str(place)), device=str(place))
    made = emulation.run(given.q, given.k, given.v)
    arithmetic = resolve(kernel.numerics, Config(block_m=kernel.tile), problem, kernel.arch)
    truth = compute_truth_on(place, problem, (given.q, given.k, given.v), [arithmetic])
    live, single = ~truth.empty.to(place), dtype_named("float32")
    of_out, of_lse = (
        (exact.to(place), bound.to(place))
        for exact, bound in ((truth.out, truth.out_bound), (truth.lse, truth.lse_bound))
    )
    out = compare(made.out, *of_out, problem.format_out).ratio
    lse = compare(made.lse, *of_lse, single).ratio
    if truth.interval is not None:
        span = truth.interval.to(place)
        out = torch.maximum(out, explained(made.out, span.middle, span.reach, problem.format_out))
    if truth.lse_reach is not None:
        reach = natural_reach(of_lse[0], truth.lse_reach.to(place))
        lse = torch.maximum(lse, explained(made.lse, *reach, single))
    seen = live[..., None]
    return {
        "out": Judged(torch.where(seen, out, 0.0), of_out[0], seen & _asked(of_out[1])),
        "lse": Judged(torch.where(live, lse, 0.0), of_lse[0], live & _asked(of_lse[1])),
    }


def _of_gradients(
    problem: Problem, kernel: BackwardKernel, luck: Luck, given: Inputs, aim: str
) -> dict[str, Judged]:
    saved = what_is_saved(problem, kernel, luck, given)
    device = str(given.q.device)
    found = Backward(problem, kernel, luck, aim, device=device).run(given, saved)
    arithmetic = honest_backwards.arithmetic(problem, kernel)
    read = given.q, given.k, given.v, given.dout, saved.out.double(), saved.lse.double()
    truth = gradient_truth(problem, *read, arithmetic)
    judged = {}
    for name in NAMES:
        exact, bound = getattr(truth, name), getattr(truth, f"{name}_bound")
        ratio = compare(found[name], exact, bound, arithmetic.output).ratio
        if truth.intervals is not None:
            span = truth.intervals[name]
            part = explained(found[name], span.middle, span.reach, arithmetic.output)
            ratio = torch.maximum(ratio, part)
        judged[name] = Judged(ratio, exact, _asked(bound))
    return judged


def _asked(bound: Tensor) -> Tensor:
    return (bound > 0) & (bound < torch.inf)


@dataclass
class Climbed:
    """What one climb judged: by tensor how many elements it counts, how many were refused, and the
    largest part of a limit that one needed."""

    counted: dict[str, int] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)
    worst: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, judged: Judged, before: Tensor | None) -> None:
        """Count the elements of a tensor of one run.  before: the exact values of the run whose
        inputs were changed."""
        sure = judged.ratio.nan_to_num(nan=torch.inf)
        fresh = judged.asked
        if before is not None:
            fresh = fresh & ((judged.exact - before).abs() > 2.0**-40 * before.abs())
        self.counted[name] = self.counted.get(name, 0) + int(fresh.sum())
        self.refused[name] = self.refused.get(name, 0) + int((sure > 1).sum())
        self.worst[name] = max(self.worst.get(name, 0.0), float(sure.max()))


def climb(one: Declared, turn: int, batch: int = 1, device: str = "cpu") -> Climbed:
    """Judge `GENERATIONS` runs, of which each but the first changes what came nearest so far."""
    problem, found = one.problem(turn, batch), Climbed()
    given = cancelling(problem, turn).to(device) if turn % 2 else Inputs.of(problem, device)
    heads = (problem.batch, problem.heads_kv)
    nearest = torch.full(heads, -1.0, dtype=torch.float64, device=device)
    before: dict[str, Tensor] = {}
    for step in range(GENERATIONS):
        tried = moved(given, 1000 * turn + step) if step else given
        aim = one.tensors[(turn + step // 2) % len(one.tensors)]
        luck = Luck.AGAINST if step % 2 else Luck.NEAREST
        judged = one.judged(problem, luck, tried, aim, turn)
        for name, each in judged.items():
            found.add(name, each, before.get(name))
        each = judged[aim].ratio.nan_to_num(nan=torch.inf).flatten(2).amax(2)
        each = each.unflatten(1, (problem.heads_kv, -1)).amax(2)
        better = each >= nearest
        nearest = torch.where(better, each, nearest)
        given = _kept(better, tried, given)
        before = {
            name: of_heads(better, each.exact, before.get(name, each.exact))
            for name, each in judged.items()
        }
    return found


def moved(given: Inputs, seed: int) -> Inputs:
    """The same with one of every `EVERY` elements multiplied by a power of two and a number near 1;
    the same on every device."""
    generator = torch.Generator().manual_seed(seed)

    def change(x: Tensor) -> Tensor:
        count = -(-x.numel() // EVERY)
        largest = dtype_named(str(x.dtype).removeprefix("torch.")).max
        at = torch.randint(EVERY, (count,), generator=generator, device="cpu")
        at += EVERY * torch.arange(count, device="cpu")
        at.clamp_(max=x.numel() - 1)
        power = torch.randint(-3, 4, (count,), generator=generator, device="cpu")
        by = torch.exp2(power.float())
        by *= 1 + 0.01 * torch.rand(count, generator=generator, device="cpu")
        at, by, flat = at.to(x.device), by.to(x.device), x.float().flatten().clone()
        flat[at] = (flat[at] * by).clamp_(-largest, largest)
        return flat.view(x.shape).to(x.dtype)

    return _each(change, given)


def of_heads(better: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """new for those key heads (batch, heads) and their query heads, and old elsewhere."""
    chosen = better.repeat_interleave(new.shape[1] // better.shape[1], 1)
    return torch.where(chosen.view(*chosen.shape, *(1,) * (new.ndim - 2)), new, old)


def _kept(better: Tensor, tried: Inputs, given: Inputs) -> Inputs:
    def choose(new: Tensor, old: Tensor) -> Tensor:
        return of_heads(better, new.float(), old.float()).to(new.dtype)

    return _each(choose, tried, given)


def _each(change: Callable[..., Tensor], *inputs: Inputs) -> Inputs:
    """Inputs of which each tensor is made of those of the given ones."""
    return Inputs(
        change(*(one.q for one in inputs)),
        change(*(one.k for one in inputs)),
        change(*(one.v for one in inputs)),
        change(*(one.dout for one in inputs)),
    )
