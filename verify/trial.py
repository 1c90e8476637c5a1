"""Trial: one case in court.  One run and one reference serve all oracles that judge the same case."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from references.attention import Attention, row_blocks
from verify.cell.cell import Cell, Reply
from verify.evidence import Finding
from verify.inputs import Inputs, tensors
from verify.memory import Arena, Damage, Plan, plan
from verify.problem import Problem
from verify.tolerance import forward as tolerance
from verify.tolerance.forward import ForwardArithmetic
from verify.variant import Config, Declaration

# Multiply-adds of one product above which a GPU, where there is one, computes the reference faster than one core.
_WORTH_A_GPU = 2e8
_MOST_MEMORY = 8 << 30  # bytes of one run's buffers


@dataclass(frozen=True)
class Run:
    """One launch.  out and lse are raw, as the kernel wrote them, contiguous on the CPU; None unless the reply is ok."""

    reply: Reply
    poison: str
    out: Tensor | None = None
    lse: Tensor | None = None
    damage: Damage | None = None


@dataclass(frozen=True)
class Truth:
    """Reference and bounds, fp64 on the CPU: out and out_bound (batch, heads_q, seqlen_q, head_dim_v), lse and lse_bound.

    best_out_bound is the bound of the tightest honest arithmetic of the dtype, where it was asked for.
    """

    out: Tensor
    lse: Tensor
    out_bound: Tensor
    lse_bound: Tensor
    best_out_bound: Tensor | None = None

    @property
    def empty(self) -> Tensor:
        """Rows that see no key, (batch, heads_q, seqlen_q)."""
        return self.lse == -math.inf


@dataclass
class Clock:
    """Where the time of one case went, in seconds by step."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[what] = self.seconds.get(what, 0.0) + time.perf_counter() - begun


