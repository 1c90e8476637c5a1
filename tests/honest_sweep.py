"""`python3 -m tests.honest_sweep JOURNAL`: so many honest elements of each tensor and declaration.

Every emulated forward and backward of the harness is judged by its bound and, where more is known,
by the interval before its last rounding.  A climb changes the inputs of many heads at once and
keeps, of each head, those that come nearer to a limit.  The declaration with the fewest elements
comes next, until each tensor of each has as many as asked for, or the time is over.  JOURNAL gets a
line for each climb, so that a sweep goes on where it stopped; with `--show` its counts are printed
and nothing runs.  It ends with 1 if an element was refused.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.harness import honest_backwards, ordered_backwards, ordered_forwards
from tests.harness.backward_inputs import Inputs
from tests.harness.cancelling import IN_ORDER, cancelling, changed, ones, what_is_saved
from tests.harness.emulation import Emulation, Kernel, Luck
from tests.harness.emulation_backward import NAMES, Backward, BackwardKernel
from tests.log_sum_sweep import kernels as of_log_sums
from tests.meta.tolerance.test_tolerance import HONEST as FORWARDS
from verify.arithmetic.dtypes import dtype_named
from verify.judging.comparison import compare
from verify.judging.known_forward import natural_reach
from verify.judging.lattice import explained
from verify.judging.truth import compute_truth
from verify.problem import Problem
from verify.problem.distributions import ordinary
from verify.tolerance import MODEL
from verify.tolerance.backward import gradient_truth
from verify.tolerance.forward import resolve
from verify.variant import Config

ELEMENTS = 1_000_000
GENERATIONS = 6
BACKWARDS = (
    *honest_backwards.HONEST,
    *honest_backwards.UNUSUAL,
    *honest_backwards.ALPHA,
    *ordered_backwards.HONEST,
)
# Many heads, which climb by themselves; of forwards many rows, each of which has one LSE.
FORWARD_SHAPES = (
    "hq=32,hkv=32,sq=256,skv=17,d=8",
    "hq=16,hkv=8,sq=64,skv=70,d=32,mask=window.40.0",
    "hq=32,hkv=32,sq=300,skv=24,d=8,scale=1.0",
    "hq=24,hkv=24,sq=40,skv=64,d=24,mask=causal",
    "hq=24,hkv=24,sq=200,skv=40,d=16",
    "hq=16,hkv=16,sq=8,skv=200,d=64",
    "hq=32,hkv=32,sq=512,skv=9,d=8",
)
BACKWARD_SHAPES = (
    "hq=16,hkv=16,sq=40,skv=48,d=32",
    "hq=16,hkv=8,sq=33,skv=40,d=16,mask=causal",
    "hq=12,hkv=12,sq=33,skv=50,d=24,mask=window.20.3",
    "hq=8,hkv=8,sq=24,skv=72,d=64",
)
_DISTRIBUTIONS = tuple(ordinary())


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

    def problem(self, turn: int) -> Problem:
        """The problem of a climb."""
        shapes = BACKWARD_SHAPES if isinstance(self.kernel, BackwardKernel) else FORWARD_SHAPES
        text = f"{shapes[turn % len(shapes)]},dtype={self.dtype}"
        return Problem.parse(text + (",out=bfloat16" if "float8" in self.dtype else ""))

    def ratios(self, problem: Problem, luck: Luck, given: Inputs, aim: str) -> dict[str, Tensor]:
        """By tensor, how far each element is from a limit: at most 1 if it is accepted."""
        if isinstance(self.kernel, BackwardKernel):
            return _of_gradients(problem, self.kernel, luck, given, aim)
        return _of_forward(problem, self.kernel, luck, given)


def declared() -> dict[str, Declared]:
    """Every declaration of the harness, by name."""
    kernels = (*FORWARDS, *IN_ORDER, *ordered_forwards.HONEST, *of_log_sums(), *BACKWARDS)
    found = (Declared(kernel, dtype) for kernel in kernels for dtype in kernel.dtypes)
    return {one.name: one for one in found}


def _of_forward(problem: Problem, kernel: Kernel, luck: Luck, given: Inputs) -> dict[str, Tensor]:
    made = Emulation(problem, kernel, luck, ones(problem)).run(given.q, given.k, given.v)
    tile = Config(block_m=kernel.tile)
    arithmetic = resolve(kernel.numerics, tile, problem, kernel.arch)
    truth = compute_truth(problem, (given.q, given.k, given.v), [arithmetic])
    single, live = dtype_named("float32"), ~truth.empty
    out = compare(made.out, truth.out, truth.out_bound, problem.format_out).ratio
    lse = compare(made.lse, truth.lse, truth.lse_bound, single).ratio
    if truth.interval is not None:
        span = truth.interval
        out = torch.maximum(out, explained(made.out, span.middle, span.reach, problem.format_out))
    if truth.lse_reach is not None:
        lse = torch.maximum(
            lse, explained(made.lse, *natural_reach(truth.lse, truth.lse_reach), single)
        )
    return {"out": torch.where(live[..., None], out, 0.0), "lse": torch.where(live, lse, 0.0)}


def _of_gradients(
    problem: Problem, kernel: BackwardKernel, luck: Luck, given: Inputs, aim: str
) -> dict[str, Tensor]:
    saved = what_is_saved(problem, kernel, luck, given)
    found = Backward(problem, kernel, luck, aim).run(given, saved)
    arithmetic = honest_backwards.arithmetic(problem, kernel)
    read = given.q, given.k, given.v, given.dout, saved.out.double(), saved.lse.double()
    truth = gradient_truth(problem, *read, arithmetic)
    ratios = {}
    for name in NAMES:
        bound = getattr(truth, f"{name}_bound")
        ratio = compare(found[name], getattr(truth, name), bound, arithmetic.output).ratio
        if truth.intervals is not None:
            span = truth.intervals[name]
            part = explained(found[name], span.middle, span.reach, arithmetic.output)
            ratio = torch.maximum(ratio, part)
        ratios[name] = ratio
    return ratios


@dataclass
class Climbed:
    """What one climb judged: by tensor the elements, how many were refused, and the largest part of
    a limit that one needed."""

    counted: dict[str, int] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)
    worst: dict[str, float] = field(default_factory=dict)

    def add(self, ratios: dict[str, Tensor]) -> None:
        """Count the elements of one run."""
        for name, ratio in ratios.items():
            sure = ratio.nan_to_num(nan=torch.inf)
            self.counted[name] = self.counted.get(name, 0) + sure.numel()
            self.refused[name] = self.refused.get(name, 0) + int((sure > 1).sum())
            self.worst[name] = max(self.worst.get(name, 0.0), float(sure.max()))


def climb(one: Declared, turn: int) -> Climbed:
    """Judge `GENERATIONS` runs, of which each but the first changes what came nearest so far."""
    problem, found = one.problem(turn), Climbed()
    drawn = replace(problem, distribution=_DISTRIBUTIONS[turn % len(_DISTRIBUTIONS)], seed=turn)
    given = cancelling(problem, turn) if turn % 2 else Inputs.of(drawn)
    nearest = torch.full((problem.heads_kv,), -1.0, dtype=torch.float64)
    for step in range(GENERATIONS):
        tried = changed(given, 1000 * turn + step) if step else given
        aim = one.tensors[(turn + step // 2) % len(one.tensors)]
        luck = Luck.AGAINST if step % 2 else Luck.NEAREST
        ratios = one.ratios(problem, luck, tried, aim if aim in NAMES else "dq")
        found.add(ratios)
        each = ratios[aim].nan_to_num(nan=torch.inf)[0].flatten(1).amax(1)
        each = each.view(problem.heads_kv, -1).amax(1)
        better = each >= nearest
        nearest = torch.where(better, each, nearest)
        given = _kept(better, tried, given)
    return found


def _kept(better: Tensor, tried: Inputs, given: Inputs) -> Inputs:
    """The tried inputs of those key heads, with their query heads, and the given ones elsewhere."""

    def choose(new: Tensor, old: Tensor) -> Tensor:
        mask = better.repeat_interleave(new.shape[1] // len(better)).view(1, -1, 1, 1)
        return torch.where(mask, new.float(), old.float()).to(new.dtype)

    return Inputs(
        choose(tried.q, given.q),
        choose(tried.k, given.k),
        choose(tried.v, given.v),
        choose(tried.dout, given.dout),
    )


class Journal:
    """The climbs so far: a file with a line of JSON for each, and their totals by declaration, of
    today's model of the bounds."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.totals: dict[str, Climbed] = {}
        self.turns: Counter[str] = Counter()
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        for line in map(json.loads, lines):
            if line["model"] == MODEL:
                self._count(line)

    def add(self, name: str, found: Climbed) -> None:
        """One more climb."""
        line = {"model": MODEL, "declared": name, **asdict(found)}
        self._count(line)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _count(self, line: dict[str, Any]) -> None:
        self.turns[line["declared"]] += 1
        total = self.totals.setdefault(line["declared"], Climbed())
        for tensor, worst in line["worst"].items():
            total.counted[tensor] = total.counted.get(tensor, 0) + line["counted"][tensor]
            total.refused[tensor] = total.refused.get(tensor, 0) + line["refused"][tensor]
            total.worst[tensor] = max(worst, total.worst.get(tensor, 0.0))


