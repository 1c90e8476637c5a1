"""The CuTe backward's own sources on the CPU, as `cute_host` has the forward's: delta, then the
walks over rows and keys, judged by the bounds of the gradients."""

from __future__ import annotations

import ctypes
import math
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from kernels.cuda.family import Launch
from kernels.cute import flash_backward as kernel
from kernels.cute.flash_backward_walks import stages_of
from kernels.masks import mask_build, mask_tables
from tests.harness.backward_inputs import Inputs, exact
from tests.harness.cute_faults import FLOAT16_BITS
from tests.harness.cute_host import (
    ORDERS,
    PROGRAM,
    HostError,
    build,
    compiled_program,
    placed,
)
from verify.judging.comparison import compare
from verify.problem import Problem
from verify.problem.inputs import tensors
from verify.tolerance.backward import GradientTruth, gradient_truth, resolve
from verify.variant import AttentionArgs, Config, Gradients, Saved, Variant

SOURCE = Path(kernel.__file__).with_suffix(".cu")
ATOMIC_ADD = """
inline float atomicAdd(float* to, float x) { float was = *to; *to += x; return was; }
"""
GRADIENTS = ("dq", "dk", "dv")
# An expression of flash_backward.cu, and what it becomes while that fault is planted.
FAULTS = {
    "no delta": ("kKeys ? delta : row_delta(r)", "0.0f"),
    "a key too many": ("key >= seen.high", "key > seen.high"),
    "no mask": ("block < walk.whole.low || block >= walk.whole.high", "false"),
    "S of another P": ("kKeys ? shift : row_shift(r)", "0.0f"),
    "first head of a group alone": ("kKeys ? a.group * blocks : blocks", "blocks"),
    "no scale in dQ or dK": ("sums_x(i) *= a.scale", "sums_x(i) *= 1.0f"),
    "stages mixed up": ("step_yt(_, _, stage)", "step_yt(_, _, 0)"),
    "no scale in the atomic dQ": ("part(i) * a.scale", "part(i)"),
    "P of the bits of float16": ("rounded(scores)", FLOAT16_BITS),
    "dS of the bits of float16": ("rounded(slopes)", FLOAT16_BITS.replace("scores", "slopes")),
    # Right wherever the first row that sees a tile of keys begins a step, as under a square causal
    # mask with steps that divide the tile.
    "steps begin behind the diagonal": (
        "max(first - a.diagonal_high, 0)",
        "(max(first - a.diagonal_high, 0) + WALKED - 1) / WALKED * WALKED",
    ),
    "no end of rows": ("row < end", "true"),
    # Honest, but in another order than is declared.
    "the first block last": ("step % blocks", "(step + 1) % blocks"),
}


@dataclass(frozen=True)
class Chosen:
    """A variant's source for one config, dtype and head dim."""

    variant: Variant
    config: Config
    dtype: str
    head_dim: int

    @property
    def walks(self) -> kernel.Walks:
        return self.variant.backward.__self__  # type: ignore[union-attr]

    @property
    def launches(self) -> list[Launch]:
        """Those of every kernel."""
        walks = self.walks.of(self.head_dim)
        choice = self.config, self.dtype, self.head_dim
        return [
            kernel.sums_launch(self.dtype, self.head_dim),
            *(self.walks.make(walk, *choice) for walk in walks),
        ]

    @property
    def stages(self) -> set[int]:
        """How many the walks have."""
        return {
            stages_of(walk, self.config, self.head_dim) for walk in self.walks.of(self.head_dim)
        }


@dataclass(frozen=True)
class Ran:
    """What a run left, and the bank conflicts of matrix loads and copies."""

    gradients: dict[str, Tensor]
    conflicts: tuple[int, int]


@dataclass(frozen=True)
class Asked:
    """A problem, the forward's results that a run gets, and the gradients with their bounds."""

    problem: Problem
    saved: Saved
    truth: GradientTruth