@dataclass
class Trial:
    """One case: problem, the kernel's declaration and config, and lazily its inputs, runs and truth."""

    declaration: Declaration
    config: Config
    problem: Problem
    cell: Cell
    arena: Arena
    arch: str
    with_best: bool = False
    clock: Clock = field(default_factory=Clock)
    scratch_failure: Reply | None = None  # what came of asking for workspaces, if none came
    notes: dict[str, Any] = field(default_factory=dict)  # what an oracle has worked out and will need again, by its name
    _runs: dict[str, Run] = field(default_factory=dict)

    @cached_property
    def inputs(self) -> Inputs:
        """The problem's values."""
        with self.clock.timed("generate"):
            return tensors(self.problem)

    @cached_property
    def plan(self) -> Plan:
        """Where this case's buffers lie."""
        if self.declaration.has_workspace:
            layout = plan(self.problem, lse=self.declaration.contract.lse is not None, workspace={})
            reply = self.cell.workspace(self.declaration.path, self._request(layout))
            if reply.ok:
                try:
                    wanted = {name: (tuple(shape), dtype) for name, (shape, dtype) in reply.data["workspace"].items()}
                    found = plan(self.problem, lse=self.declaration.contract.lse is not None, workspace=wanted)
                    if found.size <= _MOST_MEMORY and all(n >= 0 for shape, _ in wanted.values() for n in shape):
                        return found
                    reply = Reply("breach", f"workspace: {wanted} cannot be had")
                except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
                    reply = Reply("breach", f"workspace: {type(error).__name__}: {error}")
            if reply.status != "unsupported":  # else the run itself refuses, over buffers that can be checked
                self.scratch_failure = reply
            return layout
        return plan(self.problem, lse=self.declaration.contract.lse is not None, workspace={})

    @property
    def first(self) -> Run:
        """The run that most oracles judge."""
        return self.run("first")

    def run(self, tag: str, *, poison: str = "nan", inputs: Inputs | None = None) -> Run:
        """Launch the kernel, once per tag.  `poison` fills outputs and workspaces; `inputs` replace the problem's own."""
        if tag not in self._runs:
            self._runs[tag] = self._launch(poison, self.inputs if inputs is None else inputs)
        return self._runs[tag]

    def _launch(self, poison: str, inputs: Inputs) -> Run:
        with self.clock.timed("generate"):
            where = self.plan
            if self.scratch_failure is not None:
                return Run(self.scratch_failure, poison)
            self.arena.lay(where, inputs, poison)
        with self.clock.timed("run"):
            reply = self.cell.run(self.declaration.path, self._request(self.plan), self.arena)
            if reply.status not in ("ok", "unsupported"):
                return Run(reply, poison)
            out = self.arena.read(self.plan, "out")
            lse = self.arena.read(self.plan, "lse") if "lse" in self.plan else None
            return Run(reply, poison, out, lse, self.arena.damage(self.plan, poison))

    def _request(self, where: Plan) -> dict[str, Any]:
        return {
            "variant": self.declaration.name,
            "config": self.declaration.configs.index(self.config),
            "slots": where.wire(),
            "size": where.size,
            "mask": self.problem.mask.name,
            "softmax_scale": self.problem.scale,
            "softcap": self.problem.softcap,
        }

    @cached_property
    def truth(self) -> Truth:
        """Reference and bounds of the declared arithmetic, and now and then of the best there is."""
        arithmetics = [tolerance.resolve(self.declaration.numerics, self.config, self.problem, self.arch)]
        if self.with_best:
            arithmetics.append(tolerance.resolve(tolerance.BEST, self.config, self.problem, self.arch))
        return compute_truth(self.problem, self.expanded(), arithmetics, self.clock)

    def expanded(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v at their full logical shapes (views)."""
        return at_full_shape(self.problem, self.inputs)

    def natural_lse(self, lse: Tensor) -> Tensor:
        """A raw LSE in the suite's convention, fp64 natural logarithm."""
        factor = math.log(2) if self.declaration.contract.lse == "base2" else 1.0
        return lse.double() * factor


def at_full_shape(problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v expanded to (batch, heads, seqlen, dim)."""
    return inputs.q.expand(problem.shape_q), inputs.k.expand(problem.shape_k), inputs.v.expand(problem.shape_v)


def compute_truth(
    p: Problem, inputs: tuple[Tensor, Tensor, Tensor], arithmetics: list[ForwardArithmetic], clock: Clock | None = None
) -> Truth:
    """Reference and bounds of a problem, block by block; a second arithmetic gives `best_out_bound`."""
    clock = clock or Clock()
    heavy = p.pairs * (p.head_dim + p.head_dim_v) > _WORTH_A_GPU and torch.cuda.is_available()
    device = torch.device("cuda" if heavy else "cpu")
    rows = (p.batch * p.heads_q, p.seqlen_q)
    made: dict[str, Tensor] = {
        "out": torch.zeros(*rows, p.head_dim_v, dtype=torch.float64),
        "lse": torch.full(rows, -math.inf, dtype=torch.float64),
        "out_bound": torch.zeros(*rows, p.head_dim_v, dtype=torch.float64),
        "lse_bound": torch.zeros(rows, dtype=torch.float64),
    }
    if len(arithmetics) > 1:
        made["best_out_bound"] = torch.zeros_like(made["out"])
    with clock.timed("generate"):
        q, k, v = (tensor.to(device) for tensor in inputs)
    blocks = row_blocks(q, k, v, Attention(p.mask, p.scale, p.softcap))
    while True:
        with clock.timed("reference"):
            block = next(blocks, None)
        if block is None:
            break
        made["out"][block.index], made["lse"][block.index] = block.out.cpu(), block.lse.cpu()
        with clock.timed("bound"):
            bounds = tolerance.bound(block, arithmetics[0], p)
            made["out_bound"][block.index], made["lse_bound"][block.index] = bounds.out.cpu(), bounds.lse.cpu()
            for other in arithmetics[1:]:
                made["best_out_bound"][block.index] = tolerance.bound(block, other, p).out.cpu()
    return Truth(**{name: tensor.view(p.batch, p.heads_q, *tensor.shape[1:]) for name, tensor in made.items()})


@dataclass(frozen=True)
class Ruling:
    """What an oracle says of a trial: a finding, or none if it holds; and what it measured on the way."""

    finding: Finding | None = None
    measures: Mapping[str, float] = field(default_factory=dict)


def convict(oracle: str, message: str, *, name: str, bad: Tensor, got: float | str, bound: float | str) -> Ruling:
    """A ruling against `name` ("out", "lse") where `bad`, a boolean tensor, is true."""
    where, count = first_place(name, bad), int(bad.sum())
    return Ruling(Finding(oracle=oracle, message=message, got=got, bound=bound, where=where, count=count, total=bad.numel()))


def place(name: str, index: tuple[int, ...]) -> str:
    """A coordinate in words: out[b=0, h=1, q=5, d=3]."""
    return f"{name}[{', '.join(f'{axis}={i}' for axis, i in zip('bhqd', index, strict=False))}]"


def first(where: Tensor) -> tuple[int, ...]:
    """The first true coordinate of a boolean tensor."""
    return tuple(int(i) for i in where.nonzero()[0])


def first_place(name: str, where: Tensor) -> str:
    """The first true coordinate of a boolean tensor, in words."""
    return place(name, first(where))