def shown(chosen: dict[str, Declared], totals: dict[str, Climbed], asked: int) -> Iterator[str]:
    """A line for each declaration, and what all of them have."""
    pairs = enough = every = refused = 0
    largest = 0.0
    for name, one in sorted(chosen.items()):
        total = totals.get(name, Climbed())
        counts = [total.counted.get(tensor, 0) for tensor in one.tensors]
        pairs, enough = pairs + len(counts), enough + sum(count >= asked for count in counts)
        every, refused = every + sum(counts), refused + sum(total.refused.values())
        largest = max(largest, *total.worst.values(), 0.0)
        cells = (f"{t} {total.counted[t]:,} ({w:.4f})" for t, w in total.worst.items())
        yield f"{name}: {', '.join(cells) or 'none'}; {sum(total.refused.values())} refused"
    yield (
        f"{every:,} elements, {refused} refused; {enough} of {pairs} pairs of a tensor and a"
        f" declaration have {asked:,}; largest part of a limit {largest:.6f}"
    )


def main(arguments: list[str] | None = None) -> int:
    """Climb until there are enough elements, or the time is over; 1 if one was refused."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("journal", type=Path)
    parser.add_argument("--elements", type=int, default=ELEMENTS, help="of each tensor")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="the time it has")
    parser.add_argument("--only", default="", help="a part of the name of the declarations")
    parser.add_argument("--share", default="0/1", help="every N-th declaration from I on, I/N")
    parser.add_argument("--show", action="store_true", help="print the counts and run nothing")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    journal, end = Journal(asked.journal), time.monotonic() + asked.seconds
    first, step = map(int, asked.share.split("/"))
    named = {name: one for name, one in declared().items() if asked.only in name}
    chosen = dict(list(named.items())[first::step])

    def least(name: str) -> int:
        return min(journal.totals.get(name, Climbed()).counted.values(), default=0)

    while not asked.show and time.monotonic() < end:
        name = min(chosen, key=least)
        if least(name) >= asked.elements:
            break
        turn = journal.turns[name]
        found = climb(chosen[name], turn)
        journal.add(name, found)
        if any(found.refused.values()):
            print(f"REFUSED {found.refused} in climb {turn} of {name}", flush=True)
    print(*shown(chosen, journal.totals, asked.elements), sep="\n")
    return int(
        any(sum(journal.totals[name].refused.values()) for name in chosen if name in journal.totals)
    )


if __name__ == "__main__":
    sys.exit(main())