@dataclass(frozen=True)
class Program:
    """The kernels of one choice in the shared library."""

    library: ctypes.CDLL
    name: str
    chosen: Chosen

    def problem(self, text: str) -> Problem:
        return Problem.parse(f"{text},d={self.chosen.head_dim},dtype={self.chosen.dtype}")

    def run(
        self,
        problem: Problem,
        saved: Saved,
        *,
        backwards: bool = False,
        late: bool = False,
        given: Mapping[str, Tensor] | None = None,
    ) -> Ran:
        """Raises HostError where the threads of a block part, addresses are bad, or anything but
        the gradients is written.  given: q, k, v and dout, by default the problem's."""
        if given is None:  # q, k and v expanded in their layouts
            given = tensors(problem).named | {"dout": Inputs.of(problem).dout}
        inputs = {name: placed(given[name], problem, name) for name in ("q", "k", "v")}
        args = AttentionArgs(
            **inputs,
            mask=problem.mask,
            softmax_scale=problem.scale,
            score_mod=None,
            config=self.chosen.config,
        )
        dout = placed(given["dout"], problem, "dout")
        results = {f"d{name}": empty_like(problem, name) for name in "qkv"}
        walks = self.chosen.walks
        workspace = {
            name: torch.full(shape, math.nan) for name, (shape, _) in walks.workspace(args).items()
        }
        if "dq_sums" in workspace:
            workspace["dq_sums"].zero_()
        mask = mask_build(args)
        tables = mask_tables(args, mask)
        steps = walks.steps(args, saved, dout, Gradients(**results), workspace, mask, tables)
        conflicts = [0, 0]
        for step in steps:
            made = step.launch
            counted = (ctypes.c_long * 2)()
            sizes = (step.blocks,), (made.threads,), made.shared_bytes
            order = backwards, late
            error = self.launch(made.source.entry, sizes, step.arguments, order, counted)
            if error:
                raise HostError(error.decode())
            conflicts = [a + b for a, b in zip(conflicts, counted, strict=True)]
        if "dq_sums" in workspace:
            results["dq"].copy_(workspace["dq_sums"])
        for name, result in results.items():
            whole = torch.tensor([], dtype=result.dtype).set_(result.untyped_storage())
            beside = int(whole.isnan().logical_not().sum()) - result.numel()
            if beside > 0:
                raise HostError(f"{beside} elements written beside {name}")
        return Ran(results, (conflicts[0], conflicts[1]))

    def launch(
        self,
        entry: str,
        sizes: tuple[tuple[int], tuple[int], int],
        arguments: ctypes.Structure,
        order: tuple[bool, bool] = (False, False),
        conflicts: ctypes.Array[ctypes.c_long] | None = None,
    ) -> bytes:
        """Run a kernel's grid; returns what went wrong, or nothing.

        sizes: of the grid, of a block, and of its shared memory.  order: whether the last warp goes
        first, and whether copies land late.
        """
        run = self.library[f"run_{self.name}_{entry}"]
        run.restype = ctypes.c_char_p
        (grid,), (threads,), shared_bytes = sizes
        counted = (ctypes.c_long * 2)() if conflicts is None else conflicts
        error: bytes = run(ctypes.byref(arguments), grid, threads, shared_bytes, *order, counted)
        return error

    def saved(self, problem: Problem) -> Saved:
        """The exact O and LSE, rounded; O in its layout."""
        made = exact(problem, Inputs.of(problem))
        out = made.out.to(problem.format.torch)
        return Saved(placed(out, problem, "out"), made.lse.float().contiguous())

    def asked(self, text: str) -> Asked:
        """The problem with what its gradients must be."""
        problem = self.problem(text)
        given = Inputs.of(problem)
        saved = self.saved(problem)
        assert self.chosen.variant.gradients is not None
        arithmetic = resolve(self.chosen.variant.gradients, self.chosen.config, problem, "sm_90")
        inputs = (given.q, given.k, given.v, given.dout, saved.out, saved.lse)
        truth = gradient_truth(problem, *(x.double() for x in inputs), arithmetic)
        return Asked(problem, saved, truth)

    def ratios(self, asked: Asked, order: dict[str, bool]) -> dict[str, float]:
        """Each gradient's worst error over its bound, with that order of warps and copies; infinite
        where the run is refused."""
        try:
            ran = self.run(asked.problem, asked.saved, **order)
        except HostError:
            return dict.fromkeys(GRADIENTS, math.inf)
        return {
            name: compare(
                ran.gradients[name],
                getattr(asked.truth, name),
                getattr(asked.truth, f"{name}_bound"),
                asked.problem.format,
            ).worst
            for name in GRADIENTS
        }

    def verdict(
        self, asked: Asked, orders: tuple[dict[str, bool], ...] = ORDERS
    ) -> Iterator[float]:
        """The worst of these, for each order."""
        return (max(self.ratios(asked, order).values()) for order in orders)


def empty_like(problem: Problem, name: str) -> Tensor:
    """NaN in the shape of q, k or v, and in its layout with nothing expanded."""
    layout = problem.layouts[name].gradient
    whole = torch.full(problem.shapes[name], math.nan, dtype=problem.format.torch)
    return placed(whole, replace(problem, **{f"layout_{name}": layout}), name)


def compiled(folder: Path, choices: dict[str, Chosen]) -> Path:
    """The library of all kernels of these choices; CuTe's headers, which take longest, are read
    once."""
    shutil.rmtree(folder, ignore_errors=True)  # what a compilation that failed has left
    program = PROGRAM + ATOMIC_ADD
    for name, chosen in choices.items():
        for launch in chosen.launches:
            source = launch.source
            faults = FAULTS if source.path == SOURCE else {}
            program += build(folder, f"{name}_{source.entry}", launch, faults)
    return compiled_program(folder, program)
