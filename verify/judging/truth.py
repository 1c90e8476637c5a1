"""Reference and bounds of one case, in fp64, and the time that they took."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from references.row_blocks import RowBlock, row_blocks
from verify.arithmetic.unit import spilled
from verify.cell import device_waits
from verify.cell.device_memory import exhausted, unavailable
from verify.machine import turns
from verify.machine.settings import JUDGE_DEVICE
from verify.problem import Problem
from verify.tolerance import forward as tolerance
from verify.tolerance.forward import ForwardArithmetic
from verify.tolerance.integers import Steps
from verify.tolerance.intervals import Interval
from verify.tolerance.maxima import shared_excess
from verify.tolerance.scaled_output import stored

T = TypeVar("T")
Kept = dict[str, list[RowBlock]]  # of one problem, by the type of the device

# Multiply-adds of one product above which a GPU computes the reference faster than a CPU core.
_WORTH_A_GPU = 2e8
# Multiply-adds that cost as much as what is made from one element of K or V, if rows are chosen.
_LOADS = 16
# Elements of O of which a GPU holds reference and bounds until all are made, 256 MiB at most.
_HELD = 1 << 22
# Elements of a result from which on it comes from a GPU to pinned memory, 1 MiB.
_PINNED = 1 << 17
# Pairs of a query and a key of which a case keeps all that was computed once: 32 bytes each.
_KEPT = 1 << 20
# Pairs from which on a reference leaves gigabytes on a GPU, which kernels need.
_LARGE = 1 << 26
# Elements of one tensor of scores if rows are chosen: the tensors made from V for each block are
# then larger than the block.
_CHOSEN = 1 << 23


@dataclass(frozen=True, kw_only=True)
class _WithoutOut:
    """All of a truth but O and its bound, in fp64 on the CPU: lse and lse_bound (batch, heads_q,
    seqlen_q).

    best_out_bound: the bound of the tightest possible arithmetic of the dtype, if requested.
    interval: where O lies before its last rounding, if the arithmetic declares an order of keys.
    lse_reach: shaped like lse.
    """

    lse: Tensor
    lse_bound: Tensor
    best_out_bound: Tensor | None = None
    interval: Interval | None = None
    # how far the natural LSE may be off before its last sum and product, if they are declared
    lse_reach: Tensor | None = None

    @cached_property
    def empty(self) -> Tensor:
        """Rows that see no key, (batch, heads_q, seqlen_q); not to be changed."""
        return self.lse == -math.inf


@dataclass(frozen=True, kw_only=True)
class Truth(_WithoutOut):
    """Reference and bounds: also out and out_bound (batch, heads_q, seqlen_q, head_dim_v).  Those
    of an 8-bit O are of the numbers that are stored."""

    out: Tensor
    out_bound: Tensor


@dataclass(frozen=True, kw_only=True)
class LateTruth(_WithoutOut):
    """The truth of a problem whose O is needed only where a kernel is wrong.

    make: makes (out, out_bound) when one of them is first read.
    """

    make: Callable[[], tuple[Tensor, Tensor]]

    @cached_property
    def _made(self) -> tuple[Tensor, Tensor]:
        return self.make()

    @property
    def out(self) -> Tensor:
        """As in `Truth`."""
        return self._made[0]

    @property
    def out_bound(self) -> Tensor:
        """As in `Truth`."""
        return self._made[1]


@dataclass(frozen=True)
class Answer:
    """The truth under these arithmetics, computed together with those of other cases."""

    arithmetics: tuple[ForwardArithmetic, ...]
    truth: Truth

    def answers(self, asked: Sequence[ForwardArithmetic]) -> bool:
        """Whether the truth under the asked arithmetics is this, or this without its interval."""
        mine = self.arithmetics
        if list(asked) == list(mine):
            return True
        return list(asked) == [mine[0].without_interval, *mine[1:]]


@dataclass
class Clock:
    """The time of each step of one case, in seconds."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.add(what, time.perf_counter() - begun)

    def add(self, what: str, seconds: float) -> None:
        """Count more seconds for a step."""
        self.seconds[what] = self.seconds.get(what, 0.0) + seconds

    def share(self, other: Clock, part: float = 1.0) -> None:
        """Count a part of another clock's seconds, step by step."""
        for what, seconds in other.seconds.items():
            self.add(what, seconds * part)


def compute_truth(
    p: Problem,
    inputs: tuple[Tensor, Tensor, Tensor],
    arithmetics: list[ForwardArithmetic],
    clock: Clock | None = None,
    rows: Tensor | None = None,
    kept: Kept | None = None,
) -> Truth:
    """Reference and bounds of a problem, block by block; a second arithmetic gives
    `best_out_bound`.

    rows: only these, int64 positions; None: all.
    kept: what an earlier call for the same problem and inputs has computed and put there, if it is
    small, and all rows are asked.
    """
    width, products = p.head_dim + p.head_dim_v, float(p.pairs)
    if rows is not None:
        # What is made from K and V costs as much as so many rows.
        products *= len(rows) / max(p.seqlen_q, 1)
        products += _LOADS * p.batch * p.heads_q * p.seqlen_kv
    return on_device(
        products * width,
        lambda device: compute_truth_on(device, p, inputs, arithmetics, clock, rows, kept),
    )


def compute_truth_on(
    device: torch.device,
    p: Problem,
    inputs: tuple[Tensor, Tensor, Tensor],
    arithmetics: list[ForwardArithmetic],
    clock: Clock | None = None,
    rows: Tensor | None = None,
    kept: Kept | None = None,
) -> Truth:
    """`compute_truth` on that device; the result is on the CPU."""
    clock = clock or Clock()
    count = p.seqlen_q if rows is None else len(rows)
    shape = (p.batch * p.heads_q, count)
    elements = (*shape, p.head_dim_v)
    # Results that are sent one by one wait for each other.
    held = device if math.prod(elements) <= _HELD else torch.device("cpu")
    names = ["out", "out_bound"]
    names += ["best_out_bound"] * (len(arithmetics) > 1)
    names += ["middle", "reach"] * arithmetics[0].ordered
    made: dict[str, Tensor] = {
        name: torch.zeros(elements, dtype=torch.float64, device=held) for name in names
    }
    made["lse"] = torch.full(shape, -math.inf, dtype=torch.float64, device=held)
    made["lse_bound"] = torch.zeros(shape, dtype=torch.float64, device=held)
    if arithmetics[0].log2_sum:
        made["lse_reach"] = torch.zeros_like(made["lse"])
    with clock.timed("generate"):
        q, k, v = (tensor.to(device) for tensor in inputs)
    above = shared_excess(p, q, k, arithmetics[0], rows)
    integers = arithmetics[0].integers
    steps = None if integers is None else Steps.of(p, q, k, integers, rows)
    budget = None if rows is None else _CHOSEN
    blocks = row_blocks(q, k, v, p.attention, rows=rows, budget=budget)
    if kept is not None and rows is None and p.pairs <= _KEPT:
        blocks = _keeping(blocks, kept, device.type)
    while True:
        with clock.timed("reference"):
            block = next(blocks, None)
        if block is None:
            break
        made["out"][block.index] = stored(block.out, p.scaled_output).to(held)
        made["lse"][block.index] = block.lse.to(held)
        with clock.timed("bound"):
            ahead = None if above is None else above[block.index]
            bounds = tolerance.bound(block, arithmetics[0], p, ahead, steps)
            made["out_bound"][block.index] = bounds.out.to(held)
            made["lse_bound"][block.index] = bounds.lse.to(held)
            if bounds.lse_reach is not None:
                made["lse_reach"][block.index] = bounds.lse_reach.to(held)
            if bounds.interval is not None:
                made["middle"][block.index] = bounds.interval.middle.to(held)
                made["reach"][block.index] = bounds.interval.reach.to(held)
            for other in arithmetics[1:]:
                made["best_out_bound"][block.index] = tolerance.bound(block, other, p).out.to(held)
    made = {name: _brought(tensor) for name, tensor in made.items()}
    if rows is None and arithmetics[0].values.spills:
        made["out_bound"] = spilled(made["out_bound"])
    if device.type == "cuda" and p.pairs > _LARGE:
        torch.cuda.empty_cache()  # gigabytes, which other workers on this device need
    viewed: dict[str, Any] = {
        name: tensor.view(p.batch, p.heads_q, *tensor.shape[1:]) for name, tensor in made.items()
    }
    if not arithmetics[0].ordered:
        return Truth(**viewed)
    span = Interval(viewed.pop("middle"), viewed.pop("reach"))
    return Truth(**viewed, interval=span)


def _brought(tensor: Tensor) -> Tensor:
    """The tensor on the CPU.  A large one comes from a GPU to pinned memory, which torch keeps for
    the next one: new pages cost more than the copy."""
    if not tensor.is_cuda or tensor.numel() < _PINNED:
        return tensor.cpu()
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)


def _keeping(blocks: Iterator[RowBlock], kept: Kept, device: str) -> Iterator[RowBlock]:
    """The kept blocks, or these, which are kept when all of them are made."""
    if device not in kept:
        made = []
        for block in blocks:
            made.append(block)
            yield block
        kept[device] = made
        return
    yield from kept[device]


def on_device(products: float, compute: Callable[[torch.device], T]) -> T:
    """The result of `compute` on the device that suits so many multiply-adds.

    Kernels and other workers use the same GPU: if its memory is full, or if it lets no further
    process use it, the CPU computes instead.
    """
    device = device_for(products)
    if device.type == "cpu":
        return compute(device)
    try:
        with turns.GPU.shared():
            return compute(device)
    except RuntimeError as error:
        if not (exhausted(error) or unavailable(error)):
            raise
    with contextlib.suppress(RuntimeError):  # without a context there is nothing to free
        torch.cuda.empty_cache()
    return compute(torch.device("cpu"))


def device_for(products: float) -> torch.device:
    """The device on which a reference of so many multiply-adds is computed: as
    VERIFY_JUDGE_DEVICE says, by default a GPU for large ones."""
    asked = os.environ.get(JUDGE_DEVICE, "auto")
    wanted = asked == "cuda" or (asked == "auto" and products > _WORTH_A_GPU)
    if not (wanted and torch.cuda.is_available()):
        return torch.device("cpu")
    device_waits.choose()
    return torch.device("cuda")
